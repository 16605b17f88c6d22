"""Capture CUDA graphs, and replay all kernels of a call with one launch.

`CudaEngine` captures and replays, with the precautions that needs. `CapturedStep` is a step of a decode
stream; calls of whole models are in `replays.py`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnout.routing import torch_private
from turnout.routing.fallback import values_hidden

# Decodes one latent. What the next one needs replaces what the list held before; the tensors that were in it
# are not written.
Step = Callable[[Tensor, list], Tensor]

_ONE_CAPTURE = threading.Lock()  # torch allows one at a time in a process
# Captures that did not end: torch's allocator of pinned memory still asks them, by their address, whether
# memory is theirs (torch 2.13), so they are not freed.
_abandoned: list[torch.cuda.CUDAGraph] = []


class Captured(NamedTuple):
    """A captured run, with its outputs, which every replay overwrites."""

    outputs: Any
    replay: Callable[[], None]


class CudaEngine:
    """Captures and replays runs on one device, which share the memory that they work in.

    A run reads and writes the same addresses at every replay. Replays may come on any stream: `ordered` makes
    each wait for the one before, because they use the same memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._beside = _stream_beside(device)
        with torch.cuda.device(device), torch.inference_mode(False):
            self._written = torch.zeros(1, device=device)  # by a capture that does nothing else
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # captured in this pool
        self._pool: Any = None
        self._capturing = self._beside
        self._last: torch.cuda.Event | None = None

    @staticmethod
    def is_capturing(device: torch.device) -> bool:
        """Whether a capture is under way, so that what runs now becomes a part of it."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def run_beside(self, run: Callable[[], Any]) -> Any:
        """Run on a stream beside the caller's: it compiles, chooses routes and makes workspaces, which a
        capture must not.
        """
        with torch.cuda.device(self.device):
            before = torch.cuda.current_stream()
            try:
                self._beside.wait_stream(before)
                with torch.cuda.stream(self._beside), values_hidden():
                    return run()
            finally:
                self._return_to(before)

    def capture(self, run: Callable[[], Any]) -> Captured:
        """Capture a run that `run_beside` has seen. A failure leaves no capture behind, and the current
        stream as it was: the run can be made again, and so can others on the same device.
        """
        with torch.cuda.device(self.device), _ONE_CAPTURE, _no_garbage_collection():
            before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            cause = None
            self._take_pool()
            try:
                # Other threads go on: what they do is not captured, and does not end this capture.
                with (
                    torch.cuda.graph(graph, self._pool, self._capturing, capture_error_mode="thread_local"),
                    values_hidden(),
                ):
                    try:
                        outputs = run()
                    except BaseException as failure:
                        cause = failure  # a broken capture raises once more when it ends
                        raise
                self._graphs.add(graph)
                return Captured(outputs, graph.replay)
            except BaseException as failure:
                self._abandon(graph, before)
                cause = cause or failure
                if not isinstance(cause, Exception):  # an interrupt stays one
                    raise cause from None
                if cause is failure:
                    raise
                raise cause from failure
            finally:
                del cause  # it knows this frame, which would keep the run's memory until garbage is collected

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Put this around a replay and the copies of its inputs and outputs."""
        stream = torch.cuda.current_stream(self.device)
        if self._last is None:
            self._last = torch.cuda.Event()
        else:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            self._last.record(stream)

    def drain(self) -> None:
        """Wait until no replay runs: their memory may then be freed."""
        if self._last is not None:
            self._last.synchronize()

    def _take_pool(self) -> None:
        """A new pool where nothing is left that was captured in the old one, and a stream for it.

        torch's allocator refuses a pool whose last graph is gone, while anything is still allocated in it.
        The stream is not the one of `run_beside`, on which cuBLAS already has a workspace: a graph would read
        and write that one, and whoever clears cuBLAS's workspaces (torch.compile does, for its own graphs)
        would free it. On a stream of its own the workspace is allocated in the pool, which lives as long as
        the graphs.
        """
        if self._pool is None or not self._graphs:
            self._pool, self._capturing = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def _abandon(self, graph: torch.cuda.CUDAGraph, before: torch.cuda.Stream) -> None:
        """End a capture that is still open, and go back to the stream of the caller.

        `torch.cuda.graph` does neither where an interrupt comes as it is entered, and stays on its own stream
        where the end of the capture fails; the allocators and the generator of random numbers then go on as
        if it were open (torch 2.11 to 2.13). The allocator of pinned memory cannot be told, and would refuse
        the pool.
        """
        torch.cuda.set_stream(self._capturing)
        if torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):  # says that what was captured is of no use
                graph.capture_end()
        with contextlib.suppress(RuntimeError):  # says that it has ended, as it should have
            torch_private.end_allocate_to_pool(self.device.index, self._pool)
            torch_private.release_pool(self.device.index, self._pool)
        try:
            graph.pool()
        except RuntimeError:  # it has not ended
            _abandoned.append(graph)
        self._pool = None
        with contextlib.suppress(RuntimeError):
            self._capture_next_to_nothing()
        self._return_to(before)

    def _capture_next_to_nothing(self) -> None:
        """A capture that ends well tells the generator of random numbers that none is under way."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._written.zero_()
        finally:
            graph.capture_end()

    def _return_to(self, before: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(before)
        # what was run there is freed now, and others may write to its memory
        before.wait_stream(self._beside)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a device: cuBLAS keeps a workspace for each stream it has been used on, 32 MiB
    on an H200.
    """
    with torch.cuda.device(device):
        return torch.cuda.Stream()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Inside this block Python collects no garbage: it might free a kernel's code or another graph, which the
    driver does not allow during a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# By the type of a device, what captures there.
