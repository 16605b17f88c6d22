"""The first call of a model compiles together what it lacks, in processes of their own.

A call tells this thread's launches that it would like to know (`launch.launcher.watching`), which costs it a
microsecond. Nothing else happens until Triton finds a kernel missing from its cache on disk and is about to
compile it: a call whose kernels are all there plans nothing. Then, before that kernel, the whole call is
planned on tensors without memory (`warming.planning`), and if several of its kernels are missing they are
compiled together on all cores, as `turnout warm` does. The call goes on where it stopped, and finds them in
the cache. Each call tries that once.

Whatever cannot be planned, or compiled so, is compiled as ever, one kernel after the other. One thread of one
process at a time compiles together; the others wait, and find what it left: so of the ranks on a machine one
does it for all.
"""

from __future__ import annotations

import collections
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from turnout.launch import launcher
from turnout.models import bare, replayed_arguments, replays
from turnout.routing import settings
from turnout.routing.device import Device
from turnout.routing.fallback import autocasting
from turnout.routing.op import TurnoutWarning, is_watching
from turnout.routing.torch_private import is_compiled, saved_tensors_hooks
from turnout.warming.compiling import Compiler, can_compile, most_jobs, one_at_a_time
from turnout.warming.planning import specs_of_call
from turnout.warming.progress import Bar
from turnout.warming.warmed import Warmed, compile_specs

# A kernel takes about 2 s to compile; to start the process that compiles takes as long as two of them.
FEWEST = 3
_SHOWN_AFTER = 2.0  # seconds
_LIBRARIES = frozenset({"torch", "diffusers", "transformers", "peft", "turnout"})
_log = logging.getLogger("turnout")
_no_compiler: str | None = None  # why none can be started in this process


class FirstCalls:
    """What became of the first calls of one model. It is an attribute of the model; a copy has its own."""

    def __init__(self) -> None:
        self.together = 0  # kernels
        self.seconds = 0.0
        self.left: collections.Counter[str] = collections.Counter()  # reasons to compile one by one
        self._cannot_plan: str | None = None

    def __reduce__(self) -> tuple:
        return FirstCalls, ()

    def lines(self) -> Iterator[str]:
        """For a report."""
        if self.together:
            yield f"{self.together} kernels compiled together in {self.seconds:.1f} s"
        elif not self.left:
            yield "kernels that are missing will be compiled together"
        yield from (f"{count} times one by one: {reason}" for reason, count in self.left.most_common())

    def of(self, model: nn.Module, method: str, args: tuple, kwargs: dict[str, Any]) -> _Call:
        """To be entered for the length of a call."""
        return _Call(self, model, method, args, kwargs)

    def compile(self, call: _Call, is_missing: Callable[[], bool]) -> None:
        """Compile what a call lacks, if that can be found out and is worth it.

        is_missing: whether the kernel that Triton is about to compile is still missing. Raises nothing but
        interrupts.
        """
        try:
            reason = _no_compiler or self._cannot_plan or _against(call)
            if reason is None:
                with one_at_a_time():
                    reason = self._compile(call) if is_missing() else None
        except Exception as failure:
            reason = _give_up(failure)
        if reason is not None:
            self.left[reason] += 1

    def _compile(self, call: _Call) -> str | None:
        begun = time.perf_counter()
        name, jobs = type(call.model).__name__, most_jobs()
        card = Device.of(_device(call.model))
        with Compiler() as compiler, Bar(after=_SHOWN_AFTER) as bar, torch.random.fork_rng(devices=[]):
            bar.plan(name)
            try:
                method = getattr(call.model, call.method)
                specs = specs_of_call(method, call.args, call.kwargs, card, lambda copy: None)
            except Exception as failure:  # of code that was never meant to run on such tensors
                self._cannot_plan = f"the call cannot be planned ({_said(failure)})"
                _log.info("turnout: %s: %s", name, self._cannot_plan)
                return self._cannot_plan
            warmed = compile_specs(
                compiler, specs, card, jobs=jobs, fewest=FEWEST, progress=bar.tell, begun=begun
            )
        self._note(name, warmed)
        return None

    def _note(self, name: str, warmed: Warmed) -> None:
        compiled = len(warmed.named("compiled"))
        if compiled:
            self.together += compiled
            self.seconds += warmed.seconds
            _log.info("turnout: first call of %s: %s", name, warmed)


class _Call:
    """One call of a model. While it is entered, this thread's launches ask it before Triton compiles."""

    __slots__ = ("_first_calls", "_token", "_tried", "args", "kwargs", "method", "model")

    def __init__(
        self, first_calls: FirstCalls, model: nn.Module, method: str, args: tuple, kwargs: dict[str, Any]
    ):
        self._first_calls, self._tried = first_calls, False
        self.model, self.method, self.args, self.kwargs = model, method, args, kwargs

    def __enter__(self) -> None:
        self._token = launcher.watching.set(self._before_compiling)

    def __exit__(self, *failure: Any) -> None:
        launcher.watching.reset(self._token)

    def _before_compiling(self, is_missing: Callable[[], bool]) -> None:
        if not self._tried:
            self._tried = True
            self._first_calls.compile(self, is_missing)


def _give_up(failure: Exception) -> str:
    """No process can be started here, or it has crashed: nobody tries again in this process."""
    global _no_compiler
    _no_compiler = f"kernels cannot be compiled together ({_said(failure)})"
    warnings.warn(
        f"turnout: {_no_compiler}; they are compiled one by one. TURNOUT_WARM=0 asks for that",
        TurnoutWarning,
        stacklevel=2,
    )
    return _no_compiler


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).strip() or 'no message').splitlines()[0]}"


def _device(model: nn.Module) -> torch.device:
    return next(x.device for x in model.parameters())


def _against(call: _Call) -> str | None:
    """The first reason not to plan a call: it would not be what the call does, or somebody would notice."""
    return next(_reasons(call), None)


def _reasons(call: _Call) -> Iterator[str]:
    if os.environ.get("TURNOUT_WARM") == "0":
        yield "TURNOUT_WARM=0"
    if not can_compile():
        yield "this Python is part of another program"
    if torch.cuda.is_current_stream_capturing():
        yield "a CUDA graph is captured"
    if sys.modules["triton"].knobs.compilation.always_compile:
        yield "TRITON_ALWAYS_COMPILE is set"
    if isinstance(settings.entered.get(), settings.Asking | settings.Split):
        yield "a distributed model"
    if is_watching():
        yield "routes are being measured"
    if autocasting():
        yield "autocast"
    rewritten = replays.rewritten()
    if rewritten is not None:
        yield rewritten
    if torch.is_grad_enabled() and saved_tensors_hooks(True) is not None:
        yield "hooks on saved tensors"
    if call.method in vars(call.model):
        yield f"a {call.method} of its own"
    for path, module in call.model.named_modules():
        yield from _reasons_of(path, module)
    try:
        replayed_arguments.Arguments(call.args, call.kwargs, _device(call.model))
    except replayed_arguments.Refused as refused:
        yield f"arguments that cannot be planned with ({refused})"


def _reasons_of(path: str, module: nn.Module) -> Iterator[str]:
    """Code of others, which would see tensors without values."""
    if path and bare.hooked(module):  # hooks of the model itself are not inside the call
        yield f"{path} has a hook or a forward of its own"
    path = path or "the model"
    if is_compiled(module):
        yield f"{path} is compiled"
    for each in (module, vars(module).get("processor")):
        cls = type(each)
        if each is not None and cls.__module__.partition(".")[0] not in _LIBRARIES:
            yield f"{path} is, or has, a {cls.__module__}.{cls.__qualname__}"
