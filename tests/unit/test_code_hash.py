"""A route's hash covers the source of its kernels, and nothing else."""

import hashlib
import re
import sys
from pathlib import Path

import pytest

import turnout
from turnout.routing import code_hash as hashing
from turnout.routing.code_hash import code_hash
from turnout.routing.op import OPS

KERNELS = '''
"""A module docstring."""
import triton
import triton.language as tl
from made_up.shared_kernels import silu as activation
from made_up.launches import HOST

SIZE: tl.constexpr = tl.constexpr(4)
UNUSED = 1


@triton.jit
def helper(x, BLOCK: tl.constexpr):
    """Doc."""
    lane = tl.arange(0, BLOCK)
    return x + lane * SIZE


@triton.jit(do_not_specialize=("count",))
def kernel(x, y, count, BLOCK: tl.constexpr):
    # a comment
    at: tl.constexpr = 3
    total = helper(tl.load(x + at), BLOCK)
    for step in range(count):
        total += activation(step)
    tl.store(y, total)


@triton.jit
def another(x):
    return x
'''
SHARED = """import triton


@triton.jit
def silu(x):
    return x * 2


@triton.jit
def unused(x):
    return x
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Hashes a kernel of a package with these files."""
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(kernels=KERNELS, shared=SHARED, name="made_up.kernels:kernel", file="kernels"):
        for cache in (hashing._module, hashing._digest):
            cache.cache_clear()
        for module in [module for module in sys.modules if module.split(".")[0] == "made_up"]:
            del sys.modules[module]
        folder = tmp_path / "made_up"
        folder.mkdir(exist_ok=True)
        files = {"__init__": "", file: kernels, "shared_kernels": shared, "launches": "HOST = 1\n"}
        for stem, text in files.items():
            (folder / f"{stem}.py").write_text(text)
        return code_hash(name)

    yield hashed
    for cache in (hashing._module, hashing._digest):
        cache.cache_clear()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another"),
        ('"""Doc."""', '"""Other words."""'),
        ("UNUSED = 1", "UNUSED = 2"),
        ("    return x\n", "    return -x\n"),
        ("A module docstring", "Other words"),
        ("total", "acc"),
        ("lane", "offset"),
        ("helper", "part_of_kernel"),
        ("import silu as activation", "import silu as silu_of"),
        ("x, y, count", "a: int, y, count"),
    ],
)
def test_names_comments_and_unused_code_do_not_change_the_hash(package, old, new):
    before = package()
    text = KERNELS.replace(old, new)
    if "silu_of" in new:
        text = text.replace("activation(", "silu_of(")
    if "a: int" in new:
        text = text.replace("tl.load(x + at)", "tl.load(a + at)")
    assert text != KERNELS
    assert package(text) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + lane", "x - lane"),
        ("tl.constexpr(4)", "tl.constexpr(8)"),
        ("range(count)", "range(count + 1)"),
        ("tl.load(x + at)", "tl.load(x)"),
        ('("count",)', "()"),
        ("count, BLOCK: tl.constexpr)", "count, BLOCK)"),
        ("at: tl.constexpr = 3", "at = 3"),
        ("total += activation", "total -= activation"),
    ],
)
def test_changes_of_executed_code_change_the_hash(package, old, new):
    before = package()
    assert KERNELS.replace(old, new) != KERNELS
    assert package(KERNELS.replace(old, new)) != before


def test_other_kernel_files_are_followed_and_host_files_are_not(package, tmp_path):
    before = package()
    assert package(shared=SHARED.replace("x * 2", "x * 3")) != before
    assert package(shared=SHARED.replace("return x\n", "return -x\n")) == before
    (tmp_path / "made_up" / "launches.py").write_text("HOST = 2\n")
    assert package() == before


def test_swapping_two_locals_changes_the_hash(package):
    """Swapping two locals changes the code, renaming both does not."""
    before = package()
    swapped = KERNELS.replace("return x + lane * SIZE", "return lane + x * SIZE")
    assert package(swapped) != before


def test_moving_a_kernel_to_another_file_keeps_its_hash(package):
    assert package() == package(name="made_up.fast_kernels:kernel", file="fast_kernels")


@pytest.mark.parametrize("name", ["made_up.kernels:missing", "made_up.nothing:kernel", "made_up.kernels"])
def test_a_kernel_that_is_not_there_is_named(package, name):
    with pytest.raises(ValueError, match=name.replace(".", r"\.").split(":")[0]):
        package(name=name)


def test_every_declared_kernel_is_there_and_every_hash_is_its_own():
    for op in OPS.values():
        for route in op.routes.values():
            assert len(route.code_hash) == 16, route.name
    conv = OPS["conv2d"].routes
    assert (
        len(
            {
                conv[name].code_hash
                for name in ("implicit-gemm", "implicit-gemm-hopper", "narrow-out", "channels-last")
            }
        )
        == 4
    )
    assert (
        OPS["dot"].routes["two-stage"].code_hash == OPS["matmul"].routes["two-stage"].code_hash
    )  # the same kernel


def test_host_code_does_not_count():
    """The hash of a route is that of its kernels: nothing of launches, guards, costs or routes is read for
    it.
    """
    followed = set()
    for op in OPS.values():
        for route in op.routes.values():
            followed |= {Path(kernel.partition(":")[0].replace(".", "/")).name for kernel in route.kernels}
    assert followed
    assert all(name.endswith("kernels") for name in followed)


def test_every_file_of_kernels_is_followed():
    """A kernel in a file of another name would not count: its rows would stay when it changes."""
    declares = re.compile(r"^@(\w+\.)?(jit|kernel|inlined|intrinsic)\b", re.MULTILINE)
    files = [
        file for file in Path(turnout.__file__).parent.rglob("*.py") if declares.search(file.read_text())
    ]
    assert files
    assert [file.name for file in files if not file.stem.endswith(hashing.FOLLOWED)] == []


def test_the_same_in_every_python():
    """Syntax trees differ from version to version of Python in fields that say nothing."""
    text = """def route(a: int, b=(1, 'x')):
    c, *d = a[b, 1:], *b
    return (yield c), lambda: (c, d), {**a}, f'{a!r:>{c}}', -1.5e-7"""
    written = hashing._serialized(
        hashing._Canonical(lambda name: name).visit(hashing.ast.parse(text).body[0])
    )
    assert hashlib.sha256(written.encode()).hexdigest()[:16] == "8c6e04781c587494"


def test_import_does_not_hash():
    assert turnout.__version__
