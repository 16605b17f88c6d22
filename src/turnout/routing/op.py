"""Op and Route: one meaning, several routes, and the short path a call takes between them."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor

from turnout.routing import failures, mutation, settings
from turnout.routing.case import Case, Cases
from turnout.routing.choose import REFERENCE, Refused, Verdict, choose, plain_problem
from turnout.routing.code_hash import code_hash
from turnout.routing.device import Device, is_planning
from turnout.routing.fallback import (
    AUTOCAST_ON,
    Blocked,
    autocasting,
    autocasts,
    blocked,
    differentiable_backward,
    tracing_state,
)
from turnout.routing.forks import lock_across_forks
from turnout.routing.outputs import views_unrecorded
from turnout.routing.prepared import Prepare, Prepared
from turnout.routing.runtime_checks import with_runtime_checks
from turnout.routing.table import Tables

Numerics = Literal["exact", "close", "lossy"]
Guard = Callable[[Any, Device], Iterable[str]]
Cost = Callable[[Any, Device], "float | None"]
F = TypeVar("F", bound=Callable[..., Any])
Config = dict[str, "int | float | str | bool"]
Watch = Callable[["Op", tuple], "contextlib.AbstractContextManager[Any] | None"]

OPS: dict[str, Op] = {}
_watchers: list[Watch] = []

_LIBRARY = torch.library.Library("turnout", "DEF")
_MOST_CACHED = 4096  # calls, of all ops together
_cached: collections.deque[tuple[dict, tuple]] = (
    collections.deque()
)  # the oldest first: a dispatch cache and a key
_cache_lock = lock_across_forks()  # held to add to dispatch caches and to clear them, not to look up
_clearings = 0  # how often they were cleared: what was chosen before is not added after

# What going through an op with a registered backward costs a call, in seconds: a route must win by that much
# when gradients are wanted.
AUTOGRAD_OVERHEAD = 38e-6  # a call of 24 us became one of 63: 2-core Xeon at 2.8 GHz, torch 2.13


class Grain(NamedTuple):
    """Where the input of a route, `[N, C, (D,) H, W]`, may be cut so that each part, computed by itself with
    the border that it sees and in the same configuration, gives the bits of the whole: at multiples of so
    many samples, frames, rows and columns. None: of cuts along that axis nothing is known.

    >>> Grain(rows=1, columns=2).along(-1), Grain(samples=1).in_frames(4)
    (2, 1)
    """

    samples: int | None = None
    frames: int | None = None
    rows: int | None = None
    columns: int | None = None

    def along(self, axis: int) -> int | None:
        """That of the rows (-2) or the columns (-1)."""
        return self.rows if axis == -2 else self.columns

    def in_frames(self, dimensions: int) -> int | None:
        """That of frames, which are the samples of a call with four dimensions."""
        return self.samples if dimensions == 4 else self.frames


ANYWHERE, UNKNOWN = Grain(1, 1, 1, 1), Grain()


class TurnoutWarning(UserWarning):
    """Something was given up, and the result is still right."""


@dataclass(frozen=True, eq=False)
class Route:
    """One implementation of an op. `run` has the reference's signature, plus keyword-only configuration with
    defaults.

    kernels: what it launches, each as "package.module:function"; none where it calls torch's only.
    in_place: arguments that may be the very memory that is written, element by element (see `mutation`).
    fails_before_writing: all that may fail at launch (memory, compilation) comes before it writes into an
    argument.
    grain: where the input may be cut without changing a bit, as far as that is known.
    """

    name: str
    run: Callable[..., Any]
    refuses: Guard
    cost: Cost
    numerics: Numerics
    version: int
    configs: Callable[[Any, Device], Sequence[Config]]
    prepare: Prepare | None = None
    kernels: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    fails_before_writing: bool = False
    grain: Grain = UNKNOWN

    @functools.cached_property
    def code_hash(self) -> str:
        """A hash of the kernels' source: what was measured with other kernels does not count."""
        return code_hash(*self.kernels)

    @functools.cached_property
    def defaults(self) -> Config:
        """The configuration that its function takes where none is given."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def prepared(self, args: tuple, config: Config) -> Prepared:
        """Bind this route to a configuration, for calls with these arguments' cache key (see `Op.route`)."""
        prepared = Prepared(self.run, {**self.defaults, **config})
        call = None if self.prepare is None else prepared.keeping(self.prepare, prepared, args)
        prepared.call = call or prepared.call
        return prepared


