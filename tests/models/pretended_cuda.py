"""torch.cuda on a CPU, as far as captures of CUDA graphs need it: streams, captures, and what torch's
allocators and its generator of random numbers believe of them.

The rules are those of torch 2.11 to 2.13 (CUDAGraph.cpp, CUDACachingAllocator.cpp, CachingHostAllocator.h).
What runs in a capture is run, so that results can be looked at; a replay runs nothing.
"""

import contextlib
import itertools

import torch

from turnout.models import graphs
from turnout.routing import torch_private


class Refused(RuntimeError):
    """What torch says of a capture that breaks a rule."""


class Allocator:
    """Private pools of one of torch's two allocators."""

    def __init__(self):
        self.open, self.uses = [], {}

    def begin(self, pool):
        if pool in self.uses and self.uses[pool] < 1:
            raise Refused("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.uses[pool] = self.uses.get(pool, 0) + 1
        if pool in self.open:
            raise Refused("beginAllocateToPool: already recording to mempool_id")
        self.open.append(pool)

    def end(self, pool):
        if pool not in self.open:
            raise Refused("endAllocatePool: not currently recording to mempool_id")
        self.open.remove(pool)

    def release(self, pool):
        self.uses[pool] -= 1


class Stream:
    def __init__(self):
        self.is_capturing = self.is_broken = False

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass


class Event:
    def record(self, stream):
        pass

    def synchronize(self):
        pass


class Cuda:
    """The state of the pretended card. memory, pinned: its allocators. draws: whether random numbers can be
    drawn outside of a capture.
    """

    def __init__(self):
        self.current, self.memory, self.pinned, self.draws = Stream(), Allocator(), Allocator(), True
        self.pools = itertools.count(1)
        self.captured_on, self.replays = [], 0

    def random_numbers(self):
        if not self.draws:
            raise Refused("Offset increment outside graph capture encountered unexpectedly.")

    def spoil(self):
        """What a capture must not do was done: it cannot end well any more."""
        self.current.is_broken = True
        raise Refused("operation not permitted when stream is capturing")


def pretend_cuda(monkeypatch):
    """Let `CudaEngine` itself run on a CPU."""
    cuda = Cuda()

    class CUDAGraph:
        def __init__(self):
            self._pool, self._has_ended = None, False

        def capture_begin(self, pool=None, capture_error_mode="global"):
            assert capture_error_mode == "thread_local"
            self._pool = (next(cuda.pools), 0) if pool is None else pool
            cuda.memory.begin(self._pool)
            cuda.pinned.begin(self._pool)
            cuda.draws, cuda.current.is_capturing = False, True
            cuda.captured_on.append(cuda.current)

        def capture_end(self):
            stream = cuda.current
            was_broken, stream.is_capturing, stream.is_broken = stream.is_broken, False, False
            if was_broken:
                raise Refused("operation failed due to a previous error during capture")
            cuda.memory.end(self._pool)
            cuda.pinned.end(self._pool)
            self._has_ended = cuda.draws = True

        def pool(self):
            if not self._has_ended:
                raise Refused("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._pool

        def replay(self):
            cuda.replays += 1

        def __del__(self):
            if self._has_ended:
                cuda.memory.release(self._pool)
                cuda.pinned.release(self._pool)

    class graph:
        """`torch.cuda.graph`: where the end of a capture fails, it stays on its own stream."""

        def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
            self.graph, self.pool, self.stream, self.mode = graph, pool, stream, capture_error_mode

        def __enter__(self):
            self.before = cuda.current
            set_stream(self.stream)
            self.graph.capture_begin(self.pool, capture_error_mode=self.mode)

        def __exit__(self, *failure):
            self.graph.capture_end()
            set_stream(self.before)

    def set_stream(stream):
        cuda.current = stream

    @contextlib.contextmanager
    def on(stream):
        before = cuda.current
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)

    for name, value in {
        "device": contextlib.nullcontext,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *unused: cuda.current,
        "stream": on,
        "set_stream": set_stream,
        "is_current_stream_capturing": lambda: cuda.current.is_capturing,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, next(cuda.pools)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, function in {
        "end_allocate_to_pool": lambda device, pool: cuda.memory.end(pool),
        "release_pool": lambda device, pool: cuda.memory.release(pool),
    }.items():
        monkeypatch.setattr(torch_private, name, function)
    monkeypatch.setitem(graphs.ENGINES, "cpu", graphs.CudaEngine)
    monkeypatch.setattr(graphs, "_abandoned", [])
    beside = Stream()
    monkeypatch.setattr(graphs, "_stream_beside", lambda device: beside)
    return cuda
