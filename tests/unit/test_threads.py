"""Work split over torch's own threads, or over a pool: the same shares, from any thread, and failures arrive."""

import sys
import threading

import pytest
import torch

from turnout.ops import threads


@pytest.fixture(params=["torch's", "a pool"])
def way(request, monkeypatch):
    if request.param == "a pool":
        monkeypatch.setattr(threads, "_runtime", lambda: None)
    elif threads._runtime() is None:
        assert sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def shares(parts):
    seen = []
    threads.in_shares(lambda first, last: seen.append((first, last)), parts)
    return sorted(seen)


@pytest.mark.usefixtures("way")
def test_every_part_once():
    assert shares(10) == [(0, 3), (3, 6), (6, 10)]
    assert shares(2) == [(0, 1), (1, 2)]
    assert shares(1) == [(0, 1)]


@pytest.mark.usefixtures("way")
def test_failures_arrive():
    def work(first, last):
        if first:
            raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        threads.in_shares(work, 10)
    assert shares(3) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.usefixtures("way")
def test_from_several_threads_at_once():
    wrong = []

    def many():
        for _ in range(50):
            found = shares(10)
            ends = [end for _, end in found]
            if [first for first, _ in found] != [0, *ends[:-1]] or ends[-1] != 10:
                wrong.append(found)

    callers = [threading.Thread(target=many) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
