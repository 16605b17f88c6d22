"""Files of measured rows under attack: none makes a call raise or wait, and no kill loses a row.

`TURNOUT_MUTATED=10000 TURNOUT_KILLS=50 pytest tests/faults/test_tables.py` (`make fault-test`) is the long
form.
"""

import json
import os
import random
import re
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import turnout
from tests import walk
from tests.unit.test_table import mutated, row, vectors
from turnout import cli, doctor
from turnout.ops.dot import DOT
from turnout.routing import store
from turnout.routing.choose import plain
from turnout.routing.device import Device
from turnout.routing.op import forget_choices
from turnout.routing.row import Row
from turnout.routing.store import export, folder, publish
from turnout.routing.table import Tables, forget_tables
from turnout.routing.versions import for_device

MUTATED = int(os.environ.get("TURNOUT_MUTATED", "2000"))
KILLS = int(os.environ.get("TURNOUT_KILLS", "10"))
CPU = Device.of("cpu")
BATCH = 200

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def measured():
    """A call of every CPU route, and a row in which that route is the fastest."""
    rows = []
    for op, route in walk.ON_CPU:
        [args] = walk.calls(op, route, walk.CPU, CPU, 1)
        problem = op.problem(*args)
        each_row = Row(
            op=op.name,
            problem={name: plain(value) for name, value in problem._asdict().items()},
            us={"reference": 10.0, route.name: 1.0},
            error={"reference": 0.0},
            config={route.name: dict(route.configs(problem, CPU)[0])},
            version={route.name: route.version},
            code_hash={route.name: route.code_hash},
            versions=for_device("cpu"),
            machine=Device.of("cpu").machine,
        )
        rows.append((op, args, each_row))
    return rows


def ask_everything(measured):
    """A call, an explanation of every op, and what `turnout doctor` says of the tables as they lie there."""
    forget_tables()
    forget_choices()
    for op, args, _ in measured:
        assert op.verdict(op.key(args)).chosen
    assert turnout.dot(*vectors()).item() == 4096
    [check] = [check for check in doctor.tables() if check.what == "rows for cpu"]
    assert str(check).isprintable()
    return check


# What is done to the text of a row


def other_values(draw, text):
    return json.dumps(mutated(draw, json.loads(text)))


def other_number(draw, text):
    numbers = list(re.finditer(r"(?<=[ \[])-?\d+(\.\d+)?(?=[,\]}\n])", text))
    if not numbers:
        return text + "x"
    place = draw.choice(numbers)
    others = ["NaN", "Infinity", "-Infinity", "1" * 400, "1" * 5000, "-" + "9" * 400, "1e999", "1e308"]
    others += ["-1", "0.5", "1" * 30]
    return text[: place.start()] + draw.choice(others) + text[place.end() :]


def truncated(draw, text):
    return text[: draw.randrange(len(text))]


def with_null_bytes(draw, text):
    place = draw.randrange(len(text))
    return text[:place] + "\0" * draw.choice((1, 4, 1000)) + text[place:]


def with_other_bytes(draw, text):
    content = bytearray(text.encode())
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def encoded(draw, text):
    kind = draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-le", "utf-7", "cp037"))
    return text.encode(kind)


