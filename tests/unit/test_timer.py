"""How samples become the time of a call."""

import pytest
import torch

from turnout.measure.timer import _at_usual_speed, _summary, time_variants


def test_host_time_is_a_median_not_a_minimum():
    timing = _summary([5.0, 6.0, 7.0, 6.0], [16.0, 12.0, 16.0, 17.0])
    assert (timing.us, timing.host_us, timing.device_us) == (16.0, 16.0, 6.0)
    assert timing.iqr > 0  # the host's own spread


def test_call_time_is_the_longer_of_device_and_host():
    assert _summary([100.0, 300.0, 200.0], [16.0, 17.0, 18.0]).us == 200.0
    assert _summary([10.0, 30.0, 20.0, 20.0], [25.0]).us == 25.0  # a host that was asked once


def test_cpu_calls_have_one_time():
    calls = []
    timing = time_variants(
        {"sum": lambda x: calls.append(x.sum())},
        [(torch.ones(8),)],
        torch.device("cpu"),
        rounds=5,
        seconds=1.0,
    )["sum"]
    assert timing.us == pytest.approx(timing.device_us)
    assert timing.host_us == 0.0
    assert len(calls) == 1 + 2 * 5


def test_a_host_that_changes_its_speed_changes_no_difference():
    """In the middle of a run, a median of either alone would have been at one speed or the other."""
    steadied = _at_usual_speed(
        {"torch": [10.0, 10.0, 15.0, 15.0, 15.0], "turnout": [12.0, 12.0, 18.0, 18.0, 18.6]}
    )
    assert steadied["torch"] == pytest.approx([15.0] * 4 + [15.0 * (18.0 / 18.6) ** 0.5])
    assert steadied["turnout"] == pytest.approx([18.0] * 4 + [18.0 * (18.6 / 18.0) ** 0.5])
    alone = {"torch": [10.0, 15.0]}
    assert _at_usual_speed(alone) == alone