class Work(NamedTuple):
    """The fewest bytes a call can move, read and written together, the operations it must do, and how many of
    the bytes are written.
    """

    bytes: int
    flops: int
    written: int = 0


class Key(NamedTuple):
    """All that the choice of one call depends on, besides the settings."""

    problem: Any
    wants_grad: bool
    devices: tuple[torch.device, ...]


class Op:
    """A reference function in plain PyTorch, plus its routes. The reference is the meaning, the fake kernel
    and the fallback.

    `problem_type` is a NamedTuple with all that may change the answer or the speed of a call; its `of` makes
    one from the arguments. `cost` estimates the reference in seconds; `work` counts what no route can avoid.
    `cases`: the module whose `CASES` are the op's, read when first needed; or those themselves. What a case
    makes are the reference's arguments, or those of the public function that says so (see `public`).
    `family` names the problems that differ in `size` only: between two measured sizes times are interpolated.
    `vjp(inputs, grads)` gives a gradient for each input; without it, backward is the vector-Jacobian product
    of the reference. `mutates` names the arguments a call writes into (see `mutation`). The reference of such
    an op reads everything and allocates everything before it writes, and takes every call that wants
    gradients. `builtin` is torch's own function where the reference does nothing but call it:
    chosen, it is called without a step in between.
    `autocast` says what torch does to this op under autocast: "cast" its inputs, "ignore" it (all of it runs
    as if autocast were off), or "reference" (leave it to torch).
    `ambient(first argument)` gives the settings of torch that change the choice for such a call, such as its
    TF32 flags: `of` reads them, and here a call with other settings is another call.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *,
        problem_type: Any,
        cost: Cost,
        work: Callable[[Any], Work],
        cases: str | Cases,
        family: Callable[[Any], tuple[Any, int]] | None = None,
        autocast: Literal["cast", "ignore", "reference"] = "reference",
        vjp: Callable[[tuple, tuple], Sequence[Tensor | None]] | None = None,
        mutates: tuple[str, ...] = (),
        ambient: Callable[[Tensor], Any] | None = None,
        builtin: Callable[..., Any] | None = None,
    ):
        self.ambient, self.builtin = ambient, builtin
        self.name, self.reference, self.cost = name, reference, cost
        self.problem_type, self.problem = problem_type, problem_type.of
        self.work, self.family, self.autocast, self.vjp, self.mutates = work, family, autocast, vjp, mutates
        self._cases = cases
        self.signature = inspect.signature(reference)
        self.lowered_by: Callable[..., tuple] | None = None
        self.plain = self._without_autocast if autocast == "ignore" and builtin is None else reference
        self.routes: dict[str, Route] = {}
        self.failed = failures.FailedRoutes()
        self.dispatch_cache: dict[tuple, Callable[..., Any]] = {}
        self.opaque, self.when_compiled = _register(self)
        self.call = _written_out(self)
        OPS[name], settings.ROUTES[name] = self, self.routes

    def __repr__(self) -> str:
        return f"<turnout op {self.name}: {', '.join([*self.routes, REFERENCE])}>"

    def route(
        self,
        name: str,
        *,
        refuses: Guard,
        cost: Cost,
        numerics: Numerics,
        version: int,
        configs: Callable[[Any, Device], Sequence[Config]] = lambda problem, device: ({},),
        prepare: Prepare | None = None,
        kernels: Sequence[str] = (),
        in_place: Sequence[str] = (),
        fails_before_writing: bool = False,
        grain: Grain = UNKNOWN,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare a route: see CONTRIBUTING, "Add a route".

        prepare: called with a `Prepared` and the arguments of a call, it may return what runs calls like that
        one (the same shapes, strides, dtypes, devices and plain arguments) at less host time than the route's
        own function; or None.
        """

        def declare(run: Callable[..., Any]) -> Callable[..., Any]:
            parameters = list(inspect.signature(run).parameters.values())
            extra = parameters[len(self.signature.parameters) :]
            if [p.name for p in parameters[: len(self.signature.parameters)]] != list(
                self.signature.parameters
            ):
                raise TypeError(
                    f"route {name!r} of {self.name} takes {parameters}, "
                    f"it needs the reference's {self.signature}"
                )
            if any(p.kind is not p.KEYWORD_ONLY or p.default is p.empty for p in extra):
                raise TypeError(
                    f"route {name!r} of {self.name}: configuration {extra} must be keyword-only with defaults"
                )
            if name in self.routes or name == REFERENCE:
                raise ValueError(f"op {self.name} has a route {name!r} already")
            if numerics not in get_args(Numerics):
                raise ValueError(
                    f"numerics {numerics!r} of route {name!r}; one of: {', '.join(get_args(Numerics))}"
                )
            if not self.mutates and (in_place or fails_before_writing):
                raise TypeError(
                    f"route {name!r} of {self.name}: in_place and fails_before_writing need an op "
                    "that writes (mutates=)"
                )
            if not set(in_place) <= set(self.signature.parameters) - set(self.mutates):
                raise TypeError(
                    f"route {name!r} of {self.name}: in_place {list(in_place)} needs to name arguments "
                    "that are only read"
                )
            self.routes[name] = Route(
                name,
                run,
                refuses,
                cost,
                numerics,
                version,
                configs,
                prepare,
                tuple(kernels),
                tuple(in_place),
                fails_before_writing,
                grain,
            )
            return run

        return declare

    def public(self, described: F) -> F:
        """The function that calls take, under the name, types and docstring of a public function: nothing
        stands between the two."""
        return cast(F, functools.wraps(described)(self.call))

    def arguments(self, *args: Any, **kwargs: Any) -> tuple:
        """The reference's positional arguments of a case; `public.lower` has those of a public call."""
        if self.lowered_by is not None:
            return self.lowered_by(*args, **kwargs)
        return self.signature.bind(*args, **kwargs).args

    @functools.cached_property
    def declared_cases(self) -> Cases:
        """The op's cases, and what benchmarks and tests need to know of it."""
        return self._cases if isinstance(self._cases, Cases) else importlib.import_module(self._cases).CASES

    def cases(self) -> list[Case]:
        """The op's real calls, each with the model it comes from."""
        return list(self.declared_cases.calls)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def below_autograd(self, *args: Any) -> Any:
        """The kernel of the opaque torch op: gradients are taken care of above it.

        Views made in here are not recorded as views, as inside torch's own ops: what is returned is a tensor
        of its own, which may be written in place. An op that writes needs the record, for the versions of its
        arguments.
        """
        with torch.no_grad(), contextlib.nullcontext() if self.mutates else views_unrecorded():
            return self(*args)

    def dispatch_uncached(self, cache_key: tuple | None, *args: Any) -> Any:
        """Select a route for a call that is not in the dispatch cache, cache the choice, and run it.

        `cache_key` is None if it could not be built (wrong argument types, symbolic sizes). The reference
        then runs, so that the caller sees torch's own error.
        """
        now = settings.entered.get()
        if isinstance(now, settings.Asking):
            raise settings.Asked(self, args)
        if isinstance(now, settings.Split):
            run = now.plan(self, args)
            if cache_key is None or is_planning():
                return run(*args)
            return self._cache(cache_key, run, _clearings)(*args)
        if cache_key is None or tracing_state() is not None:
            return self.plain(*args)
        if not _has_routes(next(x.device for x in args if isinstance(x, Tensor))):
            # not cached: the key of a meta tensor is that of a CPU tensor
            return self._reference_run(args)(*args)
        if blocked(args, False) is not None:
            return self._left_to_torch(*args)  # nor is this: a plain call has the same key
        clearings = _clearings
        run = self._chosen(args)
        return run(*args) if is_planning() else self._cache(cache_key, run, clearings)(*args)

    def _cache(self, cache_key: tuple, run: Callable[..., Any], clearings: int) -> Callable[..., Any]:
        """Remember what runs calls with this key, unless the cache was cleared since `clearings`; another
        thread's, if it was first."""
        with _cache_lock:
            if clearings == _clearings:
                ours, run = run, self.dispatch_cache.setdefault(cache_key, run)
                if run is ours:
                    _cached.append((self.dispatch_cache, cache_key))
            while len(_cached) > _MOST_CACHED:
                cache, oldest = _cached.popleft()
                cache.pop(oldest, None)
        return run

    def _chosen(self, args: tuple) -> Callable[..., Any]:
        if self.autocast == "cast" and autocasting():
            return self._under_autocast
        if is_planning():
            return self._planned(args)
        for watch in _watchers:
            watch(self, args)
        key = self.key(args)
        self._mind_pin(args)
        verdict = self.verdict(key)
        if verdict.chosen == REFERENCE:
            run = self._reference_run(args)
        elif key.wants_grad:
            run = self.with_runtime_checks(self.opaque, args)
        else:
            route = self.routes[verdict.chosen]
            prepared = route.prepared(args, dict(verdict.config))
            run = self.with_runtime_checks(prepared.call, args, route)
        next_try = self.failed.next_try(key)
        return run if next_try is None else self._until(next_try, run)

    def _planned(self, args: tuple) -> Callable[..., Any]:
        """What runs while calls are only planned: the route that would be taken, as nothing has been worked
        out for it. What is asked at each call of a route was asked when this one was dispatched: nothing is
        cached."""
        if self.autocast == "reference" and autocasting():
            return self.plain
        verdict = self.verdict(self.key(args))
        if verdict.chosen == REFERENCE:
            return self.plain
        return torch.no_grad()(functools.partial(self.routes[verdict.chosen].run, **dict(verdict.config)))

    def _reference_run(self, args: tuple) -> Callable[..., Any]:
        """The reference as it is run, for arguments with the cache key of these."""
        return mutation.checked_reference(self, args) if self.mutates else self.builtin or self.plain

    def _until(self, end: float, run: Callable[..., Any]) -> Callable[..., Any]:
        """Choose anew from then on: a route for which memory was missing is tried again."""

        def call(*args: Any) -> Any:
            if self.failed.now() < end:
                return run(*args)
            self.dispatch_cache.clear()
            return self(*args)

        return call

    def with_runtime_checks(
        self, run: Callable[..., Any], example_args: tuple, route: Route | None = None
    ) -> Callable[..., Any]:
        """A route as it is run, for arguments with the cache key of these.

        What only torch can handle goes to the reference: transforms, modes, subclasses, lazy negation and
        conjugation, tensors elsewhere. That is asked here and is not in the cache key: a call which takes the
        reference does not pay for it; `fallback.blocked` asks the same, for the words. Where `route` is
        given, a launch that fails is followed by the next route.
        """
        in_place = () if route is None else route.in_place
        writes = mutation.WriteChecks(self, example_args, in_place) if self.mutates else None
        reference = mutation.checked_reference(self, example_args) if self.mutates else self.plain

        def failed(failure: Exception, *args: Any) -> Any:
            if route is None or failures.kind_of(failure) is None:
                raise failure
            return self._fall_through(route, failure, args)

        names, minds_autocast = tuple(self.signature.parameters), self.autocast == "reference"
        return with_runtime_checks(
            self.name,
            names,
            example_args,
            run,
            reference,
            self._left_to_torch,
            failed,
            minds_autocast=minds_autocast,
            writes=writes,
        )

    def _left_to_torch(self, *args: Any) -> Any:
        """A call that no route may take, in plain PyTorch."""
        self._mind_pin(args)
        return (mutation.checked_reference(self, args) if self.mutates else self.plain)(*args)

    def _mind_pin(self, args: tuple) -> None:
        """Raise where a route is pinned and none may take the call, unless torch rewrites the program."""
        pinned = settings.current().pins.get(self.name, REFERENCE)
        why = None if pinned == REFERENCE else blocked(args, self.autocast == "reference")
        if why is not None and why.pin_raises:
            problem = plain_problem(self.problem(*args))
            raise Refused(f"{self.name} is pinned to {pinned!r}, which refuses {problem}: {why.reason}")

    def _without_autocast(self, *args: Any) -> Any:
        """The reference of an op that autocast leaves alone, whatever torch does to the ops it is made of."""
        if not autocasting():
            return self.reference(*args)
        with without_autocast():
            return self.reference(*args)

    def _under_autocast(self, *args: Any) -> Any:
        """Cast the inputs as torch would, then choose for what they have become."""
        cast = self.cast(args, Tensor.to)
        with without_autocast():
            return self(*cast)

    def cast(self, args: tuple, to: Callable[..., Tensor], device_type: str | None = None) -> tuple:
        """The arguments as autocast casts them for this op, if it is on for their device: `to(x, dtype=)`.

        device_type: of a device that is asked about in place of the tensors' own.
        """
        if self.autocast != "cast" or not autocasting():
            return args
        kind = device_type or next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
        if not autocasts(kind):
            return args
        dtype = torch.get_autocast_dtype(kind)

        def cast(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype in (torch.float64, dtype):
                return x
            return to(x, dtype=dtype) if device_type is not None or x.device.type == kind else x

        return tuple(map(cast, args))

    def explain(self, args: tuple, device: Device | None = None) -> Verdict:
        """What a call with these arguments of the reference would run, here and now: under this autocast,
        transform or mode, and with this pin. A device stands for one that is not here: tensors may then be
        anywhere."""
        # Only sizes, strides and dtypes are looked at: casting needs no values.
        seen = self.cast(args, torch.empty_like, None if device is None else device.type)
        key = self.key(seen)._replace(wants_grad=self._wants_grad(args))
        minds_autocast = self.autocast == "reference"
        if device is not None:
            why = AUTOCAST_ON if minds_autocast and autocasting() else None
            return self.verdict(key._replace(devices=()), device, why)
        why = blocked(args, minds_autocast)
        where = key.devices[0] if key.devices else torch.device("cpu")
        if why is None and not _has_routes(where):
            why = Blocked(f"a tensor on {where}, routes need one on a CPU or a GPU", False)
        return self.verdict(key, blocked=why)

    def key(self, args: tuple) -> Key:
        """All that the choice for these arguments depends on."""
        devices = tuple(x.device for x in args if isinstance(x, Tensor))
        return Key(self.problem(*args), self._wants_grad(args), devices)

    @staticmethod
    def _wants_grad(args: tuple) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in args if isinstance(x, Tensor))

    def verdict(self, key: Key, device: Device | None = None, blocked: Blocked | None = None) -> Verdict:
        """What `choose` says of this key under the current settings, tables and failures."""
        current = settings.current()
        if blocked is None and len(set(key.devices)) > 1:
            names = " and ".join(map(str, dict.fromkeys(key.devices)))
            blocked = Blocked(f"tensors on {names}, routes need one device", True)
        if blocked is None and key.wants_grad and self.mutates:
            written = " and ".join(self.mutates)
            blocked = Blocked(
                f"gradients are wanted, a route that writes into {written} needs a call without them", True
            )
        pin, reason = current.pins.get(self.name), None if blocked is None else blocked.reason
        if blocked is not None and not blocked.pin_raises and pin not in (None, REFERENCE):
            pin, reason = None, f"{blocked.reason}; a pin does not count there"
        device = device or (Device.of(key.devices[0]) if key.devices else Device.of("cpu"))
        return choose(
            self,
            key.problem,
            device,
            pin=pin,
            numerics=current.numerics,
            measured=Tables.for_device(device).lookup(self, key.problem),
            failed=self._failures(key, device),
            overhead=AUTOGRAD_OVERHEAD if key.wants_grad else 0.0,
            blocked_by=reason,
        )

    def _failures(self, key: Key, device: Device) -> dict[str, str]:
        """Routes that failed at launch for this key, or whose kernels do not compile for the device."""
        failed = self.failed.reasons(key)
        for route in self.routes.values() if device.triton is not None else ():
            problem = failures.compile_problem(route.code_hash, device) if route.kernels else None
            if problem is not None:
                failed[route.name] = problem
        return failed

    def _fall_through(self, route: Route, failure: Exception, args: tuple) -> Any:
        """A route failed at launch: remember it as refused, say so once, take the next one. Where a kernel
        does not compile it is refused for all calls, else for calls like this one. Raise the failure where
        the route was pinned, or may have written into an argument: the next one would begin with changed
        values."""
        if settings.current().pins.get(self.name) is not None:
            raise failure
        key = self.key(args)
        device = Device.of(key.devices[0])
        if failures.kind_of(failure) == "compilation" and device.triton is not None:
            failures.remember(
                route.code_hash, device, f"its kernels do not compile: {failures.in_words(failure)}"
            )
        else:
            self.failed.add(route.name, key, failure)
        forget_choices()
        if self.mutates and not route.fails_before_writing:
            note = (
                f"turnout.{self.name}: route {route.name!r} failed and may have written parts of "
                f"{' and '.join(self.mutates)}, so no other route was tried; the next call takes another "
                "one: pass it tensors with the values from before this call"
            )
            getattr(failure, "add_note", str)(note)  # Python 3.11
            raise failure
        if self.failed.is_news(route.name, failure):
            message = (
                f"route {route.name!r} failed at launch: {failures.in_words(failure)}; taking the next one"
            )
            warnings.warn(f"turnout.{self.name}: {message}", TurnoutWarning, stacklevel=6)
        return self(*args)


