"""selective_scan's kernel in Triton's interpreter, where its digits are easily lost.

Collected by tests/interpret/test_interpret.py.
"""

import functools

import pytest
import torch

from tests.walk import CPU
from turnout.measure.verify import Verifier
from turnout.ops.selective_scan.cases import case as scan_case
from turnout.ops.selective_scan_update.cases import case as update_case
from turnout.routing.op import OPS

TRAINED = "steps and rates of a trained model"


@pytest.mark.parametrize("seed", [1, 2])
def test_small_steps_keep_their_digits(seed):
    """Small steps, held for all of the sequence: with a softplus by log(1 + exp) both of these fail."""
    op = OPS["selective_scan"]
    args = op.arguments(
        *scan_case("long", TRAINED, 1, 16, 24, torch.float32, states=16, held=True).make(CPU, seed)
    )
    run = functools.partial(op.routes["one-launch"].run, channels=16, steps=8, warps=1)
    assert Verifier(op, args).mismatch("close", run) is None


def test_steps_from_logarithms_in_place():
    op = OPS["selective_scan_update"]
    args = op.arguments(*update_case("step", TRAINED, 3, 100, torch.float32).make(CPU, 1))
    run = functools.partial(op.routes["one-launch"].run, channels=32, warps=1)
    assert Verifier(op, args).mismatch("close", run) is None


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_strong_decay_forgets(steps):
    """exp(w) - 1 times a large state would drown what is added: it is taken where w is small only."""
    op = OPS["selective_scan"]
    x, one = torch.full((1, 4, 5), 1e-3), torch.ones(1, 1, 5)
    args = op.arguments(
        x,
        torch.full((1, 4, 5), 30.0),
        -torch.ones(4, 1),
        one,
        one,
        initial_state=torch.full((1, 4, 1), 1e9),
        return_final_state=True,
    )
    y, final = op.routes["one-launch"].run(*args, channels=4, steps=steps, warps=1)
    expected, last = op.reference(*args)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(final, last, rtol=1e-6, atol=0)
