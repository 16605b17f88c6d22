"""The route and the op that CONTRIBUTING shows work as they stand there: outside of the package, with every
test that a declared route gets."""

import os
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, blocks, titled

CONTRIBUTING = ROOT / "CONTRIBUTING.md"


@pytest.fixture
def declared(tmp_path):
    """Write the titled blocks of CONTRIBUTING as files, and run tests or code that imports them."""
    for block in blocks(CONTRIBUTING):
        if block.title:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_route_takes_fewer_than_25_lines():
    lines = [line for line in titled(CONTRIBUTING, "in_float32.py").splitlines() if line.strip()]
    assert len(lines) < 25


WALKS = (
    "tests/property/test_routes.py",
    "tests/property/test_own_outputs.py",
    "tests/compile/test_compile.py",
)


@pytest.mark.parametrize(
    ("module", "which", "least"),
    [("in_float32", "dot and in-float32", 5), ("squared_relu", "squared_relu", 6)],
)
def test_what_is_declared_passes_the_tests_that_walk_the_registry(declared, module, which, least):
    message = declared(
        "-m", "pytest", "-q", "-p", module, "-p", "no:cacheprovider", "-n", "0", *WALKS, "-k", which
    )
    assert int(message.split(" passed")[0].split()[-1]) >= least


def test_the_route_is_listed_and_the_doctests_that_list_routes_hold(declared):
    assert "in-float32" in declared("-c", "import in_float32, turnout; print(turnout.routes()['dot'])")
    modules = ("src/turnout/asking.py", "src/turnout/routing")
    declared(
        "-m",
        "pytest",
        "-q",
        "-p",
        "in_float32",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "--doctest-modules",
        *modules,
    )


def test_the_op_is_asked_about_pinned_tuned_and_checked(declared):
    code = """
import torch, turnout, doctest
import squared_relu
from squared_relu import squared_relu as function
from turnout import doctor
from turnout.routing.op import OPS

x = torch.randn(64, 64)
assert torch.equal(function(x), torch.relu(x) ** 2)
with turnout.pin(squared_relu="in-place"):
    assert turnout.explain(function, x).authority == "pin"
    y = function(x.requires_grad_())
y.sum().backward()
assert torch.equal(x.grad, 2 * torch.relu(x.detach()))
print(turnout.explain("squared_relu", torch.empty(4096, 12288, device="meta"), device="h200"))
[row] = turnout.tune("squared_relu", x.detach(), budget=0.5, save=False, progress=False)
assert set(row.us) == {"in-place", "reference"}
states = {check.what: check.state for check in doctor.routes([OPS["squared_relu"]])}
assert states["squared_relu in-place on cpu"] == "ok"
assert doctest.testmod(squared_relu).failed == 0
assert torch.compile(function, fullgraph=True, backend="eager")(x).shape == x.shape
"""
    assert "device NVIDIA H200, this route needs a CPU" in declared("-c", code)


def test_the_op_is_known_to_the_command_line(declared):
    code = (
        "import sys, squared_relu; from turnout.cli import app;"
        "sys.argv = ['turnout', 'explain', 'squared_relu', '--x', '4,4']; app()"
    )
    assert "squared_relu(shape=[4, 4]" in declared("-c", code)
