"""Fingerprints follow what a timing depends on, and nothing else."""

import hashlib
import importlib.util

import pytest

from turnout.ops.attention import ATTENTION
from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.ops.dot import DOT
from turnout.ops.matmul import MATMUL
from turnout.routing import source

TEXT = '''
from typing import NamedTuple

from turnout.ops.convolution import kernel_routes as others
from turnout.ops.dot.contraction import CPU_DTYPES
from turnout.routing.op import Op

SIZE: int = 4
UNUSED = 1
OP = Op(SIZE, UNUSED) if False else None


class Tile(NamedTuple):
    """Doc."""

    rows: int = 8

    def asked(self):
        return self.rows

    def cost(self):
        return 3


def helper(x: int) -> int:
    """Doc."""
    if x is None:
        raise ValueError(f"{x} is not good")
    return x + SIZE + Tile().asked()


def outer(kernel):
    def cost():
        return 1

    def inner(a):
        return helper(a) * 2

    return inner


bound = outer(None)


@OP.route("name", cost=1)
def route(a, b):
    # a comment
    return helper(a) + b
'''


def fingerprint(tmp_path, text, name="route"):
    file = tmp_path / f"m{abs(hash(text))}.py"
    source._definitions.cache_clear()
    file.write_text(text.replace("@OP.route", "@(lambda *a, **k: lambda f: f)"))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file.write_text(text)
    return source.fingerprint(getattr(module, name))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another"), ('"""Doc."""', '"""Other words."""'), ("UNUSED = 1", "UNUSED = 2"), ("cost=1)", "cost=2)"),
        ("return 3", "return 4"), ("x: int", "x: float"), ("is not good", "is bad"), ("return 1\n", "return 2\n"),
        ("Op(SIZE, UNUSED) if", "Op(UNUSED) if"), ("SIZE: int = 4", "SIZE = 4"),
    ],
)  # fmt: skip
def test_what_does_not_count(tmp_path, old, new):
    assert old in TEXT
    for name in ("route", "bound"):
        assert fingerprint(tmp_path, TEXT.replace(old, new), name) == fingerprint(tmp_path, TEXT, name)


@pytest.mark.parametrize(
    ("old", "new", "of_bound"),
    [
        ("helper(a) + b", "helper(a) - b", False), ("x + SIZE", "x - SIZE", True), ("SIZE: int = 4", "SIZE: int = 8", True),
        ("rows: int = 8", "rows: int = 9", True), ("return self.rows", "return 2 * self.rows", True),
        ("helper(a) * 2", "helper(a) * 3", True),
    ],
)  # fmt: skip
def test_code_it_uses_directly_or_through_others_counts(tmp_path, old, new, of_bound):
    assert old in TEXT
    name = "bound" if of_bound else "route"
    assert fingerprint(tmp_path, TEXT.replace(old, new), name) != fingerprint(tmp_path, TEXT, name)


@pytest.mark.parametrize(
    ("op", "route", "parts"),
    [
        (MATMUL, "two-stage", ["dot/kernels.dot_chunks", "dot/contraction.sums_on_gpu", "ops/launching.launch"]),  # of another op
        (CONV2D, "narrow-out", ["convolution/kernels.narrow_out", "convolution/kernels.product"]),  # imported under another name
        (CONV2D, "narrow-out-hopper", ["convolution/gluon_narrow_kernels.write", "convolution/tiles.NarrowTile.resident"]),  # a method
        (CONV3D, "implicit-gemm-hopper", ["convolution/gluon_kernels.implicit_gemm", "convolution/gluon_kernels.accumulate"]),
        (CONV3D, "implicit-gemm-hopper", ["convolution/launches.bound"]),  # by the function that binds the route
        (ATTENTION, "wide-head-hopper", ["attention/hopper_kernels.softmax", "attention/hopper_kernels.wide_kernel"]),
    ],
)  # fmt: skip
def test_kernels_count(op, route, parts):
    declared = op.routes[route]
    found = {f"{file.parent.name}/{file.stem}.{name}" for file, name in source.followed(declared.run, *filter(None, [declared.bound]))}
    assert set(parts) <= found
    assert not [name for name in found if "refuses" in name or name.endswith("_cost")]


def test_a_kernel_of_the_same_name_elsewhere_does_not():
    """There are three called narrow_out, and two implicit_gemm."""
    for name in ("narrow-out", "implicit-gemm"):
        assert not [file for file, _ in source.followed(CONV2D.routes[name].run) if "gluon" in file.stem]
    assert len({route.source for op in (DOT, MATMUL) for route in op.routes.values()}) == len(DOT.routes) + len(MATMUL.routes)


def test_the_same_in_every_python():
    """Trees differ from version to version in fields that are empty or say nothing, texts in brackets. This is a hash of all of them."""
    text = "def route(a: int, b=(1, 'x')):\n    c, *d = a[b, 1:], *b\n    return (yield c), lambda: (c, d), {**a}, f'{a!r:>{c}}', -1.5e-7"
    written = source._written(source._Bare().visit(source.ast.parse(text).body[0]))
    assert hashlib.sha256(written.encode()).hexdigest()[:16] == "325b97d797a6ef53"
