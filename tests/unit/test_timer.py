"""How samples become the time of a call."""

import pytest
import torch

from turnout.measure.timer import _steadied, _summary, time_variants


def test_a_quick_moment_of_the_host_is_not_its_time():
    timing = _summary([5.0, 6.0, 7.0, 6.0], [16.0, 12.0, 16.0, 17.0])
    assert (timing.us, timing.host_us, timing.device_us) == (16.0, 16.0, 6.0)
    assert timing.iqr > 0  # the host's own spread


def test_the_longer_part_is_felt():
    assert _summary([100.0, 300.0, 200.0], [16.0, 17.0, 18.0]).us == 200.0
    assert _summary([10.0, 30.0, 20.0, 20.0], [25.0]).us == 25.0  # a host that was asked once


def test_on_a_cpu_there_is_one_part():
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
    steadied = _steadied({"torch": [10.0, 10.0, 15.0, 15.0, 15.0], "turnout": [12.0, 12.0, 18.0, 18.0, 18.6]})
    assert steadied["torch"] == pytest.approx([15.0] * 4 + [15.0 * (18.0 / 18.6) ** 0.5])
    assert steadied["turnout"] == pytest.approx([18.0] * 4 + [18.0 * (18.6 / 18.0) ** 0.5])
    alone = {"torch": [10.0, 15.0]}
    assert _steadied(alone) == alone
