"""The pages that are generated take every kind of row that `make card` writes."""

import json
import shutil

from benchmarks import docs_pages

WITH = {
    "versions": {"torch": "2.11.0+cu130", "triton": "3.6.0"},
    "machine": {"cpu": "EPYC", "cores": 16, "threads": 1, "card": "NVIDIA H200", "driver": "580"},
    "date": "2026-11-01 10:00 UTC",
    "commit": "abc1234",
}
FIRST_CALL = {
    "model": "wan-vae", "size": "full", "what": "Wan 2.1 VAE decode", "dtype": "bfloat16",
    "device": "NVIDIA H200", "cores": 16, "cold_s": 11.2, "second_s": 0.5, "compilations": 36,
    "other_size": [352, 608, 81], "other_size_s": 1.0, "other_size_second_s": 0.4,
    "other_size_compilations": 1, "warm_s": 10.0, "warmed_s": 1.2, "warmed_compilations": 0,
}  # fmt: skip
RANKS = {"model": "wan-vae", "size": "full", "title": "Wan 2.1 VAE decode", "dtype": "bfloat16", "ranks": 8}
OF_RANKS = [{"seconds": 0.1, "messages": 1, "bytes": 8, "message_seconds": 0.1, "peak_mib": 17.0}] * 8
FAKE = {
    "engine": "fake", "one_rank_seconds": 1.0, "one_rank_peak_mib": 100.0, "of_ranks": OF_RANKS,
    "predicted_seconds": 0.14, "predicted_speedup": 7.1,
}  # fmt: skip
HOST = {"op": "conv2d", "case": "128x128", "dtype": "bfloat16", "kind": "convolution", "chosen": "pointwise"}
ROWS = {
    "first-call": [FIRST_CALL, FIRST_CALL | dict.fromkeys(("other_size_s", "warmed_s"))],
    "ranks": [RANKS | FAKE, RANKS | {"engine": "lockstep", "same_bits": True}],
    "router": [HOST | {"torch_us": 30.0, "turnout_us": us, "added_us": us - 30} for us in (18.0, 22.0)],
    "gpu-tests": [
        {"suite": "GPU tests", "tests": 5, "passed": 5, "skipped": 0, "failed": [], "seconds": 1.0}
    ],
    "card": [{"step": "doctor", "state": "done", "seconds": 1.0, "said": ""}],
}


def test_pages_have_what_a_visit_to_a_card_wrote(tmp_path, monkeypatch):
    results = shutil.copytree(docs_pages.RESULTS, tmp_path / "results")
    folder = results / docs_pages.README_DEVICE
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row | WITH) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    races = [json.loads(line) for line in (folder / "race.jsonl").read_text().splitlines()]
    for row in races:
        row["lanes"]["graph"] = row["lanes"]["accelerated"] | {"ms": 2.0}
    (folder / "race.jsonl").write_text("".join(json.dumps(row) + "\n" for row in races))
    monkeypatch.setattr(docs_pages, "RESULTS", results)
    page = docs_pages.device_page(docs_pages.README_DEVICE)
    for said in (
        "11.20 s (36 compiled, then 0.50 s)", "7.10x predicted | 17 (one: 100)", "the same bits",
        "| convolution | 2 | 20.0 us | 30.0 us |", "| 5 | 5 |  |", "turnout, CUDA graphs",
    ):  # fmt: skip
        assert said in page
    assert "CUDA graphs take 2.00 ms." in docs_pages.readme_races()
    (run,) = json.loads(docs_pages.verified())
    assert run == {
        "torch": "2.11.0", "triton": "3.6.0", "card": "NVIDIA H200", "tests": 5, "passed": 5,
        "commit": "abc1234",
    }  # fmt: skip


def test_run_with_a_failure_is_not_called_verified(tmp_path, monkeypatch):
    results = shutil.copytree(docs_pages.RESULTS, tmp_path / "results")
    row = ROWS["gpu-tests"][0] | WITH | {"passed": 4, "failed": ["tests/gpu/test_it.py::test_it"]}
    path = results / docs_pages.README_DEVICE / "gpu-tests.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    monkeypatch.setattr(docs_pages, "RESULTS", results)
    assert json.loads(docs_pages.verified()) == []
    assert "tests/gpu/test_it.py::test_it" in docs_pages.device_page(docs_pages.README_DEVICE)
