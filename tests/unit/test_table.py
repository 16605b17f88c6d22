"""Stored rows are hints: what cannot be read, is stale or does not fit is a miss, never an error, and never
code.
"""

import json
import os
import random
import socket
import stat
from dataclasses import replace

import pytest
import torch

import turnout
from tests.walk import ops, random_call
from turnout.ops.dot import DOT
from turnout.routing import store, table
from turnout.routing.choose import plain
from turnout.routing.device import Device, known_cards
from turnout.routing.op import OPS, Key, forget_choices
from turnout.routing.row import Row, Unreadable, decode
from turnout.routing.store import export, folder, load_table, publish
from turnout.routing.table import Table, Tables, forget_tables, stale_routes
from turnout.routing.versions import for_device

CPU = Device.of("cpu")
H200 = Device.named("h200")
ROUTE = DOT.routes["cpu-chunks"]


def row(length=4096, fast="cpu-chunks", **changes):
    us = {"reference": 10.0, "cpu-chunks": 20.0} | {fast: 1.0}
    each_row = Row(
        op="dot",
        us=us,
        version={"cpu-chunks": ROUTE.version},
        code_hash={"cpu-chunks": ROUTE.code_hash},
        config={"cpu-chunks": {}},
        problem={
            "a": [length],
            "b": [length],
            "a_strides": [1],
            "b_strides": [1],
            "a_dtype": "bfloat16",
            "b_dtype": "bfloat16",
        },
        versions=for_device("cpu"),
        machine=Device.of("cpu").machine,
    )
    return replace(each_row, **changes)


def vectors(length=4096):
    return torch.ones(length, dtype=torch.bfloat16), torch.ones(length, dtype=torch.bfloat16)


def explained(length=4096, **kwargs):
    forget_tables()
    forget_choices()
    return turnout.explain("dot", *vectors(length), **kwargs)


def verdict(length=4096):
    explanation = explained(length)
    return explanation.chosen, explanation.authority


def test_rows_measured_here_are_used():
    assert verdict()[1] != "measured here"
    file = publish(row(), CPU)
    assert verdict() == ("cpu-chunks", "measured here")
    written = json.loads(file.read_text())
    assert written["us"] == {"reference": 10.0, "cpu-chunks": 1.0}
    assert written["versions"]["torch"] == torch.__version__
    assert written["versions"]["turnout"] == turnout.__version__
    assert written["machine"]["threads"] == torch.get_num_threads()
    publish(row(fast="reference"), CPU)
    assert verdict() == ("reference", "measured here")
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_rows_measured_here_come_before_shipped_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    export([row(fast="reference")], CPU, tmp_path / "cpu.json")
    assert verdict() == ("reference", "measured, shipped")
    publish(row(), CPU)
    assert verdict() == ("cpu-chunks", "measured here")


def test_a_row_of_other_versions_still_rules_and_says_so():
    publish(row(versions={"turnout": "0.0.1", "torch": "2.9.0+cu128", "numba": "0.1"}), CPU)
    explanation = explained()
    assert explanation.chosen == "cpu-chunks"
    assert explanation.why.endswith("measured here with torch 2.9.0, numba 0.1")


def test_a_row_of_another_number_of_threads_does_not():
    publish(row(), CPU)
    assert verdict() == ("cpu-chunks", "measured here")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        forget_choices()
        assert turnout.explain("dot", *vectors()).authority != "measured here"
    finally:
        torch.set_num_threads(threads)
    assert verdict() == ("cpu-chunks", "measured here")


def test_of_several_tritons_the_nearest_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    route = DOT.routes["two-stage"]

    def measured(triton, us):
        return row(
            us={"reference": 100.0, "two-stage": us},
            version={"two-stage": route.version},
            code_hash={"two-stage": route.code_hash},
            config={"two-stage": {"block": 2048, "warps": 4, "waves": 8}},
            versions={"torch": "2.11.0", "triton": triton},
            machine={},
        )

    export([measured("3.6.0", 10.0), measured("3.9.0", 90.0)], H200, tmp_path / "nvidia-h200.json")
    assert len(load_table(tmp_path / "nvidia-h200.json").rows) == 2

    def time_with(triton):
        explanation = explained(device=replace(H200, triton=triton))
        return explanation.microseconds["two-stage"], explanation.why.rpartition(" ")[2]

    assert time_with((3, 6)) == (10.0, "3.6.0")
    assert time_with((3, 7)) == (10.0, "3.6.0")
    assert time_with((3, 8)) == (90.0, "3.9.0")
    assert time_with((3, 9)) == (90.0, "3.9.0")
    assert time_with((3, 11)) == (90.0, "3.9.0")
    assert time_with(None) == (90.0, "3.9.0")  # a card that is not here: the newest
    export([measured("3.6.1", 20.0)], H200, tmp_path / "nvidia-h200.json")
    assert time_with((3, 6)) == (20.0, "3.6.1")  # replaces 3.6.0, not 3.9.0
    assert time_with((3, 9)) == (90.0, "3.9.0")


