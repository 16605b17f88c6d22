"""Stored rows are hints: what cannot be read, is stale, or does not fit is a miss, never an error, and never code."""

import json
import stat
from dataclasses import asdict, replace

import pytest
import torch

import turnout
from tests.walk import ops, random_call
from turnout.ops.dot import DOT
from turnout.routing import table
from turnout.routing.choose import plain
from turnout.routing.device import Device
from turnout.routing.op import forget_choices
from turnout.routing.table import Row, Table, Tables, decode, export, folder, forget_tables, publish

CPU = Device.of("cpu")
ROUTE = DOT.routes["cpu-chunks"]


def row(length=4096, fast="cpu-chunks", **changes):
    us = {"reference": 10.0, "cpu-chunks": 20.0} | {fast: 1.0}
    made = Row(
        op="dot", us=us, version={"cpu-chunks": ROUTE.version}, source={"cpu-chunks": ROUTE.source}, config={"cpu-chunks": {}},
        problem={"a": [length], "b": [length], "a_strides": [1], "b_strides": [1], "a_dtype": "bfloat16", "b_dtype": "bfloat16"},
    )  # fmt: skip
    return replace(made, **changes)


def vectors(length=4096):
    return torch.ones(length, dtype=torch.bfloat16), torch.ones(length, dtype=torch.bfloat16)


def verdict(length=4096):
    forget_tables()
    forget_choices()
    found = turnout.explain("dot", *vectors(length))
    return found.chosen, found.authority


def test_an_entry_made_here_is_taken():
    assert verdict()[1] != "measured here"
    file = publish(row(), CPU)
    assert verdict() == ("cpu-chunks", "measured here")
    assert json.loads(file.read_text())["us"] == {"reference": 10.0, "cpu-chunks": 1.0}
    manifest = json.loads((file.parent / "manifest.json").read_text())
    assert manifest["torch"] == torch.__version__
    publish(row(fast="reference"), CPU)
    assert verdict() == ("reference", "measured here")
    assert sorted(f.name for f in file.parent.iterdir()) == sorted([file.name, "manifest.json"])


def test_shipped_rows_come_after_those_made_here(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "SHIPPED", tmp_path)
    export([row(fast="reference")], CPU, tmp_path / "cpu.json")
    assert verdict() == ("reference", "measured, shipped")
    publish(row(), CPU)
    assert verdict() == ("cpu-chunks", "measured here")


BAD = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not json": lambda text: "import os",
    "a list": lambda text: "[]",
    "a number": lambda text: "3",
    "deep": lambda text: "[" * 100_000,
    "no times": lambda text: text.replace('"us"', '"time"'),
    "times as text": lambda text: text.replace("10.0", '"10.0"'),
    "negative time": lambda text: text.replace("10.0", "-10.0"),
    "not a number": lambda text: text.replace("10.0", "NaN"),
    "no reference": lambda text: text.replace('"reference"', '"refrain"'),
    "another version": lambda text: text.replace('"version": {\n  "cpu-chunks": 1', '"version": {\n  "cpu-chunks": 999'),
    "other source": lambda text: text.replace(ROUTE.source, "0" * 16),
    "unknown config": lambda text: text.replace('"config": {\n  "cpu-chunks": {}', '"config": {\n  "cpu-chunks": {"block": 7}'),
    "config as code": lambda text: text.replace('"config": {\n  "cpu-chunks": {}', '"config": {\n  "cpu-chunks": "__import__(\'os\')"'),
    "unknown dtype": lambda text: text.replace("bfloat16", "bfloat17"),
    "dtype is a module": lambda text: text.replace("bfloat16", "nn"),
    "missing field": lambda text: text.replace('"b_dtype": "bfloat16"', '"c_dtype": "bfloat16"'),
    "wrong type of field": lambda text: text.replace('"a_dtype": "bfloat16"', '"a_dtype": 16'),
    "another op": lambda text: text.replace('"op": "dot"', '"op": "dott"'),
    "op is a list": lambda text: text.replace('"op": "dot"', '"op": ["dot"]'),
}


@pytest.mark.parametrize("damage", BAD, ids=BAD.keys())
def test_damaged_entries_are_misses(damage):
    file = publish(row(), CPU)
    before = file.read_text()
    after = BAD[damage](before)
    assert after != before, "the damage missed"
    file.write_text(after)
    assert verdict()[1] != "measured here"
    assert turnout.dot(*vectors()).item() == 4096