def _written_out(op: Op) -> Callable[..., Any]:
    """The function that users call, written out for the op's signature, as namedtuple does: a loop over
    arguments would cost more than all the rest. Its cache key is everything the choice depends on; a call
    whose key is in the dispatch cache is one look-up away from its kernel."""
    tensor = "{0}.shape, {0}.stride(), {0}.dtype"
    key, grads = ["settings()", "autocasting()"] if op.autocast == "cast" else ["settings()"], []
    if op.ambient is not None:
        key.append(f"ambient({next(iter(op.signature.parameters))})")
    # That the others are on this device too is asked of routes only. On a CPU, times and costs go with
    # torch's threads.
    key += [
        f"(device := {next(iter(op.signature.parameters))}.get_device())",
        "threads() if device < 0 else 0",
    ]
    for name, parameter in op.signature.parameters.items():
        kind = str(parameter.annotation)
        if kind in ("Tensor", str(Tensor)):
            key.append(tensor.format(name))
            grads.append(f"{name}.requires_grad")
        elif "Tensor" in kind:
            key.append(f"None if {name} is None else ({tensor.format(name)})")
            grads.append(f"({name} is not None and {name}.requires_grad)")
        else:
            key.append(f"tuple({name})" if "list" in kind.lower() else name)
    key.append(f"grad_enabled() and ({' or '.join(grads)})")
    arguments = ", ".join(op.signature.parameters)
    source = f"""
def {op.name}({arguments}):
    if compiling():
        return when_compiled({arguments})
    try:
        cache_key = ({", ".join(key)})
        run = cached(cache_key)
    except Exception as failure:
        raise_if_interrupted(failure, look_up, {arguments})
        return dispatch_uncached(None, {arguments})  # wrong argument types, symbolic sizes: torch says why
    if run is None:
        return dispatch_uncached(cache_key, {arguments})
    return run({arguments})

def look_up({arguments}):
    return cached(({", ".join(key)}))
"""
    known = {
        "compiling": torch.compiler.is_dynamo_compiling,
        "when_compiled": op.when_compiled,
        "settings": settings.entered.get,
        "autocasting": autocasting,
        "grad_enabled": torch.is_grad_enabled,
        "cached": op.dispatch_cache.get,
        "dispatch_uncached": op.dispatch_uncached,
        "ambient": op.ambient,
        "raise_if_interrupted": _raise_if_interrupted,
        "threads": torch.get_num_threads,
    }
    exec(source, known)
    return known[op.name]