def nested(draw, text):
    depth = draw.choice((10, 300, 900, 5000, 100_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    place = draw.choice((": {", ": [", ": "))
    return text.replace(place, f": {opening * depth}1{closing * depth}, " + '"x": ', 1)


def with_the_same_name_twice(draw, text):
    names = re.findall(r'^ "\w+"', text, re.MULTILINE)
    return text.replace("{", "{" + f"{draw.choice(names)}: {draw.choice(('null', '{}', '1'))},", 1)


def with_strange_texts(draw, text):
    texts = re.findall(r'"[^"\n]*"', text)
    strange = ["[/bold]", "[red]", "\\u001b[2J", "\\ud800", "%s{0}", "\\n\\r", "x" * 100_000, "\u202e"]
    strange += ["../../etc", "__class__", "1" * 5000 + ".1"]
    return text.replace(draw.choice(texts), f'"{draw.choice(strange)}"', draw.choice((1, -1)))


ATTACKS = (
    other_values,
    other_values,
    other_values,
    other_number,
    truncated,
    with_null_bytes,
    with_other_bytes,
    encoded,
    nested,
    with_the_same_name_twice,
    with_strange_texts,
)


def attacked(draw, each_row):
    text = json.dumps(each_row.json(), indent=1)
    content = draw.choice(ATTACKS)(draw, text)
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content


def of_another_schema(draw, text):
    schemas = ("1", "3", "null", '"2"', "[2]", "2.5", "1" * 400, "[" * 900 + "]" * 900, "true", "{}")
    return text.replace('"schema": 2', f'"schema": {draw.choice(schemas)}')


def with_rows_that_are_no_list(draw, text):
    return text.replace('"rows": [', '"rows": {"a": [').replace("]}\n", "]}}\n")


def with_other_rows(draw, text):
    rows = [mutated(draw, each_row) for each_row in json.loads(text)["rows"]]
    return json.dumps({"schema": 2, "rows": rows})


TABLE_ATTACKS = (
    of_another_schema,
    with_rows_that_are_no_list,
    with_other_rows,
    truncated,
    with_null_bytes,
    with_other_bytes,
    encoded,
)


def test_no_content_of_a_file_raises_and_each_is_a_row_or_one_line_of_doctor(measured):
    draw = random.Random(0)
    place = folder(CPU)
    place.mkdir(parents=True)
    lines = 0
    for _ in range(0, MUTATED, BATCH):
        for i in range(BATCH):
            (place / f"{i}.json").write_bytes(attacked(draw, draw.choice(measured)[2]))
        check = ask_everything(measured)
        here = Tables.for_device(CPU).here
        unreadable = [problem for problem in here.problems if problem.startswith(str(place))]
        assert len(here.rows) + len(unreadable) == BATCH
        assert not any("\n" in problem for problem in here.problems)
        lines += len(here.problems)
        more = len(here.problems) - 3
        assert more <= 0 or f"and {more} more that cannot be read" in check.note
    assert lines > MUTATED / 3


def test_no_content_of_a_shipped_table_raises(measured, tmp_path, monkeypatch):
    draw = random.Random(1)
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    file = tmp_path / "cpu.json"
    for _ in range(MUTATED // 50):
        export([each_row for _, _, each_row in measured], CPU, file)
        content = draw.choice(TABLE_ATTACKS)(draw, file.read_text())
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        ask_everything(measured)
        shipped = Tables.for_device(CPU).shipped
        assert shipped.rows or shipped.problems
        file.unlink()


def test_doctor_lists_rows_that_cannot_count(measured):
    (op, _, each_row), *_ = measured
    unknown = {name: {"block": 7} for name in each_row.config}
    lines = {
        "1 row of ops that are not known: dott (1)": {"op": "dott"},
        "1 row of another machine or other settings: threads 3, vectors none (1)": {
            "machine": {"threads": 3, "vectors": "none"}
        },
        f"1 row of calls or configurations that no route takes: {op.name} (1)": {"config": unknown},
    }
    for line, change in lines.items():
        file = publish(Row(**{**each_row.json(), **change}), CPU)
        assert line in ask_everything(measured).note
        file.unlink()


@pytest.mark.parametrize("name", [b"[red][", b"\xff\xfe", b"\x1b[2J", b"a\nb", "\u202e".encode()])
def test_no_name_of_a_file_ends_doctor(name, measured, monkeypatch):
    place = folder(CPU)
    place.mkdir(parents=True)
    (Path(os.fsdecode(os.fsencode(place) + b"/" + name + b".json"))).write_text("{}")
    ask_everything(measured)
    monkeypatch.setattr(doctor, "routes", list)  # checked elsewhere, and slow
    for arguments in (["doctor"], ["doctor", "--json"]):
        output = CliRunner().invoke(cli.app, arguments)
        assert output.exit_code == 0, output.exception
        assert "a row needs op" in " ".join(output.output.split())  # a narrow screen breaks lines


# Kinds of files


def _device(file):
    try:
        os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        file.symlink_to("/dev/zero")


def _large(file):
    with file.open("wb") as out:
        out.truncate(store.LARGEST + 1)


def _socket(file):
    here = Path.cwd()
    os.chdir(file.parent)  # names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(file.name)
    finally:
        os.chdir(here)


STRANGE = {
    "folder": lambda file: file.mkdir(),
    "fifo": os.mkfifo,
    "socket": _socket,
    "device": _device,
    "terminal": lambda file: file.symlink_to("/dev/tty"),
    "link out": lambda file: file.symlink_to("/etc/passwd"),
    "link to itself": lambda file: file.symlink_to(file),
    "link to nothing": lambda file: file.symlink_to(file.parent / "nothing"),
    "large": _large,
    "empty": lambda file: file.touch(),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", STRANGE)
def test_no_kind_of_file_raises_or_waits(kind, measured, tmp_path, monkeypatch):
    place = folder(CPU)
    place.mkdir(parents=True)
    STRANGE[kind](place / "dot-0.json")
    check = ask_everything(measured)
    assert check.state == "warning"
    assert f"{place / 'dot-0.json'}: " in check.note
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    STRANGE[kind](tmp_path / "shipped" / "cpu.json")
    assert "cpu.json: " in ask_everything(measured).note


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "folder"])
def test_no_kind_of_file_in_place_of_the_folder_raises_or_waits(kind, measured):
    place = folder(CPU)
    place.parent.mkdir(parents=True)
    STRANGE[kind](place)
    check = ask_everything(measured)
    assert check.state == "warning" or kind == "link to nothing"
    with pytest.warns(UserWarning, match="cannot be written"):
        publish(row(), CPU)


def test_files_that_may_not_be_read_are_misses(measured, monkeypatch):
    """As another user, where this one is root and may read everything."""
    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o755)
        monkeypatch.setenv("TURNOUT_CACHE_DIR", cache)
        file, other = publish(row(), CPU), publish(row(5000), CPU)
        file.chmod(0)
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(65534)
            assert f"{file}: Permission denied" in ask_everything(measured).note
            assert [each_row.problem["a"] for each_row in Tables.for_device(CPU).here.rows] == [[5000]]
            if root:
                os.seteuid(0)
            file.parent.chmod(0)
            if root:
                os.seteuid(65534)
            assert f"{other.parent}: Permission denied" in ask_everything(measured).note
        finally:
            if root:
                os.seteuid(0)
            file.parent.chmod(0o755)


def test_a_file_that_goes_away_while_the_folder_is_read_is_a_miss(measured, monkeypatch):
    publish(row(), CPU)
    listing = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda place: [*listing(place), place / "gone.json"])
    forget_tables()
    assert len(Tables.for_device(CPU).here.rows) == 1


