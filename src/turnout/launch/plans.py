"""Plan the launches of a route once for each `Prepared`, and launch with new addresses at each call.

A route that only allocates and launches is a function that returns a `LaunchPlan` (`runs_plan`).
`prepare_from_plan` calls it once, finds out which arguments and new tensors each kernel gets, and generates
the code that further calls need: allocate the new tensors, pass all addresses to Triton's launcher in C,
return the outputs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from turnout.launch.descriptors import described, encode
from turnout.launch.launcher import Launch, card_of, hooks, start
from turnout.routing import torch_private
from turnout.routing.prepared import Prepared
from turnout.routing.torch_private import storage_id

if TYPE_CHECKING:
    from turnout.launch.direct import DirectLauncher

_ALIGNMENT = 16  # bytes: compiled kernels and plans may count on it


class Workspace(NamedTuple):
    """Memory that launches share, and the function that allocates it for other calls (None: a new tensor)."""

    tensor: Tensor
    make: Callable[[], Tensor] | None = None


class LaunchPlan(NamedTuple):
    """The launches of a route, in order, and its outputs: new tensors that they fill, or None."""

    launches: tuple[Launch, ...]
    outputs: Tensor | tuple[Tensor, ...] | None
    workspaces: tuple[Workspace, ...] = ()

    @property
    def new_tensors(self) -> list[Workspace]:
        """Outputs, then workspaces."""
        outputs = (self.outputs,) if isinstance(self.outputs, Tensor) else self.outputs or ()
        return [*map(Workspace, outputs), *self.workspaces]


def run_plan(plan: LaunchPlan) -> Any:
    """Make the launches of a plan, and return its outputs."""
    for request in plan.launches:
        start(request)
    return plan.outputs


def runs_plan(plan: Callable[..., LaunchPlan]) -> Callable[..., Any]:
    """Make a route of a function that allocates tensors and returns a `LaunchPlan`."""

    @functools.wraps(plan)
    def run(*args: Any, **config: Any) -> Any:
        return run_plan(plan(*args, **config))

    return run


def prepare_from_plan(
    prepared: Prepared, args: tuple, plan: Callable[..., LaunchPlan | None] | None = None
) -> Callable[..., Any] | None:
    """Plan once for all calls that differ only in addresses, and return the function that runs them.

    plan: called with the arguments and the configuration; of a route of `runs_plan` it is the route's own. A
    call where 16 bytes do not divide all addresses is left to the route. None where `plan` gives none, and
    where a tensor
    is copied before it is launched on: nobody would copy those of the next call.
    """
    make: Callable[..., LaunchPlan | None] = plan or inspect.unwrap(prepared.function)
    try:
        args = _told_apart(args)
        planned = make(*args, **prepared.config)
    except (
        MemoryError,
        torch.OutOfMemoryError,
    ):  # there was none for two calls at once; there may be for one
        return None
    if planned is None:
        return None
    operands = _operands(planned, args)
    return None if operands is None else _PreparedPlan(prepared, planned, operands, args).call


class _Operand(NamedTuple):
    """A tensor of a launch: which argument or new tensor holds its memory, and its view of that."""

    position: int  # among arguments and new tensors
    offset: int  # in bytes, from where that one begins
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    pattern: Any  # of a descriptor, else None

    def view(self, tensors: Sequence[Any]) -> Any:
        """The tensor or descriptor itself, for a launch by Triton."""
        x: Tensor = tensors[self.position]
        if (self.offset, x.dtype, x.shape, x.stride()) != (0, self.dtype, self.shape, self.strides):
            start = (_start(x) + self.offset) // self.dtype.itemsize
            x = torch.empty(0, dtype=self.dtype, device=x.device).set_(
                x.untyped_storage(), start, self.shape, self.strides
            )
        return x if self.pattern is None else described(x, self.pattern)


def _start(x: Tensor) -> int:
    """The offset of a tensor in its storage, in bytes."""
    return int(x.storage_offset()) * x.element_size()


def _told_apart(args: tuple) -> tuple:
    """The arguments, with stand-ins for tensors that share a storage, so that a launch shows which one it was
    given, and for those that start where a plan for aligned tensors would not hold."""
    seen: set[int] = set()

    def told_apart(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if storage_id(x) in seen or x.data_ptr() % _ALIGNMENT:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        seen.add(storage_id(x))
        return x

    return tuple(map(told_apart, args))


def _operands(plan: LaunchPlan, args: tuple) -> list[tuple[_Operand | None, ...]] | None:
    """The operands of each launch; None where one lies in memory that the next call does not have."""
    tensors = [*args, *(workspace.tensor for workspace in plan.new_tensors)]
    positions = {storage_id(x): i for i, x in enumerate(tensors) if isinstance(x, Tensor)}

    def operand(x: Any) -> _Operand | None:
        if x is None:
            return None
        tensor, pattern = (x, None) if isinstance(x, Tensor) else (x.base, x.pattern)
        position = positions[storage_id(tensor)]
        offset = _start(tensor) - _start(tensors[position])
        if offset % _ALIGNMENT:
            raise KeyError(position)
        return _Operand(position, offset, tensor.shape, tensor.stride(), tensor.dtype, pattern)

    try:
        return [tuple([operand(x) for x in request.tensors]) for request in plan.launches]
    except KeyError:
        return None


class _Form(NamedTuple):
    """All that the generated code of a call depends on.

    Tensors are given by their positions among arguments and new tensors.
    """

    arguments: int
    new_tensors: int
    outputs: int | None  # how many of the new tensors are returned as a tuple; -1: the first one, None: none
    on_card: bool
    launches: tuple[
        tuple[tuple[int, int, bool] | None, ...], ...
    ]  # position, offset, whether it is a descriptor


class _PreparedPlan:
    """A plan without its tensors, and the kernels it launches. `call` runs it for other arguments."""

    def __init__(
        self, prepared: Prepared, plan: LaunchPlan, operands: list[tuple[_Operand | None, ...]], args: tuple
    ):
        self.requests = [request._replace(tensors=()) for request in plan.launches]
        self.operands = operands
        self.allocators = [x.make or _allocator(x.tensor) for x in plan.new_tensors]
        self.launchers: tuple[DirectLauncher, ...] | None = (
            None  # once kernels are compiled and can be called
        )
        first = next(x for x in operands[0] if x is not None)
        card = card_of([*args, *(x.tensor for x in plan.new_tensors)][first.position])
        outputs = (
            None if plan.outputs is None else -1 if isinstance(plan.outputs, Tensor) else len(plan.outputs)
        )
        launches = [
            tuple([x and (x.position, x.offset, x.pattern is not None) for x in each]) for each in operands
        ]
        self.call = _maker(
            _Form(len(args), len(self.allocators), outputs, card is not None, tuple(launches))
        )(
            self,
            prepared.run_route,
            functools.partial(prepared.keeping, self.launch_by_triton),
            card and card.index,
        )

    def constants(self, n: int) -> tuple:
        """The arguments of the `n`-th kernel other than tensors.

        A NamedTuple becomes a plain tuple: Triton's launcher in C copies any other sequence, 0.1 us each.
        """
        arguments = (*self.requests[n].numbers, *self.requests[n].constants.values())
        return tuple([tuple(x) if isinstance(x, tuple) else x for x in arguments])

    def launch_by_triton(self, *args: Any) -> list[Tensor]:
        """Launch through Triton, which compiles kernels and calls hooks. Returns the new tensors."""
        new_tensors = [allocate() for allocate in self.allocators]
        tensors = (*args, *new_tensors)
        launchers = [
            start(request._replace(tensors=tuple([x and x.view(tensors) for x in operands])))
            for request, operands in zip(self.requests, self.operands, strict=True)
        ]
        if all(x is not None and x.run is not None for x in launchers):
            self.launchers = tuple(launchers)  # pyright: ignore[reportAttributeAccessIssue]
        return new_tensors


def _allocator(x: Tensor) -> Callable[[], Tensor]:
    """A function that allocates a tensor like this one."""
    return functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


@functools.lru_cache(512)
def _maker(form: _Form) -> Callable[..., Callable[..., Any]]:
    """Generate a function that makes the calls of one form. A loop over tensors would take twice the time."""
    used = sorted({x[0] for each in form.launches for x in each if x is not None})
    argument_indices = [i for i in used if i < form.arguments]
    allocated = [i for i in used if i >= form.arguments]
    names = [f"x{i}" for i in range(form.arguments + form.new_tensors)]
    arguments, new_tensors = ", ".join(names[: form.arguments]), names[form.arguments :]
    returned = {None: "None", -1: "".join(new_tensors[:1])}.get(form.outputs)
    returned = returned or f"({''.join(f'{x}, ' for x in new_tensors[: form.outputs])})"
    by_triton = f"[{', '.join(new_tensors)}] = launch_by_triton({arguments}); return {returned}"
    lines = [*_addresses(argument_indices, arguments)]
    if form.on_card:
        lines += [
            "launchers = plan.launchers",
            "if launchers is None or hooks[0].calls or hooks[1].calls:",
            f"    {by_triton}",
            "if current_device() != index:",
            f"    with on_device(index): return call({arguments})",
            *[f"{name} = allocate{i}()" for i, name in enumerate(new_tensors)],
            *_addresses(allocated, arguments),
            "stream = current_stream(index)",
            *[line for n, each in enumerate(form.launches) for line in _launch_lines(n, each)],
            f"return {returned}",
        ]
    else:
        lines.append(by_triton)
    fixed = [f"allocate{i} = plan.allocators[{i}]" for i in range(form.new_tensors)]
    for n, each in enumerate(form.launches):
        fixed += [f"programs{n} = plan.requests[{n}].programs", f"constants{n} = plan.constants({n})"]
        fixed += [
            f"pattern{n}_{i} = plan.operands[{n}][{i}].pattern"
            for i, x in enumerate(each)
            if x is not None and x[2]
        ]
    scope = {
        "hooks": hooks,
        "on_device": torch.cuda.device,
        "encode": encode,
        "current_device": torch_private.cuda_device,
        "current_stream": torch_private.cuda_stream,
    }
    before, body = "".join(f"\n    {line}" for line in fixed), "".join(f"\n        {line}" for line in lines)
    exec(
        f"""