def _raise_if_interrupted(failure: BaseException, look_up: Callable[..., Any], *args: Any) -> None:
    """Raise a failure to look up a call unless it comes again: then it lies in the arguments, else it came
    from outside, from the handler of a signal. A failure from outside that comes meanwhile is raised as
    well."""
    failed = [failure]
    for _ in range(4):
        try:
            look_up(*args)
        except BaseException as again:  # of whichever kind: what does not come again is raised below
            failed.append(again)
            if _are_alike(*failed[-2:]):
                break
        else:
            raise failure
    for one in failed:
        if not _are_alike(one, failed[-1]):
            raise one


def _are_alike(one: BaseException, other: BaseException) -> bool:
    return type(one) is type(other) and str(one) == str(other)


@contextlib.contextmanager
def watched(watch: Watch, *, every_call: bool = False) -> Iterator[None]:
    """While this is entered, `watch(op, args)` is called before every call that looks like none before, as if
    there had been none; with `every_call` before each one, which then runs inside the context that `watch`
    returns, if any.
    """
    if every_call:
        with _around_every_call(watch):
            yield
        return
    _watchers.append(watch)
    forget_choices()
    try:
        yield
    finally:
        _watchers.remove(watch)
        forget_choices()


def is_watching() -> bool:
    """Whether somebody wants to see the calls that look like none before."""
    return bool(_watchers)