def test_a_configuration_that_is_not_offered_gives_way_only_for_another_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    route = DOT.routes["two-stage"]
    measured = row(
        us={"reference": 100.0, "two-stage": 10.0},
        version={"two-stage": route.version},
        machine={},
        code_hash={"two-stage": route.code_hash},
        config={"two-stage": {"block": 7}},
        versions={"triton": "3.6.0"},
    )
    export([measured], H200, tmp_path / "nvidia-h200.json")
    assert explained(device=replace(H200, triton=(3, 6))).authority == "model"
    other = explained(device=replace(H200, triton=(3, 9)))
    assert other.authority == "measured, shipped"
    assert other.config in list(route.configs(DOT.problem(*vectors()), H200))


def test_sibling_cards_share_rows():
    a, b = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((1, 50_000_000), (50_000_000, 1))
    )
    answer = turnout.explain("matmul", a, b, device="h100-sxm")
    assert answer.authority == "measured on a sibling, NVIDIA H200"
    assert answer.chosen == turnout.explain("matmul", a, b, device="h200").chosen
    assert turnout.explain("matmul", a, b, device="h100-pcie").authority == "model"
    assert [device.name for device in known_cards() if device.sibling] == ["NVIDIA H100 80GB HBM3"]


BAD = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not json": lambda text: "import os",
    "not utf-8": lambda text: b"\xff\xfe" + text.encode(),
    "a list": lambda text: "[]",
    "a number": lambda text: "3",
    "deep": lambda text: "[" * 100_000,
    "deep inside": lambda text: text.replace('"op": "dot"', '"op": ' + "[" * 5000 + "]" * 5000),
    "no times": lambda text: text.replace('"us"', '"time"'),
    "times as text": lambda text: text.replace("10.0", '"10.0"'),
    "times as truth": lambda text: text.replace("10.0", "true"),
    "negative time": lambda text: text.replace("10.0", "-10.0"),
    "not a number": lambda text: text.replace("10.0", "NaN"),
    "infinite": lambda text: text.replace("10.0", "Infinity"),
    "a number of 400 digits": lambda text: text.replace("10.0", "1" * 400),
    "a number of 5000 digits": lambda text: text.replace("10.0", "1" * 5000),
    "a huge float": lambda text: text.replace("10.0", "1e308"),
    "no reference": lambda text: text.replace('"reference"', '"refrain"'),
    "another version": lambda text: text.replace(
        '"version": {\n  "cpu-chunks": 1', '"version": {\n  "cpu-chunks": 999'
    ),
    "other kernels": lambda text: text.replace(ROUTE.code_hash, "0" * 16),
    "unknown config": lambda text: text.replace(
        '"config": {\n  "cpu-chunks": {}', '"config": {\n  "cpu-chunks": {"block": 7}'
    ),
    "config as code": lambda text: text.replace(
        '"config": {\n  "cpu-chunks": {}', '"config": {\n  "cpu-chunks": "__import__(\'os\')"'
    ),
    "unknown dtype": lambda text: text.replace("bfloat16", "bfloat17"),
    "dtype is a module": lambda text: text.replace("bfloat16", "nn"),
    "missing field": lambda text: text.replace('"b_dtype": "bfloat16"', '"c_dtype": "bfloat16"'),
    "unknown field": lambda text: text.replace('"op": "dot"', '"op": "dot", "more": 1'),
    "wrong type of field": lambda text: text.replace('"a_dtype": "bfloat16"', '"a_dtype": 16'),
    "a size that is text": lambda text: text.replace('"a": [\n   4096', '"a": [\n   "4096"'),
    "a size of 100 digits": lambda text: text.replace('"a": [\n   4096', '"a": [\n   ' + "9" * 100),
    "another op": lambda text: text.replace('"op": "dot"', '"op": "dott"'),
    "op is a list": lambda text: text.replace('"op": "dot"', '"op": ["dot"]'),
    "problem is a list": lambda text: text.replace('"problem": {', '"problem": [1], "p": {'),
    "versions are numbers": lambda text: text.replace(f'"torch": "{torch.__version__}"', '"torch": 2'),
}


