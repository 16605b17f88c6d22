"""Op: one meaning and several routes. Each call is sent down the route that is chosen for it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from turnout.routing import dispatch_cache, failures, mutation, settings
from turnout.routing.case import Case, Cases
from turnout.routing.choose import REFERENCE, Refused, Verdict, choose, plain_problem
from turnout.routing.declaration import (
    check_op,
    checked_cost,
    checked_problem,
    checked_route,
    returns_several,
    signature_of,
)
from turnout.routing.device import Device, assumed, is_planning
from turnout.routing.dispatch_cache import forget_choices, new_dispatch_cache
from turnout.routing.entry import entry_point
from turnout.routing.fallback import (
    AUTOCAST_ON,
    Blocked,
    autocasting,
    autocasts,
    blocked,
    tracing_state,
)
from turnout.routing.mistakes import UNCLEAR, raise_clearer
from turnout.routing.outputs import views_unrecorded
from turnout.routing.prepared import Prepare
from turnout.routing.route import (
    UNKNOWN,
    Config,
    Cost,
    Grain,
    Guard,
    Key,
    Numerics,
    Route,
    Work,
)
from turnout.routing.runtime_checks import with_runtime_checks
from turnout.routing.table import Tables
from turnout.routing.torch_ops import register, without_autocast

F = TypeVar("F", bound=Callable[..., Any])
Watch = Callable[["Op", tuple], "contextlib.AbstractContextManager[Any] | None"]

OPS: dict[str, Op] = {}
_watchers: list[Watch] = []

# What going through an op with a registered backward costs a call, in seconds: a route must win by that much
# when gradients are wanted.
AUTOGRAD_OVERHEAD = 38e-6  # a call of 24 us became one of 63: 2-core Xeon at 2.8 GHz, torch 2.13


class TurnoutWarning(UserWarning):
    """Something was given up, and the result is still right."""


class Simpler(NamedTuple):
    """A problem without something of another one, and what it lacks, in words."""

    problem: Any
    lacks: str


class Op:
    """A reference function in plain PyTorch, plus its routes. The reference defines the result, and is the
    fake kernel and the fallback.

    problem_type: a NamedTuple with all that may change the result or the speed of a call; its classmethod
    `of` builds one from the arguments of the reference.
    cost: estimates the seconds of the reference. work: counts the bytes and FLOPs that no route can avoid.
    cases: the module whose `CASES` are the op's, imported when first needed, or a `Cases`. A case makes the
    arguments of the reference, or those of a public function declared with `of_cases=True` (see `public`).
    family: maps a problem to (family, size). Problems of one family differ in size only, so times between two
    measured sizes are interpolated.
    simpler: maps a problem to the same one without something that costs the reference more than any route,
    and says what it lacks; or to None. A measurement of it counts where the problem has none.
    vjp: `vjp(inputs, grads)` returns a gradient for each input. Without it, backward is the vector-Jacobian
    product of the reference.
    mutates: names the arguments that a call writes into (see `mutation`). The reference of such an op reads
    and allocates everything before it writes, and takes every call that wants gradients.
    builtin: torch's own function, where the reference does nothing but call it. It is then called directly.
    autocast: how the op behaves under autocast: "cast" its inputs as torch does, "ignore" autocast (run as if
    it were off), or "reference" (leave the call to torch).
    ambient: maps the first argument to the settings of torch that change the choice for such a call, such as
    TF32 flags. They are part of the cache key, and `problem_type.of` reads them.
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
        simpler: Callable[[Any], Simpler | None] | None = None,
        autocast: Literal["cast", "ignore", "reference"] = "reference",
        vjp: Callable[[tuple, tuple], Sequence[Tensor | None]] | None = None,
        mutates: tuple[str, ...] = (),
        ambient: Callable[[Tensor], Any] | None = None,
        builtin: Callable[..., Any] | None = None,
    ):
        self.ambient, self.builtin = ambient, builtin
        self.name, self.reference, self.cost = name, reference, cost
        self.problem_type = problem_type
        self.work, self.family, self.autocast, self.vjp, self.mutates = work, family, autocast, vjp, mutates
        self.simpler, self._cases = simpler, cases
        self.signature = signature_of(f"the reference of op {name!r}", reference)
        check_op(self, OPS)
        self.returns_several = returns_several(reference)
        self.problem, self.cost = checked_problem(self), checked_cost(f"the reference of {name}", cost)
        self.lowered_by: Callable[..., tuple] | None = None
        self.plain = self._without_autocast if autocast == "ignore" and builtin is None else reference
        self.routes: dict[str, Route] = {}
        self.failed = failures.FailedRoutes()
        self.dispatch_cache = new_dispatch_cache()
        self.opaque, self.when_compiled = register(self)
        self.call = entry_point(self)
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

        prepare: called with a `Prepared` and the arguments of a call, it may return a function that runs
        calls like that one (the same shapes, strides, dtypes, devices and plain arguments) with less host
        time than the route's own function; or None.
        """

        def declare(run: Callable[..., Any]) -> Callable[..., Any]:
            declared = Route(
                name,
                run,
                refuses,
                cost,
                numerics,
                version,
                configs,
                prepare,
                kernels,  # pyright: ignore[reportArgumentType]
                in_place,  # pyright: ignore[reportArgumentType]
                fails_before_writing,
                grain,
            )
            self.routes[name] = checked_route(self, declared)
            return run

        return declare

    def public(self, described: F) -> F:
        """The op's generated entry point, with the name, types and docstring of a public function, so that
        the public function adds no step to a call."""
        return cast(F, functools.wraps(described)(self.call))

    def arguments(self, *args: Any, **kwargs: Any) -> tuple:
        """The reference's positional arguments of a case; `public.lower` has those of a public call."""
        if self.lowered_by is not None:
            return self.lowered_by(*args, **kwargs)
        return self.signature.bind(*args, **kwargs).args

    @functools.cached_property
    def declared_cases(self) -> Cases:
        """The op's cases, and what benchmarks and tests need to know of it."""
        cases = self._cases
        if isinstance(cases, str):
            module = importlib.import_module(cases)
            cases = getattr(module, "CASES", None)
        if not isinstance(cases, Cases):
            raise TypeError(
                f"op {self.name!r}: cases is {self._cases!r}, it needs to be a Cases, or the name of a "
                "module whose CASES is one"
            )
        return cases

    def cases(self) -> list[Case]:
        """The op's real calls, each with the model it comes from."""
        return list(self.declared_cases.calls)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def below_autograd(self, *args: Any) -> Any:
        """The kernel of the opaque torch op: gradients are taken care of above it.

        As inside torch's own ops, views made in here are not recorded as views, so callers may write into the
        result. For an op that writes, recording stays on: it counts the versions of the written arguments.
        """
        with torch.no_grad(), contextlib.nullcontext() if self.mutates else views_unrecorded():
            return self(*args)

    def dispatch_uncached(self, cache_key: tuple | None, *args: Any) -> Any:
        """Select a route for a call that is not in the dispatch cache, cache the choice, and run it.

        `cache_key` is None if it could not be built (wrong argument types, symbolic sizes). The reference
        then runs, so that the caller sees torch's own error, or one that names the argument.
        """
        try:
            return self._dispatch(cache_key, *args)
        except UNCLEAR as failure:
            if self.builtin is None:  # else the error is torch's own
                self.check_kinds(args, failure)
            if isinstance(failure, IndexError) and not self.mutates:
                self.plain(*args)  # a tensor may have too few dimensions: torch says so
            raise

    def check_kinds(self, args: tuple, failure: Exception | None = None) -> None:
        """Raise TypeError if an argument of the reference is of the wrong kind.

        failure: what the call has raised, for which this may be the reason.
        """
        given = zip(self.signature.parameters, args, strict=True)
        raise_clearer(self.name, self.reference, given, failure)

    def _dispatch(self, cache_key: tuple | None, *args: Any) -> Any:
        now = settings.entered.get()
        if isinstance(now, settings.Asking):
            raise settings.Asked(self, args)
        chosen_at = dispatch_cache.clearings()
        if isinstance(now, settings.Split):
            run = now.plan(self, args)
            if cache_key is None or is_planning():
                return run(*args)
            return dispatch_cache.add(self.dispatch_cache, cache_key, run, chosen_at)(*args)
        if cache_key is None or tracing_state() is not None:
            return self.plain(*args)
        if not _has_routes(next(x.device for x in args if isinstance(x, Tensor))):
            # not cached: the key of a meta tensor is that of a CPU tensor
            return self._reference_run(args)(*args)
        if blocked(args, False) is not None:
            return self._left_to_torch(*args)  # nor is this: a plain call has the same key
        run = self._chosen(args)
        if is_planning():
            return run(*args)
        return dispatch_cache.add(self.dispatch_cache, cache_key, run, chosen_at)(*args)

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
        """The function to run while calls are only planned (`turnout.warm`): the route's own function.

        Nothing is prepared or cached for it, so the runtime checks were made when this call was dispatched.
        """
        if self.autocast == "reference" and autocasting():
            return self.plain
        verdict = self.verdict(self.key(args))
        if verdict.chosen == REFERENCE:
            return self.plain
        return torch.no_grad()(functools.partial(self.routes[verdict.chosen].run, **dict(verdict.config)))

    def _reference_run(self, args: tuple) -> Callable[..., Any]:
        """The function that runs the reference for calls with the cache key of these arguments."""
        return mutation.checked_reference(self, args) if self.mutates else self.builtin or self.plain

    def _until(self, end: float, run: Callable[..., Any]) -> Callable[..., Any]:
        """Run this until then, and choose again after it: a route that lacked memory is then tried again."""

        def call(*args: Any) -> Any:
            if self.failed.now() < end:
                return run(*args)
            self.dispatch_cache.clear()
            return self(*args)

        return call

    def with_runtime_checks(
        self, run: Callable[..., Any], example_args: tuple, route: Route | None = None
    ) -> Callable[..., Any]:
        """A function that runs a route after the runtime checks, for calls with the cache key of these
        arguments.

        The checks leave to torch what only torch can handle: transforms, modes, subclasses, lazy negation and
        conjugation, tensors on other devices. They are not part of the cache key, so a call that takes the
        reference does not pay for them. `fallback.blocked` makes the same checks and gives the reason. Where
        `route` is given, the next route takes the call if the launch fails.
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
        """Raise if a route is pinned and no route may take the call, unless torch rewrites the program."""
        pinned = settings.current().pins.get(self.name, REFERENCE)
        why = None if pinned == REFERENCE else blocked(args, self.autocast == "reference")
        if why is not None and why.pin_raises:
            problem = plain_problem(self.problem(*args))
            raise Refused(f"{self.name} is pinned to {pinned!r}, which refuses {problem}: {why.reason}")

    def _without_autocast(self, *args: Any) -> Any:
        """The reference with autocast off, for an op that ignores autocast: torch would cast its parts."""
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

        device_type: replaces that of the tensors, where `explain` is asked about another device.
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
        """The verdict for a call with these arguments of the reference, under the autocast, transform, mode
        and pin in force.

        device: a device that need not be in this machine; tensors may then be on any device.
        """
        # Only sizes, strides and dtypes are looked at: casting needs no values.
        self.check_kinds(args)
        cast_args = self.cast(args, torch.empty_like, None if device is None else device.type)
        with contextlib.nullcontext() if device is None else assumed(device):
            key = self.key(cast_args)._replace(wants_grad=self._wants_grad(args))
        minds_autocast = self.autocast == "reference"
        if device is not None:
            why = AUTOCAST_ON if minds_autocast and autocasting() else None
            return self.verdict(key._replace(devices=()), device, why)
        why = blocked(args, minds_autocast)
        device_here = key.devices[0] if key.devices else torch.device("cpu")
        if why is None and not _has_routes(device_here):
            why = Blocked(f"a tensor on {device_here}, routes need one on a CPU or a GPU", False)
        return self.verdict(key, blocked=why)

    def key(self, args: tuple) -> Key:
        """All that the choice for these arguments depends on."""
        devices = tuple(x.device for x in args if isinstance(x, Tensor))
        return Key(self.problem(*args), self._wants_grad(args), devices)

    @staticmethod
    def _wants_grad(args: tuple) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in args if isinstance(x, Tensor))

    def verdict(self, key: Key, device: Device | None = None, blocked: Blocked | None = None) -> Verdict:
        """The verdict of `choose` for this key under the current settings, tables and failures."""
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
            preferred=current.preferred.get(self.name),
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
        """Handle a route that failed at launch: refuse it from now on, warn once, and run the next route.

        A kernel that does not compile is refused for all calls, any other failure for calls like this one.
        The failure is raised if the route was pinned, or may have written into an argument: the next route
        would start from changed values.
        """
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


@contextlib.contextmanager
def watched(watch: Watch, *, every_call: bool = False) -> Iterator[None]:
    """Inside this block, call `watch(op, args)` before each call that is dispatched. The dispatch caches are
    cleared first, so that every kind of call is dispatched once more.

    every_call: watch every call, cached or not; each runs inside the context that `watch` returns, if any.
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
    """Whether a `watched` block is active."""
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


def _has_routes(device: torch.device) -> bool:
    """Whether routes may take tensors of a device: a CPU's, a GPU's, and those of any other that Triton
    drives.
    """
    return device.type in ("cpu", "cuda") or Device.of(device).backend is not None