@pytest.mark.parametrize("damage", ["truncated", "empty", "a list", "deep", "times as text"])
def test_damaged_shipped_tables_are_misses(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "SHIPPED", tmp_path)
    export([row()], CPU, tmp_path / "cpu.json")
    assert verdict()[1] == "measured, shipped"
    file = tmp_path / "cpu.json"
    file.write_text(BAD[damage](file.read_text()))
    assert verdict()[1] != "measured, shipped"


def test_a_foreign_schema_is_a_miss(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "SHIPPED", tmp_path)
    export([row()], CPU, tmp_path / "cpu.json")
    file = tmp_path / "cpu.json"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 99'))
    assert verdict()[1] != "measured, shipped"


def test_unreadable_files_are_misses(tmp_path):
    file = publish(row(), CPU)
    file.unlink()
    file.mkdir()  # reading it fails for root too
    assert verdict()[1] != "measured here"


def test_an_unwritable_folder_warns_and_nothing_half_written_stays(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert publish(row(), CPU) is None
    assert verdict()[1] != "measured here"
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(table.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.warns(UserWarning, match="full"):
        assert publish(row(), CPU) is None
    assert not list(folder(CPU).glob("*.part"))
    assert not list(folder(CPU).glob("dot*"))


def test_another_environment_is_another_folder(monkeypatch):
    before = folder(CPU)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert folder(CPU) != before


def test_between_two_measured_sizes_times_are_interpolated():
    publish(row(1000, "reference"), CPU)
    publish(row(1_000_000, "cpu-chunks"), CPU)
    assert verdict(1500) == ("reference", "measured here")
    assert verdict(900_000) == ("cpu-chunks", "measured here")
    assert "between measured sizes 1000 and 1000000" in turnout.explain("dot", *vectors(900_000)).why
    assert verdict(999)[1] != "measured here"  # nothing below: no guess beyond what was measured
    assert verdict(1_000_001)[1] != "measured here"


def test_interpolation_is_on_a_logarithmic_scale():
    rows = Table([row(100, us={"reference": 10.0, "cpu-chunks": 1.0}), row(10_000, us={"reference": 1000.0, "cpu-chunks": 1.0})])
    found = rows.lookup(DOT, DOT.problem(*vectors(1000)), CPU)
    assert found.us["reference"] == pytest.approx(100.0)


def test_export_keeps_other_rows_and_is_one_row_a_line(tmp_path):
    path = tmp_path / "t.json"
    export([row(100), row(200)], CPU, path)
    export([row(200, fast="reference"), row(300)], CPU, path)
    found = json.loads(path.read_text())
    assert [r["problem"]["a"] for r in found["rows"]] == [[100], [200], [300]]
    assert found["rows"][1]["us"]["reference"] == 1.0
    assert len(path.read_text().splitlines()) == 5


def test_shipped_tables_are_live():
    """Every row that ships was measured with the code that ships: same version, same source, a configuration on offer."""
    from turnout.routing.op import OPS
    from turnout.routing.table import SHIPPED

    files = list(SHIPPED.glob("*.json"))
    assert files
    for file in files:
        device = Device.named(file.stem)
        rows = Tables(device).shipped.rows
        assert len(rows) == len(json.loads(file.read_text())["rows"])
        for found in rows:
            op = OPS[found.op]
            problem = decode(op, found.problem)
            assert problem is not None, found
            for name in found.us:
                if name == "reference":
                    continue
                route = op.routes[name]
                assert found.version[name] == route.version, found
                assert found.source[name] == route.source, f"{found.op} {name} was changed after it was measured; run turnout tune --export"
                assert found.config[name] in list(route.configs(problem, device)), found


def test_rows_are_plain_data(tmp_path):
    assert Row.parse(json.loads(json.dumps(asdict(row())))) == row()
    mode = publish(row(), CPU).stat().st_mode
    assert not mode & stat.S_IXUSR


@ops
def test_problems_survive_json(op):
    for seed in range(20):
        problem = op.problem(*random_call(op, seed, torch.device("cpu")))
        told = json.loads(json.dumps({name: plain(value) for name, value in problem._asdict().items()}))
        assert decode(op, told) == problem


def test_what_one_dnn_may_use_is_part_of_a_cpus_folder(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    before = [folder(device) for device in (CPU, Device.named("h200"))]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    after = [folder(device) for device in (CPU, Device.named("h200"))]
    assert before[0] != after[0]
    assert before[1] == after[1]