@pytest.mark.parametrize("damage", BAD, ids=BAD.keys())
def test_damaged_rows_are_misses(damage):
    file = publish(row(), CPU)
    before = file.read_text()
    after = BAD[damage](before)
    assert after != before, "the damage missed"
    file.write_bytes(after if isinstance(after, bytes) else after.encode())
    assert verdict()[1] != "measured here"
    assert turnout.dot(*vectors()).item() == 4096


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "a list", "deep", "times as text", "a number of 5000 digits"]
)
def test_damaged_shipped_tables_are_misses(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    export([row()], CPU, tmp_path / "cpu.json")
    assert verdict()[1] == "measured, shipped"
    file = tmp_path / "cpu.json"
    file.write_text(BAD[damage](file.read_text()))
    assert verdict()[1] != "measured, shipped"
    assert Tables(CPU).shipped.problems


def test_a_foreign_schema_is_a_miss_and_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    export([row()], CPU, tmp_path / "cpu.json")
    file = tmp_path / "cpu.json"
    file.write_text(file.read_text().replace('"schema": 2', '"schema": 99'))
    assert verdict()[1] != "measured, shipped"
    assert Tables(CPU).shipped.problems == [f"{file}: schema 99, this version of turnout reads 2"]


def _fifo(file):
    os.mkfifo(file)


def _socket(file):
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(file))


def _large(file):
    with file.open("wb") as out:
        out.truncate(17 * 2**20)


