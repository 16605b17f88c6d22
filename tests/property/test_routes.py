"""Guard silent => equals the reference.

Sums of small integers are exact, so equal means equal; fresh memory is poisoned with NaN.
"""

import functools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import turnout
from tests.walk import CPU, H200, equal, ops, random_call, routes, takes
from turnout.routing.device import Device

pytestmark = pytest.mark.usefixtures("poison")

WITH_ALL_PACKAGES = replace(H200, lacks=frozenset())  # also those that few routes need


@routes
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_guard_silent_means_equal(op, route, seed):
    args = random_call(op, seed, CPU)
    reasons = list(route.refuses(op.problem(*args), Device.of("cpu")))
    if not reasons:
        for config in route.configs(op.problem(*args), Device.of("cpu")):
            assert equal(op, functools.partial(route.run, **config), args)
    else:
        assert all("this route needs" in reason for reason in reasons)
        with turnout.pin(**{op.name: route.name}), pytest.raises(turnout.Refused, match="this route needs"):
            op(*args)


@ops
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_public_call_equals_torch(op, seed):
    args = random_call(op, seed, CPU)
    assert equal(op, op, args)


@ops
def test_reference_pinned_is_the_reference(op):
    args = random_call(op, 3, CPU)
    with turnout.pin(**{op.name: "reference"}):
        assert equal(op, op, args)
        assert op.verdict(op.key(args)).authority == "pin"


@routes
def test_every_route_takes_random_calls(op, route):
    """A guard that refuses everything would make the test above say nothing."""
    assert takes(op, route, WITH_ALL_PACKAGES) or takes(op, route, Device.of("cpu"))
