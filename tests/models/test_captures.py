"""`CudaEngine` keeps to the rules of torch's captures, allocators and random numbers, on a pretended card."""

import gc
import weakref

import pytest
import torch

from tests.models.pretended_cuda import pretend_cuda
from turnout.models.graphs import CudaEngine


@pytest.fixture
def cuda(monkeypatch):
    return pretend_cuda(monkeypatch)


@pytest.fixture
def engine(cuda):
    return CudaEngine(torch.device("cpu", 0))


def failures(cuda):
    """Runs that fail in a capture, in each way there is."""

    def raises():
        raise ValueError("planted")

    def spoils():
        cuda.spoil()

    def spoils_unseen():
        cuda.current.is_broken = True

    def interrupted():
        raise KeyboardInterrupt

    return {"raises": raises, "spoils": spoils, "spoils unseen": spoils_unseen, "interrupted": interrupted}


FAILURES = list(failures(None))


def test_graphs_of_one_engine_share_a_pool_and_a_stream(engine, cuda):
    captured = [engine.capture(lambda: 1) for _ in range(3)]
    assert len(cuda.memory.uses) == 1
    assert set(cuda.memory.uses.values()) == {len(captured)}
    assert len(set(cuda.captured_on)) == 1


def test_pool_whose_last_graph_is_gone_is_not_captured_into(engine, cuda):
    captured = engine.capture(lambda: 1)
    del captured
    again = engine.capture(lambda: 2)
    assert again.outputs == 2
    assert sorted(cuda.memory.uses.values()) == [0, 1]


@pytest.mark.parametrize("how", FAILURES)
def test_capture_succeeds_after_one_that_failed(how, engine, cuda):
    kept = engine.capture(lambda: 1)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError, KeyboardInterrupt)):
            engine.capture(failures(cuda)[how])
    assert engine.capture(lambda: 2).outputs == 2
    kept.replay()
    assert cuda.replays == 1
    assert not cuda.memory.open, "torch's allocator knows of no capture that is still open"


@pytest.mark.parametrize("how", FAILURES)
def test_failed_capture_leaves_stream_and_random_numbers_as_they_were(how, engine, cuda):
    before = cuda.current
    with pytest.raises((ValueError, RuntimeError, KeyboardInterrupt)):
        engine.capture(failures(cuda)[how])
    assert cuda.current is before
    assert not any(stream.is_capturing for stream in cuda.captured_on)
    cuda.random_numbers()


def test_interrupt_as_a_capture_begins_leaves_none_open(engine, cuda, monkeypatch):
    begin = torch.cuda.graph.__enter__

    def interrupted(self):
        begin(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.graph, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.capture(lambda: 1)
    assert not cuda.memory.open
    cuda.random_numbers()
    assert engine.capture(lambda: 1).outputs == 1


def test_capture_is_not_on_the_stream_of_the_run_before(engine, cuda):
    """There cuBLAS has a workspace outside of the pool, which others may free."""
    ran_on = engine.run_beside(lambda: cuda.current)
    captured = [engine.capture(lambda: 1)]
    assert ran_on not in cuda.captured_on
    captured.clear()
    engine.capture(lambda: 1)
    assert len(set(cuda.captured_on)) == 2, "each pool has its own"


def test_garbage_is_not_collected_during_a_capture(engine):
    class Thing:
        pass

    gc.collect()  # otherwise a collection may be due before the capture begins
    thing = Thing()
    thing.itself, gone = thing, weakref.ref(thing)
    del thing

    def run():
        kept = [[] for _ in range(100_000)]
        return gone() is not None, len(kept)

    assert engine.capture(run).outputs == (True, 100_000)
    assert gc.isenabled()


def test_capture_of_the_caller_is_seen(engine, cuda):
    device = torch.device("cpu", 0)
    assert not engine.is_capturing(device)
    cuda.current.is_capturing = True
    assert engine.is_capturing(device)
