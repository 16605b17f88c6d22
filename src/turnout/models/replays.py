"""`accelerate(model, graph=True)`: calls that come again are captured in a CUDA graph, and replayed.

A call is *the same* as one before where everything a graph cannot see is: the shapes, strides, dtypes and
devices of its tensors, all its other arguments, the settings of torch and turnout, the addresses of a cache
that it goes on with, and the whole state of the model (`ModelSnapshot`). The first such call runs as it would
without graphs, the second on copies of its inputs, and is captured; from the third on inputs are copied in,
the graph is replayed, and outputs are copied out. Whatever a graph could get wrong is seen before that, and
the call runs as it would without graphs, with the reason in the report.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.models import graphs, sdpa
from turnout.models.diffusers_private import active_attention_backend
from turnout.models.replayed_arguments import Arguments, Buffers, Refused, is_cache, walked
from turnout.models.replayed_outputs import Outputs
from turnout.models.snapshot import ModelSnapshot, remembered_tensors
from turnout.routing import fallback, settings
from turnout.routing.op import TurnoutWarning
from turnout.routing.precision import get_precision
from turnout.routing.torch_private import (
    GLOBAL_HOOKS,
    attention_order,
    in_function_mode,
    kernel_flags,
    storage_id,
    tree_leaves,
)

MOST_GRAPHS = 8  # of one model; the one that was used least recently goes
_MOST_SEEN = 256  # calls of one model of which it is known that they came once, or cannot be captured
_MOST_CHANGES = 16  # of a model, one after the other, with no replay between: then no more is captured

# -- settings ----------------------------------------------------------------------------------------------


def _settings(device: torch.device) -> tuple:
    """Whatever torch, turnout and diffusers are set to that may change what a call runs."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return (
        settings.entered.get(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.get_default_dtype(),
        F.scaled_dot_product_attention,
        tuple(attention_order()),
        get_precision("cuda", "matmul"),
        get_precision("cuda", "conv"),
        get_precision("mkldnn", "matmul"),
        get_precision("mkldnn", "conv"),
        torch.get_num_threads() if kind == "cpu" else 0,
        active_attention_backend(),
        _default_device(),
        *[flag() for flag in kernel_flags],
    )


def _default_device() -> Any:
    return torch.get_default_device() if in_function_mode() else None


def rewritten() -> str | None:
    """Who else wants to see what a call runs, op by op."""
    reason = fallback.rewriting()
    if reason is not None:
        return reason
    if in_function_mode() and sdpa.has_foreign_function_mode():
        return "a TorchFunctionMode is active"
    return "global hooks on modules" if any(GLOBAL_HOOKS) else None


def _random_states(device: torch.device) -> list[Any]:
    """What moves on when random numbers are drawn."""
    states: list[Any] = [torch.default_generator.get_state().numpy().tobytes(), random.getstate()]
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        states += [generator.initial_seed(), generator.get_offset()]
    numpy = sys.modules.get("numpy.random")
    return states if numpy is None else [*states, pickle.dumps(numpy.get_state(legacy=False))]


# -- calls -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Graph:
    """A captured call: what replays it, where it reads and what it returned; the states that it writes."""

    replay: Callable[[], None]
    buffers: Buffers
    outputs: Outputs
    moved: list[int]  # places among the tensors of a call, of those that are copied back
    written: list[int]  # places among the states of a call
    alive: list[Tensor]  # read by the graph, and held by caches that may forget them
    replayed: int = 0


_SEEN = "seen once"