STRANGE = {
    "a folder": lambda file: file.mkdir(),
    "a fifo": _fifo,
    "a socket": _socket,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a link out of the folder": lambda file: file.symlink_to("/etc/passwd"),
    "a link to itself": lambda file: file.symlink_to(file),
    "too large": _large,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", STRANGE, ids=STRANGE.keys())
def test_files_that_are_not_regular_are_misses(kind, monkeypatch):
    file = publish(row(), CPU)
    monkeypatch.chdir(file.parent)  # names of sockets are short
    file.unlink()
    STRANGE[kind](file)
    assert verdict()[1] != "measured here"
    [problem] = Tables(CPU).here.problems
    assert problem.startswith(f"{file}: ")


def test_an_unwritable_folder_warns_and_nothing_half_written_stays(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert publish(row(), CPU) is None
    assert verdict()[1] != "measured here"
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.warns(UserWarning, match="full"):
        assert publish(row(), CPU) is None
    assert not list(folder(CPU).iterdir())


def test_a_table_that_cannot_be_written_keeps_what_it_had(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    export([row(100)], CPU, path)
    before = path.read_text()
    monkeypatch.setattr(store.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        export([row(200)], CPU, path)
    assert path.read_text() == before
    assert [f.name for f in tmp_path.iterdir()] == ["t.json"]


def test_between_two_measured_sizes_times_are_interpolated():
    publish(row(1000, "reference"), CPU)
    publish(row(1_000_000, "cpu-chunks"), CPU)
    assert verdict(1500) == ("reference", "measured here")
    assert verdict(900_000) == ("cpu-chunks", "measured here")
    assert "between measured sizes 1000 and 1000000" in turnout.explain("dot", *vectors(900_000)).why
    assert verdict(999)[1] != "measured here"  # nothing below: no guess beyond what was measured
    assert verdict(1_000_001)[1] != "measured here"


def test_interpolation_is_on_a_logarithmic_scale():
    measured = [
        row(100, us={"reference": 10.0, "cpu-chunks": 1.0}),
        row(10_000, us={"reference": 1000.0, "cpu-chunks": 1.0}),
    ]
    actual = Table(measured, CPU, measured_on="here").lookup(DOT, DOT.problem(*vectors(1000)))
    assert actual.us["reference"] == pytest.approx(100.0)


def test_export_keeps_other_rows_and_is_one_row_a_line(tmp_path):
    path = tmp_path / "t.json"
    export([row(100), row(200)], CPU, path)
    export([row(200, fast="reference"), row(300)], CPU, path)
    actual = json.loads(path.read_text())
    assert [r["problem"]["a"] for r in actual["rows"]] == [[100], [200], [300]]
    assert actual["rows"][1]["us"]["reference"] == 1.0
    assert len(path.read_text().splitlines()) == 5


def test_shipped_tables_can_be_read():
    """All of their rows, of ops and routes that exist. Whether the kernels are still those that were measured
    is for `turnout doctor` to say and for the next visit to a card to mend, not for a test to fail."""
    files = list(store.SHIPPED.glob("*.json"))
    assert files
    for file in files:
        device = Device.named(file.stem)
        rows, problems = load_table(file)
        assert not problems
        assert len(rows) == len(json.loads(file.read_text())["rows"])
        for measured in rows:
            op = OPS[measured.op]
            assert decode(op, measured.problem) is not None
            assert {name for name in measured.us if name != "reference"} <= set(op.routes)
            assert measured.versions["triton"]
            assert measured.versions["torch"]
            for name in set(measured.us) - {"reference", *stale_routes(op, measured)}:
                assert measured.config.get(name) is not None
        for op in OPS.values():
            shipped = Tables(device).shipped
            shipped.index(op)
            assert not shipped.problems


def test_a_stale_row_is_a_miss_that_doctor_lists(tmp_path, monkeypatch):
    from turnout import doctor

    publish(row(code_hash={"cpu-chunks": "0" * 16}), CPU)
    forget_tables()
    assert verdict()[1] != "measured here"
    [check] = [check for check in doctor.tables() if check.what == "rows for cpu"]
    assert check.state == "warning"
    assert "1 row measured with kernels that have changed since: dot cpu-chunks (1)" in check.note


def test_a_row_whose_fastest_route_has_changed_is_a_miss_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    routes = {name: DOT.routes[name] for name in ("single-launch", "two-stage")}
    measured = row(
        us={"reference": 50.0, "single-launch": 100.0, "two-stage": 10.0},
        machine={},
        versions={"triton": "3.6.0"},
        version={name: route.version for name, route in routes.items()},
        config={
            "two-stage": {"block": 2048, "warps": 4, "waves": 8},
            "single-launch": {"block": 8192, "warps": 16},
        },
        code_hash={"two-stage": "0" * 16, "single-launch": routes["single-launch"].code_hash},
    )
    export([measured], H200, tmp_path / "nvidia-h200.json")
    assert explained(device="h200").authority == "model"
    slower = replace(measured, us={"reference": 50.0, "single-launch": 5.0, "two-stage": 10.0})
    export([slower], H200, tmp_path / "nvidia-h200.json")
    assert explained(device="h200").chosen == "single-launch"


def test_rows_are_plain_data():
    assert Row.parse(json.loads(json.dumps(row().json()))) == row()
    mode = publish(row(), CPU).stat().st_mode
    assert not mode & stat.S_IXUSR


@ops
def test_problems_survive_json(op):
    for seed in range(20):
        problem = op.problem(*random_call(op, seed, torch.device("cpu")))
        output = json.loads(json.dumps({name: plain(value) for name, value in problem._asdict().items()}))
        assert decode(op, output) == problem


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    7,
    2**63,
    2**70,
    10**400,
    1.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "nn",
    "bfloat16",
    "close",
    [],
    [1],
    [None],
    [[[]]],
    {},
    {"a": 1},
    {"a": {"b": {}}},
    "x" * 10_000,
    [1] * 1000,
]


def mutated(draw, value, depth=0):
    """A JSON value with something in it changed: replaced, taken away, added, renamed."""
    if isinstance(value, dict) and value and (depth == 0 or draw.random() < 0.8):
        value = dict(value)
        name = draw.choice(list(value))
        action = draw.random()
        if action < 0.1:
            del value[name]
        elif action < 0.2:
            value[draw.choice(["", "op", "x", name + "x"])] = value.pop(name)
        elif action < 0.25:
            value["more"] = draw.choice(VALUES)
        else:
            value[name] = mutated(draw, value[name], depth + 1)
        return value
    if isinstance(value, list) and value and draw.random() < 0.7:
        value = list(value)
        i = draw.randrange(len(value))
        value[i : i + 1] = draw.choice([[], [value[i], value[i]], [mutated(draw, value[i], depth + 1)]])
        return value
    return draw.choice(VALUES)


def test_no_mutated_row_raises(tmp_path, monkeypatch):
    """10,000 rows of all ops, each with something changed: what is not a row is a miss, what still is one is
    taken or refused like any other."""
    draw = random.Random(0)
    measured = load_table(store.SHIPPED / "nvidia-h200.json").rows
    rows = [row.json() for row in measured]
    calls = {
        op.name: [decode(op, row.problem) for row in measured if row.op == op.name] for op in OPS.values()
    }
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    misses = 0
    for batch in range(20):
        values = [mutated(draw, draw.choice(rows)) for _ in range(500)]
        head = json.dumps({"schema": 2, "device": "NVIDIA H200"})[:-1]
        (tmp_path / "nvidia-h200.json").write_text(f'{head}, "rows": {json.dumps(values)}}}')
        tables = Tables(H200)
        misses += len(tables.shipped.problems)
        for op in OPS.values():
            for problem in calls[op.name]:
                tables.lookup(op, problem)
            tables.lookup(op, op.problem(*random_call(op, batch, torch.device("cpu"))))
    assert misses > 1000


def test_unreadable_rows_name_the_mistake():
    with pytest.raises(Unreadable, match="us is an object of 2, it needs to be an object of times"):
        Row.parse({**row().json(), "us": {"reference": "1", "cpu-chunks": 2.0}})
    with pytest.raises(Unreadable, match=r"dot.a_dtype is 16, it needs to be dtype"):
        decode(DOT, {**row().problem, "a_dtype": 16})


def test_what_one_dnn_may_use_is_part_of_a_cpus_machine(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    before = [Device.of("cpu").machine, H200.machine]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    after = [Device.of("cpu").machine, H200.machine]
    assert before[0] != after[0]
    assert before[1] == after[1] == {}


def test_tables_are_read_once():
    forget_tables()
    assert table.Tables.for_device(CPU) is table.Tables.for_device(CPU)


WAN = (1, 384, 1, 60, 104)  # two frames are kept before it


def wan_convolution(residual):
    """A convolution of Wan 2.1's decoder, as it is on a card, whose shipped row has no residual."""
    x = torch.empty(WAN, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last_3d)
    weight = torch.empty(384, 384, 3, 3, 3, device="meta", dtype=torch.bfloat16)
    cache = torch.empty(1, 384, 2, 60, 104, device="meta", dtype=torch.bfloat16)
    last = torch.channels_last_3d
    return OPS["causal_conv3d"].problem(
        x,
        weight.to(memory_format=last),
        torch.empty(384, device="meta", dtype=torch.bfloat16),
        cache.to(memory_format=last),
        [1, 1, 1],
        [1, 1],
        [1, 1, 1],
        1,
        "zeros",
        x if residual else None,
    )


def test_a_call_with_a_residual_goes_by_the_row_of_one_without():
    op, shipped = OPS["causal_conv3d"], Tables.for_device(H200).shipped
    plain_row = shipped.lookup(op, wan_convolution(residual=False))
    with_residual = shipped.lookup(op, wan_convolution(residual=True))
    assert "residual" not in plain_row.note
    assert with_residual.note == f"without a residual, {plain_row.note}"
    assert with_residual.us == plain_row.us
    verdict = op.verdict(op_key(wan_convolution(residual=True)), H200)
    assert (verdict.chosen, verdict.authority) == ("implicit-gemm-hopper", "measured, shipped")


def op_key(problem):
    return Key(problem, False, ())


def test_a_call_without_a_residual_takes_no_row_of_one_with_it():
    op, shipped = OPS["causal_conv3d"], Tables.for_device(H200).shipped
    alone = [row for row in shipped.rows if decode_or_none(op, row) == wan_convolution(residual=False)]
    assert alone
    problem = wan_convolution(residual=True)
    beside = plain(problem.convolution.residual)
    changed = [
        replace(
            row, problem={**row.problem, "convolution": with_item(row.problem["convolution"], 11, beside)}
        )
        for row in alone
    ]
    table = Table(changed, H200, measured_on="here")
    assert table.lookup(op, problem) is not None
    assert table.lookup(op, wan_convolution(residual=False)) is None


def decode_or_none(op, row):
    try:
        return decode(op, row.problem) if row.op == op.name else None
    except Unreadable:
        return None


def with_item(values, i, value):
    return [*values[:i], value, *values[i + 1 :]]


def test_a_row_counts_for_other_strides_of_axes_of_length_one():
    op, shipped = OPS["causal_conv3d"], Tables.for_device(H200).shipped
    problem = wan_convolution(residual=False)
    strides = problem.convolution.input_strides
    sliced = problem.convolution._replace(input_strides=(7 * strides[0], 1, 7 * strides[0], *strides[3:]))
    found = shipped.lookup(op, problem._replace(convolution=sliced))
    assert found.us == shipped.lookup(op, problem).us
    assert found.note.startswith("a call of this size measured on")
