"""The documentation is true: examples run, commands exist, generated parts are up to date."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import typer.main
from typer.testing import CliRunner

import turnout
from benchmarks import docs_pages
from tests.docs.blocks import DOCS, GENERATED, PAGES, ROOT, blocks, name_of, titled
from turnout.cli import app

WITH_CODE = [
    page for page in PAGES if any(block.language == "python" and not block.title for block in blocks(page))
]


def run_examples(page, tmp_path, *, gpu):
    """Every example of a page, one after the other, as a reader would run them. Where there is no GPU those
    for one run on the CPU, but for those that say that they need it."""
    from diffusers import AutoencoderKLWan

    folder = tmp_path / "vae"
    AutoencoderKLWan(base_dim=4, num_res_blocks=1).save_pretrained(folder)
    names = {"__name__": "__main__", "folder": folder}
    for block in blocks(page):
        if block.language == "python" and not block.title and block.needs_gpu <= gpu:
            text = block.text if gpu else block.text.replace('"cuda"', '"cpu"')
            text = text.replace("50_000_000", "5_000_000")
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_examples_run(page, tmp_path):
    run_examples(page, tmp_path, gpu=False)


def uses_a_gpu(page):
    """Whether an example of the page has to do with a GPU; others do there what they do elsewhere."""
    return any(
        block.needs_gpu or '"cuda"' in block.text
        for block in blocks(page)
        if block.language == "python" and not block.title
    )


@pytest.mark.gpu
@pytest.mark.parametrize("page", [page for page in WITH_CODE if uses_a_gpu(page)], ids=name_of)
def test_examples_for_a_gpu_run(page, tmp_path):
    run_examples(page, tmp_path, gpu=True)


def test_the_script_for_several_gpus_runs_on_two_ranks(tmp_path):
    script = tmp_path / "decode_on_all.py"
    script.write_text(titled(DOCS / "guides" / "several-gpus.md", script.name))
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[1, 3, 5, 32, 64]" in done.stdout


# ---- commands


def commands() -> list:
    return list(_commands())


def _commands():
    """Every line of the documentation that begins with `turnout`, also inside of sentences."""
    for page in PAGES:
        lines = [line for block in blocks(page) if block.language == "" for line in block.text.splitlines()]
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in [*lines, *re.findall(r"`([^`\n]+)`", prose)]:
            line = line.split(" #")[0].strip()
            if re.match(r"turnout( (?!COMMAND)|$)", line) and "..." not in line:
                yield pytest.param(line, id=f"{name_of(page)}: {line}")


@pytest.mark.parametrize("line", commands())
def test_commands_exist_with_their_options(line):
    _, *words = shlex.split(line)
    known = typer.main.get_command(app)
    if not words or words == ["--version"]:
        return
    command = known.commands[words[0]]
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    if words[0] == "explain" and len(words) > 2 and words[1].islower():
        run = CliRunner().invoke(app, words[1:] and words)
        assert run.exit_code == 0, run.output
        return
    unknown = [word for word in words if word.startswith("--") and word not in {*options, "--help"}]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    named = set(re.findall(r"`make ([a-z-]+)`", text))
    named |= {
        target
        for block in blocks(page)
        for target in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)
    }
    assert named <= targets


# ---- links and lengths


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_have_targets(page):
    """To files of the repository; those between pages are checked when the site is built, too."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    there = [target for target in targets if "://" not in target]
    assert [target for target in there if not (page.parent / target).exists()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


MARKDOWN = sorted(
    {
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "src").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    }
    - GENERATED  # tables of results have nine columns
)


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_lines_have_at_most_110_columns(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [f"{i}: {len(line)} columns" for i, line in enumerate(lines, 1) if len(line) > 110] == []


# ---- what must not drift


def test_generated_parts_have_not_drifted():
    stale = [
        path for path, text in docs_pages.pages().items() if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "python -m benchmarks.docs_pages writes them"


def test_drift_is_noticed(monkeypatch):
    """A row that changes, or a page that somebody edits, is told by --check."""
    whole = docs_pages.rows

    def faster(slug, name):
        return [{**row, "speedup": 9.87} if name == "race" else row for row in whole(slug, name)]

    monkeypatch.setattr(docs_pages, "rows", faster)
    assert docs_pages.main(["--check"]) == 1


def test_every_device_with_results_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [slug for slug in docs_pages.slugs() if f"results/{slug}.md" not in navigation] == []
    assert set(docs_pages.notes()["devices"]) == set(docs_pages.slugs())


def test_the_readme_names_every_known_family_of_models():
    from turnout.models.accelerate import MODELS

    message = (ROOT / "README.md").read_text().split("Known models:")[1].split("\n\n")[0]
    words = re.sub(r"[^a-z0-9]", "", message.lower())
    families = {key.split(".")[-2] for key in MODELS}
    names = {re.sub(r"autoencoder_kl_?|transformer_|modeling_|_video|_", "", family) for family in families}
    assert sorted(name for name in names if name not in words) == []


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference" / "python.md").read_text()
    documented = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    public = {getattr(turnout, name) for name in turnout.__all__ if name != "__version__"}
    assert {f"{each.__module__}.{each.__name__}" for each in public} <= documented


def read_by(*folders):
    """The names of environment variables that Python files read."""
    texts = [path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    reading = re.compile(r"environ(?:\.get\(|\[)\s*\"([A-Z_]+)\"")
    return {name for text in texts for name in reading.findall(text)}


def test_every_environment_variable_is_on_its_page_and_no_other():
    page = (DOCS / "reference" / "environment.md").read_text()
    of_the_package, of_the_tests = page.split("Read by the tests")
    names = re.compile(r"`([A-Z]+_[A-Z_]+)`")
    assert set(names.findall(of_the_package)) == read_by("src")
    assert {"TURNOUT_PIN", "TURNOUT_NUMERICS", "TURNOUT_CACHE_DIR"} <= read_by("src")
    assert set(names.findall(of_the_tests)) == {
        name for name in read_by("tests") if name.startswith("TURNOUT")
    } - read_by("src")


# ---- the keys of JSON


def documented_keys(heading):
    """The keys that the section of this name tells of."""
    page = (DOCS / "reference" / "json.md").read_text()
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return section, {
        key
        for row in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
        for key in re.findall(r"`([^`]+)`", row)
    }


def printed(*words):
    run = CliRunner().invoke(app, [*words, "--json"])
    assert run.exit_code == 0, run.output
    return [json.loads(line) for line in run.stdout.splitlines() if line[:1] in "{["]


def test_keys_of_doctor():
    _, keys = documented_keys("turnout doctor")
    [output] = printed("doctor")
    assert set(output) == {key for key in keys if "." not in key}
    assert {f"checks[].{key}" for check in output["checks"] for key in check} == {
        key for key in keys if key.startswith("checks[]")
    }
    section, _ = documented_keys("turnout doctor")
    assert all(f"`{key}`" in section or f"`environment.{key}`" in section for key in output["environment"])


def test_keys_of_explain():
    _, keys = documented_keys("turnout explain")
    [output] = printed("explain", "dot", "--a", "3", "--b", "3")
    assert set(output) == keys


def test_keys_of_bench(tmp_path):
    section, keys = documented_keys("turnout bench")
    output = printed("bench", "dot", "--only", "K=16 float32", "--seconds", "0.05", "--device", "cpu")
    assert {key for row in output for key in row} == keys - {"wrong"}
    [output] = printed("bench", "router")
    assert set(output["dot"]) == {"torch_us", "turnout_us", "added_us"}
    assert all(f"`{key}`" in section for row in output.values() for key in row)
    [output] = printed("bench", "refit", "--device", "h200")
    assert all(f"`{key}`" in section for constant in output for key in constant)
    [output] = printed("bench", "dot", "--missing", "--device", "4090")
    assert all(set(row) == {"op", "case"} for row in output)


def test_keys_of_a_wrong_row(monkeypatch):
    from turnout.bench import sweep

    monkeypatch.setattr(sweep.Verifier, "mismatch", lambda *_: "another number")
    run = CliRunner().invoke(app, ["bench", "dot", "--only", "K=16 float32", "--device", "cpu", "--json"])
    assert run.exit_code == 1
    [row] = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    _, keys = documented_keys("turnout bench")
    assert "wrong" in row
    assert set(row) <= keys


def test_keys_of_tune():
    _, keys = documented_keys("turnout tune")
    [output] = printed("tune", "dot", "--budget", "1", "--device", "cpu")
    assert {key for row in output for key in row} == keys


def test_keys_of_race():
    section, keys = documented_keys("turnout race")
    words = ("--size", "tiny", "--device", "cpu", "--rounds", "2", "--seconds", "0")
    [row] = printed("race", "flux-vae", *words)
    top, listed = (
        keys - {key for key in keys if "lanes.*" in key},
        {"model", "title", "class", "sizes", "dtypes", "note"},
    )
    assert set(row) == top - (listed - {"model"}) - {"failed"}
    lanes = {key.removeprefix("lanes.*.") for key in keys if key.startswith("lanes.*")}
    assert {key for lane in row["lanes"].values() for key in lane} == lanes - {"failed"}
    for nested in (*row["routes"], row["machine"]):
        assert all(f"`{key}`" in section for key in nested)
    [models] = printed("race", "--list")
    assert all(set(model) == listed for model in models)
    assert listed <= keys


def test_keys_of_race_on_ranks():
    section, keys = documented_keys("turnout race --ranks")
    words = ("wan-vae", "--size", "tiny", "--device", "cpu", "--ranks", "2", "--rounds", "2")
    [fake], [lockstep] = (printed("race", *words, "--engine", engine) for engine in ("fake", "lockstep"))
    assert set(fake) | set(lockstep) == keys
    assert all(f"`{key}`" in section for rank in fake["of_ranks"] for key in rank)


def test_keys_of_warm():
    section, keys = documented_keys("turnout warm")
    run = CliRunner().invoke(
        app, ["warm", "wan-vae", "--size", "tiny", "--device", "h200", "--check", "--json"]
    )
    output = json.loads(run.stdout)
    assert run.exit_code == (0 if output["ready"] else 1), run.output
    assert set(output) == keys
    assert output["kernels"]
    assert all(f"`{key}`" in section for kernel in output["kernels"] for key in kernel)


def test_no_command_has_json_that_is_not_documented():
    page = (DOCS / "reference" / "json.md").read_text()
    commands = typer.main.get_command(app).commands
    with_json = {
        name
        for name, command in commands.items()
        if any("--json" in option.opts for option in command.params)
    }
    assert with_json == set(re.findall(r"^## turnout (\w+)$", page, re.MULTILINE)) == set(commands)


# ---- the site


def test_the_site_builds_without_warnings(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1", "HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr + done.stdout
    page = (tmp_path / "site" / "reference" / "python.html").read_text()
    for name in turnout.__all__:
        if name != "__version__":
            public = getattr(turnout, name)
            assert f'id="{public.__module__}.{name}"' in page, name
    for file in (tmp_path / "site").rglob("*.html"):  # nothing is loaded from elsewhere
        assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?:", file.read_text()), file
