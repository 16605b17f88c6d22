"""On a real GPU: what every route returns may be written in place, and the arguments keep their storages."""

import pytest
import torch

from tests import own_outputs
from tests.walk import gpu_routes
from turnout.routing.device import Device

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def calls(op, route):
    """Each may be a kernel of its own to compile, hence so few."""
    return own_outputs.calls(op, route, GPU, Device.of(GPU), 2, seeds=1000)


@gpu_routes
def test_written_in_place_after_a_call_that_records_nothing(op, route):
    for args in calls(op, route):
        own_outputs.check_written_later(op, route.name, args)


@gpu_routes
def test_written_in_place_while_gradients_are_recorded(op, route):
    for args in calls(op, route):
        if not op.mutates:
            own_outputs.check_written_while_recording(op, route.name, args)
