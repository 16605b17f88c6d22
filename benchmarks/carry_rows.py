"""Carry measured rows over a change of kernel source that leaves the compiled code as it was.

    python benchmarks/carry_rows.py OLD_COMMIT      # with the Triton that the rows were measured with

A renamed parameter, a comment in inline assembly or a new name for the same builtin changes a kernel's hash,
and its rows no longer count. Here every launch of such a row is compiled for the row's card with the kernels
of OLD_COMMIT and with those of this tree. Where the PTX is the same, line for line without debug information,
the row gets the new hash.
"""

import argparse
import collections
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the commit whose kernels were measured")
    parser.add_argument("--table", type=Path, default=ROOT / "src/turnout/tables/nvidia-h200.json")
    # A tree's own part of the work: the timings in a file.
    parser.add_argument("--digests", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.digests:
        wanted = {tuple(each) for each in json.loads(arguments.digests.read_text())}
        print(json.dumps(digests(arguments.table, wanted)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.digests = Path(folder) / "stale.json"
        arguments.digests.write_text(json.dumps(stale_timings(arguments.table)))
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", arguments.commit, "src"], capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        before, after = (_in_tree(Path(tree), arguments) for tree in (folder, ROOT))
    carry(arguments.table, before, after)


def _in_tree(tree: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """What this script finds with the package of another tree."""
    command = [
        sys.executable,
        str(Path(__file__)),
        arguments.commit,
        "--table",
        str(arguments.table),
        "--digests",
        str(arguments.digests),
    ]
    path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def stale_timings(table: Path) -> list[tuple[str, str]]:
    """The timings that do not count with the kernels of this tree: a row's identity and a route."""
    from turnout.routing.op import OPS
    from turnout.routing.store import load_table
    from turnout.routing.table import stale_routes

    return [(row.identity, name) for row in load_table(table).rows for name in stale_routes(OPS[row.op], row)]


def carry(table: Path, before: dict[str, str], after: dict[str, str]) -> None:
    from turnout.routing.device import Device
    from turnout.routing.op import OPS
    from turnout.routing.store import export, load_table
    from turnout.routing.table import stale_routes

    carried, left = [], collections.Counter()
    for row in load_table(table).rows:
        op = OPS[row.op]
        hashes = dict(row.code_hash)
        for name in stale_routes(op, row):
            key = json.dumps([row.identity, name])
            if name in op.routes and key in before and before[key] == after.get(key) != "":
                hashes[name] = op.routes[name].code_hash
            else:
                left[f"{row.op} {name}"] += 1
        carried += [replace(row, code_hash=hashes)] if hashes != dict(row.code_hash) else []
    export(carried, Device.named(table.stem), table)
    print(f"{len(carried)} rows carried; timings that stay behind: {dict(left) or 'none'}")


def digests(table: Path, wanted: set[tuple[str, str]]) -> dict[str, str]:
    """A hash of all PTX of each of these timings, by row and route; empty where it cannot be compiled."""
    import torch

    from turnout.launch.crosscompile import compile_launches
    from turnout.launch.recording import recorded
    from turnout.routing.case import outline
    from turnout.routing.device import Device
    from turnout.routing.op import OPS
    from turnout.routing.row import decode
    from turnout.routing.store import load_table
    from turnout.routing.versions import minor, triton

    torch.backends.mkldnn.conv.fp32_precision = "tf32"  # pyright: ignore[reportAttributeAccessIssue]
    device = replace(Device.named(table.stem), triton=minor(triton()))
    outlines = {
        op.name: {o.problem: o.args for o in (outline(op, case) for case in op.cases())}
        for op in OPS.values()
    }
    compiled: dict[str, str] = {}
    actual: dict[str, str] = {}
    for row in load_table(table).rows:
        op, problem = OPS[row.op], decode(OPS[row.op], row.problem)
        args = outlines[op.name].get(problem) or _convolution_arguments(problem)
        for name in row.version if args is not None and row.triton == device.triton else ():
            if (row.identity, name) not in wanted or not op.routes[name].kernels:
                continue
            try:
                with recorded(device) as launches:
                    op.routes[name].run(*args, **row.config.get(name, {}))
                texts = []
                for launch in launches:
                    key = str(
                        (
                            launch.kernel.fn.__name__,
                            launch.kernel.fn.__module__,
                            [_kind(x) for x in launch.tensors],
                            launch[3:],
                        )
                    )
                    if key not in compiled:
                        [result] = compile_launches([launch], device)
                        compiled[key] = _without_debug(result.kernel.asm["ptx"])
                    texts.append(compiled[key])
            except Exception as failure:
                print(f"{row.op} {name}: {type(failure).__name__}: {failure}", file=sys.stderr)
                texts = []
            actual[json.dumps([row.identity, name])] = (
                hashlib.sha256("".join(texts).encode()).hexdigest() if texts else ""
            )
    return actual


def _kind(x: object) -> object:
    return (
        None
        if x is None
        else (getattr(x, "dtype", None), getattr(x, "block_shape", None), str(getattr(x, "layout", "")))
    )


def _without_debug(ptx: str) -> str:
    """PTX without comments, line numbers, debug sections, and names that follow from those of functions."""
    ptx = ptx.split("\t.section\t.debug_abbrev")[0]
    lines = (line.split("//")[0].rstrip() for line in ptx.splitlines())
    kept = [line for line in lines if line and not re.match(r"\s*\.(loc|file)\b|\$L__tmp|\$L__func", line)]
    entry = re.search(r"\.entry (\w+)", ptx)
    return "\n".join(kept).replace(entry[1] if entry else "\0", "kernel")


def _convolution_arguments(problem: object) -> tuple | None:
    """Arguments on the meta device of a convolution that no case has: a model's call that was tuned."""
    import torch

    from turnout.ops.causal_conv3d import CausalConv3d
    from turnout.ops.convolution.problem import Convolution

    def empty(shape, strides, dtype):
        return None if shape is None else torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    conv = problem.convolution if isinstance(problem, CausalConv3d) else problem
    if not isinstance(conv, Convolution):
        return None
    bias = (
        None if conv.bias_dtype is None else torch.empty(conv.weight[0], dtype=conv.bias_dtype, device="meta")
    )
    first = (
        empty(conv.input, conv.input_strides, conv.dtype),
        empty(conv.weight, conv.weight_strides, conv.weight_dtype),
        bias,
    )
    residual = None if conv.residual is None else empty(*conv.residual)
    rest = list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups
    if isinstance(problem, CausalConv3d):
        cache = None if problem.cache is None else empty(*problem.cache)
        return (*first, cache, rest[0], rest[1][1:], *rest[2:], problem.pad_mode, residual)
    return (*first, *rest, residual)


if __name__ == "__main__":
    main()