class Replays:
    """The graphs of one model, its state as they rely on it, and what became of its calls.

    It is an attribute of the model, so both go together. A copy of the model begins without graphs.
    """

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.eager: collections.Counter[str] = collections.Counter()  # reasons, and of how many calls
        self.dropped: collections.Counter[str] = collections.Counter()  # reasons, and how often graphs went
        self._lock = threading.RLock()
        self._begin()

    def _begin(self) -> None:
        self._known: collections.OrderedDict[Any, _Graph | str] = collections.OrderedDict()
        self._model: weakref.ref[Any] | None = None
        self._snapshot: ModelSnapshot | None = None
        self._engine: Any = None
        self._running = False
        self._changes = self._wasted = 0
        self._warned: set[str] = set()
        self._unfit: dict[torch.device, str | None] = {}  # why nothing of the model as it is may be captured

    def __deepcopy__(self, memo: dict) -> Replays:
        return Replays()

    def __reduce__(self) -> tuple:
        return Replays, ()

    @property
    def graphs(self) -> int:
        """How many there are now."""
        return sum(isinstance(each, _Graph) for each in self._known.values())

    def lines(self) -> Iterator[str]:
        """What became of the calls, for a report."""
        yield f"{self.captured} captured, {self.replayed} replayed, {self.graphs} held"
        yield from (f"{count} not captured: {reason}" for reason, count in self.eager.most_common())
        yield from (f"{count} times captured anew: {reason}" for reason, count in self.dropped.most_common())

    def release(self) -> None:
        """Free every graph, and the memory that they work in."""
        with self._lock:
            if self._engine is not None:
                self._engine.drain()
            self._begin()

    def call(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The outputs of `run(*args, **kwargs)`, a model's stock method, by a graph where there is one."""
        try:
            device = self._device(model, args, kwargs)
            call = Arguments(args, kwargs, device)
            key = call.key, device, _settings(device)
            with self._lock:
                known = self._look_up(model, key)
                if isinstance(known, _Graph):
                    return self._replay(known, call, key)
                if known is _SEEN:
                    return self._capture(model, run, call, key)
        except Refused as refused:  # before anything was run
            self._count(str(refused))
            return self._without_graphs(run, args, kwargs)
        return self._first(run, call)

    def _count(self, reason: str) -> None:
        if len(self.eager) < _MOST_SEEN or reason in self.eager:
            self.eager[reason] += 1

    def _without_graphs(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call as it would be without graphs. If memory runs out, which graphs hold some of, they go and
        it is made again; not with a cache, which it may have written to."""
        try:
            return run(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self.graphs or any(map(is_cache, (*args, *kwargs.values()))):
                raise
            with self._lock:
                self._drop_graphs()
            self._warn(
                "turnout: out of memory in a call without a graph: the graphs of this model were freed"
            )
        return run(*args, **kwargs)

    def _device(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.device:
        """Where a call runs; raises for calls of which nothing may be captured whatever their arguments."""
        who = rewritten()
        if who is not None:
            raise Refused(f"{who}, graphs need a plain call")
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not tensors:
            raise Refused("no tensor among the arguments")
        devices = dict.fromkeys(x.device for x in tensors)
        device = next((each for each in devices if each.type in graphs.ENGINES), None)
        if device is None:
            raise Refused(f"{' and '.join(map(str, devices))}: CUDA graphs need a CUDA device")
        if graphs.ENGINES[device.type].is_capturing(device):
            raise Refused("a capture of the caller's is under way")
        if torch.is_grad_enabled():
            wanted = any(x.requires_grad for x in tensors) or any(x.requires_grad for x in model.parameters())
            if wanted or (self._snapshot is not None and self._snapshot.wants_gradients()):
                raise Refused("gradients are wanted: call it under torch.no_grad() or torch.inference_mode()")
        return device

    def _look_up(self, model: nn.Module, key: Any) -> _Graph | str | None:
        """What is known of such a call, the model being what it was; None: nothing. Raises where it is not to
        be captured."""
        if self._running:
            raise Refused("a call inside another one of the same model")
        if self._model is None:
            self._model = weakref.ref(model)
        if self._model() is not model:
            raise Refused("a shallow copy of the model that graph=True was given for")
        known = self._known.get(key)
        if known is None:
            return None
        self._known.move_to_end(key)
        if known is not _SEEN and not isinstance(known, _Graph):
            raise Refused(known)
        if self._snapshot is not None:
            change = self._snapshot.change()
            if change is not None:
                self._forget(change)
                return None
        return known

    def _forget(self, change: str) -> None:
        """Drop every graph: the model is another one."""
        if self.graphs:
            self.dropped[change] += 1
            self._engine.drain()
        self._known.clear()
        self._snapshot = None
        self._changes += 1

    def _note(self, key: Any, known: _Graph | str) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        while len(self._known) > _MOST_SEEN:
            _, oldest = self._known.popitem(last=False)
            if isinstance(oldest, _Graph):
                self._engine.drain()

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, TurnoutWarning, stacklevel=7)

    def _first(self, run: Callable[..., Any], call: Arguments) -> Any:
        """A call that nothing is known of: as it would be without graphs. What it does is looked at.

        torch may come to settings of its own while it runs: at the first attention on an H200 it puts cuDNN
        first. The next such call is made with those.
        """
        states = _random_states(call.device)
        inputs = [x for i, x in enumerate(call.tensors) if i not in call.carried]

        def versions() -> list[int | None]:
            return list(map(fallback.version_of, inputs))

        before = versions()
        result = self._without_graphs(run, call.args, call.kwargs)
        key = call.key, call.device, _settings(call.device)
        with self._lock:
            self._count("the first of its kind")
            try:
                Outputs(result, call.tensors, call.caches, containers=call.containers)
                if states != _random_states(call.device):
                    raise Refused("it draws random numbers")
                if not call.is_same_after():
                    raise Refused(
                        "it changes a container among its arguments, or a cache grows, moves or counts"
                    )
                if before != versions():
                    raise Refused("it writes into an argument")
                self._note(key, _SEEN)
            except Refused as refused:
                self._note(key, str(refused))
        return result

    def _capture(self, model: nn.Module, run: Callable[..., Any], call: Arguments, key: Any) -> Any:
        """The second call of its kind: run on copies of its inputs, and captured. Raises `Refused` where it
        is to run as it would without graphs, and has not run."""
        snapshot = self._prepared(model, call.device)
        try:
            self._make_room()
            buffers = Buffers(call.tensors)
            call.with_tensors(buffers.tensors)
        except torch.OutOfMemoryError:
            raise self._without(key, "out of memory for copies of the inputs") from None
        except Refused as refused:
            self._note(key, str(refused))
            raise
        except Exception as failure:  # of a cache that does not know how to be copied
            self._note(key, f"a cache that cannot be copied ({graphs.reason_of(failure)})")
            raise Refused("a cache that cannot be copied") from None

        caches: list[Any] = []

        def captured_run() -> Any:
            args, kwargs, caches[:] = call.with_tensors(buffers.tensors)
            with _as_now(call.device):
                return run(*args, **kwargs)

        filled, states = buffers.versions(), _random_states(call.device)
        versions = list(map(fallback.version_of, call.states))
        self._running = True
        try:
            try:
                first = self._engine.run_beside(captured_run)
            except torch.OutOfMemoryError:
                if call.states:  # nobody can tell what was written
                    raise
                raise self._without(key, "out of memory on copies of the inputs") from None
            moved = [i for i, version in enumerate(buffers.versions()) if version != filled[i]]
            buffers.give_back(call.tensors, moved)
            try:
                if not set(moved) <= set(call.carried):
                    raise Refused("it writes into an argument")
                self._check(snapshot, call, caches, buffers, states)
                foreign = snapshot.storages() | set(map(storage_id, call.states))
                outputs = Outputs(first, buffers.tensors, caches, foreign)
            except Refused as refused:
                self._note(key, str(refused))
                return _own(first)
            try:
                made = outputs.allocated()
            except torch.OutOfMemoryError:
                self._without(key, "out of memory for what it returns")
                return _own(outputs.handed_out(outputs.tensors, call))
            outputs.copy_to(made)
            result = outputs.handed_out(made, call)
            del first, made
            now = list(map(fallback.version_of, call.states))
            written = [i for i, version in enumerate(now) if version != versions[i]]
            try:
                graph = self._engine.capture(captured_run)
                again = Outputs(graph.outputs, buffers.tensors, caches, foreign)
                self._check(snapshot, call, caches, buffers, None)
                if not again.is_like(outputs):
                    raise Refused("it returned other shapes when it was captured")
            except Refused as refused:
                self._note(key, str(refused))
            except Exception as failure:
                reason = f"it could not be captured ({graphs.reason_of(failure)})"
                if isinstance(failure, torch.OutOfMemoryError):
                    reason = "out of memory while it was captured"
                self._note(key, reason)
                name = type(model).__name__
                self._warn(f"turnout: {name} runs without a graph: {reason}; graph=False asks for none")
            else:
                alive = list(remembered_tensors([type(x) for x in (model, *snapshot.modules)]))
                self._note(key, _Graph(graph.replay, buffers, again, moved, written, alive))
                self.captured += 1
            return result
        finally:
            self._running = False

    def _prepared(self, model: nn.Module, device: torch.device) -> ModelSnapshot:
        """The model's state, if a graph may be captured of it."""
        if self._changes >= _MOST_CHANGES:
            raise Refused("the model changes from call to call")
        if self._snapshot is None:
            self._snapshot = ModelSnapshot(model, for_graph=True)
            self._unfit = {}
        if device not in self._unfit:
            self._unfit[device] = self._snapshot.unfit(device)
        reason = self._unfit[device]
        if reason is not None:
            raise Refused(reason)
        if self._engine is None or self._engine.device != device:
            if self._engine is not None:
                self._drop_graphs()
            self._engine = graphs.ENGINES[device.type](device)
        return self._snapshot

    def _make_room(self) -> None:
        held = [key for key, known in self._known.items() if isinstance(known, _Graph)]
        if len(held) < MOST_GRAPHS:
            return
        if self._wasted >= MOST_GRAPHS:
            raise Refused(
                "too many kinds of calls: is a number, or a tensor on the host, another one each time?"
            )
        self._engine.drain()
        oldest: Any = self._known.pop(held[0])  # `_look_up` moves what is used to the end
        self._wasted = 0 if oldest.replayed else self._wasted + 1

    def _drop_graphs(self) -> None:
        self._engine.drain()
        for key in [key for key, known in self._known.items() if isinstance(known, _Graph)]:
            del self._known[key]

    def _check(
        self,
        snapshot: ModelSnapshot,
        call: Arguments,
        caches: list[Any],
        buffers: Buffers,
        states: list[Any] | None,
    ) -> None:
        """That a run on buffers has changed nothing but values in tensors of caches."""
        change = snapshot.change()
        if change is not None:
            raise Refused(f"{change} by the call itself")
        if not call.is_same_after():
            raise Refused("it changes a container among its arguments, or a cache grows, moves or counts")
        for ours, theirs in zip(caches, call.caches, strict=True):
            held: list[Tensor] = []
            same = ours is theirs or walked(ours, held) == walked(theirs, [])
            if not same or not {id(x) for x in held} <= {id(x) for x in buffers.tensors}:
                vars(theirs).update(vars(ours))  # the caller's goes on with what the run has made of the copy
                raise Refused("a cache grows, moves or counts")
        if states is not None and states != _random_states(call.device):
            raise Refused("it draws random numbers")

    def _without(self, key: Any, reason: str) -> Refused:
        """Free all graphs for a call for whose own there is no memory; it then runs as it would without."""
        self._drop_graphs()
        self._note(key, reason)
        self._warn(f"turnout: {reason}: its graphs were freed, and such calls run without")
        return Refused(reason)

    def _replay(self, graph: _Graph, call: Arguments, key: Any) -> Any:
        """The outputs of a call by its graph. Raises where there is no memory for them, before anything is
        written."""
        try:
            made = graph.outputs.allocated()
        except torch.OutOfMemoryError:
            raise self._without(key, "out of memory for what a graph returns") from None
        with self._engine.ordered():
            graph.buffers.fill(call.tensors)
            graph.replay()
            graph.outputs.copy_to(made)
            graph.buffers.give_back(call.tensors, graph.moved)
        if graph.written:
            torch.autograd.graph.increment_version([call.states[i] for i in graph.written])
        self.replayed += 1
        graph.replayed += 1
        self._changes = 0
        return graph.outputs.handed_out(made, call)


@contextlib.contextmanager
def _as_now(device: torch.device) -> Iterator[None]:
    """Autocast as it is, with a memory of its own: weights that were cast outside would not outlive it."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False):
        yield


def _own(value: Any) -> Any:
    """What a run beside has returned, in memory of the current stream."""
    for x in tree_leaves(value):
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
    return value