def make(plan, run_route, launch_by_triton, index):{before}
    def call({arguments}):{body}
    return call
""",
        scope,
    )
    return scope["make"]  # pyright: ignore[reportReturnType]


def _addresses(positions: list[int], arguments: str) -> Iterator[str]:
    """Code that reads the addresses of tensors, and calls the route where one is not aligned."""
    if positions:
        yield from [f"at{i} = x{i}.data_ptr()" for i in positions]
        addresses = " | ".join(f"at{i}" for i in positions)
        yield f"if ({addresses}) & {_ALIGNMENT - 1}: return run_route({arguments})"


def _launch_lines(n: int, operands: tuple[tuple[int, int, bool] | None, ...]) -> Iterator[str]:
    """Code of the `n`-th launch; encoded descriptors are looked up by address."""
    arguments, descriptors = [], 0
    for i, operand in enumerate(operands):
        if operand is None:
            arguments.append("None")
            continue
        position, offset, is_descriptor = operand
        address = f"at{position} + {offset}" if offset else f"at{position}"
        if is_descriptor:
            pattern = f"pattern{n}_{i}"
            encoding = f"encode({pattern}, {address}, launchers[{n}].kernel, {descriptors})"
            yield f"map{i} = {pattern}.encoded.get({address}) or {encoding}"
            address, descriptors = f"*map{i}", descriptors + 1
        arguments.append(address)
    yield f"launchers[{n}].run(programs{n}, stream, ({''.join(f'{x}, ' for x in arguments)}*constants{n}))"