ENGINES: dict[str, type[Any]] = {"cuda": CudaEngine}


def layouts(cache: list) -> list[Any]:
    """The layout of every cache, which a graph relies on. Once a step leaves them unchanged, every later step
    is the same program.
    """
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in cache]


class CapturedStep:
    """A step that was captured with this latent's shape and this cache's layouts, to be called with one
    latent after the other.

    A graph reads and writes the same addresses at every replay, so the latent is copied into a buffer, and
    the caches into theirs at the end of a step; the list is given these buffers. What is returned lies in a
    buffer too: use it, or copy it, before the next call.

    Nobody can tell how much of an interrupted call has run on the card. Whoever calls this takes the caches
    for lost until it has returned, and after a failure fills the buffers by `load`. That suffices: a replay
    reads nothing but the latent, the caches and the weights.

    assumptions: what else must be the same for the graph to be of use to another clip.
    """

    def __init__(self, step: Step, latent: Tensor, cache: list, assumptions: Any = None):
        self.latent, self.cache, self.assumptions = buffer_like(latent), cache, assumptions
        self.latent.copy_(latent)
        for i, x in enumerate(cache):  # one by one: all of them twice would be the peak
            cache[i] = buffer_like(x).copy_(x) if isinstance(x, Tensor) else x
        engine = ENGINES[latent.device.type](latent.device)
        engine.run_beside(lambda: step(self.latent, list(self.cache)))
        self.frames, self._replay = self._capture(step, engine)

    def _capture(self, step: Step, engine: Any) -> Captured:
        def run() -> Tensor:
            after = list(self.cache)
            frames = step(self.latent, after)
            for held, new in zip(self.cache, after, strict=True):
                if held is not new:
                    held.copy_(new)
            return frames

        try:
            return engine.capture(run)
        except Exception as failure:
            message = f"the decode step could not be captured as a CUDA graph ({reason_of(failure)})"
            raise RuntimeError(f"{message}; graph=False needs no capture") from failure

    def fits(self, cache: list, assumptions: Any) -> bool:
        """Whether this graph is the step that follows on other caches, after a failure or of another clip."""
        return self.assumptions == assumptions and layouts(self.cache) == layouts(cache)

    def load(self, cache: list) -> None:
        """Go on from other caches of the same layouts."""
        for held, new in zip(self.cache, cache, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new)

    def __call__(self, latent: Tensor) -> Tensor:
        actual, needed = (f"{list(x.shape)} of {x.dtype} on {x.device}" for x in (latent, self.latent))
        if actual != needed:
            raise ValueError(
                f"a latent {actual}; this stream was captured with {needed}, "
                "another clip needs another stream"
            )
        self.latent.copy_(latent)
        self._replay()
        return self.frames


def reason_of(failure: BaseException) -> str:
    """The kind of a failure, and the first line of what it says."""
    return f"{type(failure).__name__}: {(str(failure).strip() or 'no message').splitlines()[0]}"


def buffer_like(x: Tensor) -> Tensor:
    """A tensor of the same layout, which may be written inside and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