def test_what_was_left_by_a_killed_process_is_deleted_an_hour_later():
    publish(row(), CPU)
    old, new = (folder(CPU) / f".{name}.part" for name in ("old", "new"))
    for part in (old, new):
        part.touch()
    os.utime(old, (0, 0))
    publish(row(5000), CPU)
    assert not old.exists()
    assert new.exists()


# Killed in the middle of a write

WRITER = """if True:
    import os, random, signal, sys, time
    import torch, turnout
    from turnout.routing.device import Device
    from turnout.routing.row import Row
    from turnout.routing.store import folder, load_here, publish
    from dataclasses import replace

    torch.set_num_threads(1)
    cpu, draw = Device.of("cpu"), random.Random(0)
    vectors = [torch.ones(n) for n in (64, 128)]
    earlier = [turnout.tune("dot", x, x, budget=0.3, progress=False)[0] for x in vectors]
    lost = torn = written = 0
    for kill in range(int(sys.argv[1])):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            problems = [{**earlier[0].problem, "a": [n], "b": [n]} for n in range(1000, 1100)]
            rows = [replace(earlier[0], problem=problem) for problem in problems]
            turn = 0
            while True:
                turn += 1
                for i, row in enumerate(rows):
                    publish(replace(row, us={**row.us, "reference": float(turn)}), cpu)
                    os.write(writing, bytes([i]))
        os.close(writing)
        os.read(reading, 1)  # it has begun
        time.sleep(draw.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = set()
        while part := os.read(reading, 65536):
            told |= set(part)
        os.close(reading)
        loaded = load_here(cpu)
        sizes = {row.problem["a"][0] for row in loaded.rows}
        lost += len({64, 128} - sizes) + len({1000 + i for i in told} - sizes)
        lost += sum(row not in loaded.rows for row in earlier)
        torn += len(loaded.problems)
        written += len(told)
    print(lost, torn, written, sum(part.suffix == ".part" for part in folder(cpu).iterdir()))
"""


def test_a_kill_loses_no_row_of_an_earlier_tune(tmp_path):
    environment = {**os.environ, "TURNOUT_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WRITER, str(KILLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lost, torn, written, left = map(int, done.stdout.split())
    assert (lost, torn) == (0, 0)
    assert written > 0
    print(f"{KILLS} kills, {lost} rows lost, {torn} files torn, {written} rows written, {left} parts left")


# What a row knows of where it was measured


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_a_row_rules_only_with_as_many_threads_as_it_was_measured_with(monkeypatch):
    a, b = vectors()
    torch.set_num_threads(2)
    [tuned] = turnout.tune("dot", a, b, budget=0.3, progress=False)
    assert tuned.machine["threads"] == 2
    assert tuned.versions["turnout"] == turnout.__version__
    assert turnout.explain("dot", a, b).authority == "measured here"
    torch.set_num_threads(1)
    assert turnout.explain("dot", a, b).authority != "measured here"
    torch.set_num_threads(2)
    assert turnout.explain("dot", a, b).authority == "measured here"


@pytest.mark.usefixtures("_threads")
def test_a_remembered_call_is_chosen_for_again_with_another_number_of_threads(monkeypatch):
    verdicts = []
    choose = DOT.verdict
    monkeypatch.setattr(DOT, "verdict", lambda *args: verdicts.append(choose(*args)) or verdicts[-1])
    for threads, fast in ((2, "cpu-chunks"), (1, "reference")):
        torch.set_num_threads(threads)
        publish(row(fast=fast), Device.of("cpu"))
    forget_tables()
    forget_choices()
    for threads in (2, 2, 1, 1, 2):
        torch.set_num_threads(threads)
        turnout.dot(*vectors())
    assert [verdict.chosen for verdict in verdicts] == ["cpu-chunks", "reference"]