@contextlib.contextmanager
def _around_every_call(watch: Watch) -> Iterator[None]:
    def around(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with watch(op, args) or contextlib.nullcontext():
                return call(*args)

        return run

    before = {op: op.call for op in OPS.values()}
    try:
        for op, call in before.items():
            op.call = around(op, call)
        yield
    finally:
        for op, call in before.items():
            op.call = call


def forget_choices() -> None:
    """Drop every cached choice and all that was prepared for it: a table changed, or a route failed."""
    global _clearings
    with _cache_lock:
        _clearings += 1
        _cached.clear()
        for op in OPS.values():
            op.dispatch_cache.clear()


def _has_routes(device: torch.device) -> bool:
    """Whether routes may take tensors of a device: a CPU's, a GPU's, and those of any other that Triton
    drives.
    """
    return device.type in ("cpu", "cuda") or Device.of(device).backend is not None


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast off for CPU and GPU, whichever is on."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _register(op: Op) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two torch ops. `turnout::<op>` is opaque and chooses when it runs; `turnout::<op>_when_compiled` is
    what a traced program calls: while a graph is made with sizes that are known, it becomes the plain
    reference where the reference is chosen, so that torch.compile sees PyTorch's own ops and the router costs
    nothing; else it becomes the opaque op."""
    schema = torch.library.infer_schema(op.reference, mutates_args=op.mutates)
    qualified = f"turnout::{op.name}"
    _LIBRARY.define(op.name + schema)
    _LIBRARY.impl(op.name, op.below_autograd, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, op.reference, lib=_LIBRARY)
    if not op.mutates:
        torch.library.register_autograd(
            qualified, functools.partial(_backward, op), setup_context=_save, lib=_LIBRARY
        )
    opaque = getattr(torch.ops.turnout, op.name).default

    def when_compiled(*args: Any) -> Any:
        if autocasting():
            if op.autocast == "reference":
                return op.reference(*args)
            cast = op.cast(args, Tensor.to)
            with without_autocast():
                return when_compiled(*cast)
        tensors = [x for x in args if isinstance(x, Tensor)]
        known = all(isinstance(n, int) for x in tensors for n in (*x.shape, *x.stride()))
        if op.mutates:
            if known:
                mutation.refuse_self_overlap(op, args)
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                return op.reference(*args)
        return (
            op.reference(*args) if known and op.verdict(op.key(args)).chosen == REFERENCE else opaque(*args)
        )

    traced = f"{op.name}_when_compiled"
    _LIBRARY.define(traced + schema)
    _LIBRARY.impl(traced, when_compiled, "CompositeImplicitAutograd")
    return opaque, getattr(torch.ops.turnout, traced).default


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.plain = tuple(None if isinstance(x, Tensor) else (x,) for x in inputs)


def _backward(op: Op, ctx: Any, *grads: Tensor | None) -> tuple:
    """The op's own vector-Jacobian product, or that of the reference, on the saved inputs."""
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) if plain is None else plain[0] for plain in ctx.plain]
    if op.vjp is not None:
        return tuple(op.vjp(tuple(inputs), grads))
    wanted = [
        i
        for i, (plain, needed) in enumerate(zip(ctx.plain, ctx.needs_input_grad, strict=True))
        if plain is None and needed
    ]

    def reference(*differentiated: Tensor) -> Any:
        replaced = dict(zip(wanted, differentiated, strict=True))
        result = op.reference(*(replaced.get(i, x) for i, x in enumerate(inputs)))
        return result if isinstance(result, tuple) else (result,)

    # Grad mode is on for create_graph.
    with differentiable_backward() if torch.is_grad_enabled() else contextlib.nullcontext():
        outputs, vjp, *_ = torch.func.vjp(reference, *(inputs[i] for i in wanted))
        pairs = zip(outputs, grads, strict=True)
        full = tuple(torch.zeros_like(out) if grad is None else grad for out, grad in pairs)
        gradients = dict(zip(wanted, vjp(full), strict=True))
    return tuple(gradients.get(i) for i in range(len(inputs)))
