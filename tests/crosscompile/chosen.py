"""What calls launch on cards that are not here: recorded, not run."""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from tests.walk import LAUNCHING, random_call
from turnout.launch.descriptors import kind
from turnout.launch.launcher import Launch
from turnout.launch.recording import recorded
from turnout.ops.convolution.gpu.packing import transpose
from turnout.routing import versions
from turnout.routing.case import outline
from turnout.routing.device import KIB, Device
from turnout.routing.op import OPS, Op
from turnout.routing.route import Key

TRITON = versions.minor(versions.triton())
A10 = replace(
    Device.named("4090"), name="NVIDIA A10", capability=(8, 6), shared=99 * KIB, units=72
)  # as an RTX 3090
CARDS = {
    "sm_80": Device.named("a100"),
    "sm_86": A10,
    "sm_89": Device.named("4090"),
    "sm_90": Device.named("h200"),
    "sm_100": Device.named("b200"),
    "sm_120": Device.named("5090"),
    "gfx942": Device.named("mi300x"),
}
CARDS = {name: replace(device, triton=TRITON) for name, device in CARDS.items()}

# How much is compiled: "quick" one launch for each kernel and dtype on Hopper, "usual" on other cards too,
# "all" every launch of every case on every card.
LEVELS = ("quick", "usual", "all")
LEVEL = os.environ.get("TURNOUT_COMPILE", "usual")
if LEVEL not in LEVELS:
    raise ValueError(f"TURNOUT_COMPILE is {LEVEL!r}, it needs to be one of {', '.join(LEVELS)}")

NEEDS_A_CARD = {("attention", "common-keys")}  # cuDNN's kernels come first; ours is flash-triton's
WIDE_HEADS = (264, 288, 320, 384, 448, 512)  # whole blocks of channels and narrower last ones


class Chosen(NamedTuple):
    """One launch of a route. `tuned`: in the configuration that is chosen for a call of a model."""

    op: str
    call: str
    route: str
    launch: Launch
    tuned: bool = True

    @property
    def name(self) -> str:
        return f"{self.launch.kernel.fn.__name__} of {self.op} {self.route}, {self.call}"

    @property
    def code(self) -> tuple:
        """What its compiled code depends on, of the launches of one card."""
        kernel, _, tensors, numbers, constants, warps, options = self.launch
        kinds = [x is not None and (x.dtype if isinstance(x, torch.Tensor) else kind(x)) for x in tensors]
        # Triton makes ones constant, and knows which numbers 16 divides and which need 64 bits; Gluon's do
        # not count.
        about = [
            0 if kernel.is_gluon() or isinstance(n, float) else (n == 1, n % 16 == 0, abs(n) >= 2**31)
            for n in tree_leaves(numbers)
        ]
        return (kernel.fn, *kinds, *about, *constants.values(), warps, *options.items())

    @property
    def kind(self) -> tuple:
        """What is compiled once for each: a kernel and a dtype; of Hopper's convolutions also how sums are
        shared out, and whether frames come from two tensors, as that decides how many registers there are."""
        shares = [self.launch.constants.get(name) for name in ("SLOTS", "BN1", "BN2", "ROWS", "W1", "CAUSAL")]
        has_cache = "SLOTS" in self.launch.constants and self.launch.tensors[1] is not None
        return (*self.kernel_and_dtype, *shares, has_cache)

    @property
    def kernel_and_dtype(self) -> tuple:
        first = self.launch.tensors[0]
        return (self.launch.kernel.fn, first.dtype if isinstance(first, torch.Tensor) else first.base.dtype)


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """While this is entered, float32 convolutions may be multiplied in TF32, as is torch's default on a card.
    The tensors here are a CPU's, whose own setting counts for them."""
    settings: Any = torch.backends.mkldnn.conv  # pyright: ignore
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def calls(op: Op) -> Iterator[tuple[str, Any, tuple]]:
    """A name, the problem and the arguments of every call that is looked at: all cases, those in float32 also
    with TF32, and attention with wide heads of every kind."""
    for case in op.cases():
        yield str(case), *outline(op, case)
        if case.dtype is torch.float32:
            with tf32_allowed():
                yield f"{case} in TF32", *outline(op, case)
    for channels in WIDE_HEADS if op.name == "attention" else ():
        q, k, v = (torch.empty(1, 1, 4096, channels, dtype=torch.bfloat16, device="meta") for _ in range(3))
        for causal in (False, True):
            args = op.arguments(q, k, v, causal=causal)
            yield f"heads of {channels}{', causal' if causal else ''}", op.problem(*args), args


@functools.cache
def launches(card: str) -> list[Chosen]:
    """All launches of all calls on a card in the route and configuration that are chosen there, one for each
    code.
    """
    device = CARDS[card]
    result: dict[tuple, Chosen] = {}
    for op in OPS.values():
        for name, problem, args in calls(op):
            verdict = op.verdict(Key(problem, False, ()), device)
            route = op.routes.get(verdict.chosen)
            if route is None or not route.kernels or (op.name, route.name) in NEEDS_A_CARD:
                continue
            for chosen in recorded_of(op, name, route, args, dict(verdict.config), device):
                result.setdefault(chosen.code, chosen)
    return list(result.values())


def recorded_of(op, name, route, args, config, device) -> list[Chosen]:
    with recorded(device) as recording:
        route.run(*args, **config)
    return [Chosen(op.name, name, route.name, launch) for launch in recording]


@functools.cache
def random_calls(op: str) -> list[tuple[int, Any, tuple]]:
    """A seed, the problem and the arguments of small calls."""
    calls = [(seed, random_call(OPS[op], seed, torch.device("cpu"))) for seed in range(150)]
    return [(seed, OPS[op].problem(*args), args) for seed, args in calls]


@functools.cache
def others(card: str) -> list[Chosen]:
    """For each kernel and dtype that no call takes on a card, a launch of it by a small random call of a
    route that would take it, in its first configuration."""
    device, seen, results = CARDS[card], {chosen.kernel_and_dtype for chosen in launches(card)}, []
    for op, route in LAUNCHING:
        kinds: set[torch.dtype] = set()
        for seed, problem, args in random_calls(op.name):
            kind = args[0].dtype
            if (
                kind in kinds
                or (kind is torch.float16 and card != "sm_90")
                or any(route.refuses(problem, device))
            ):
                continue
            kinds.add(kind)
            config = dict(next(iter(route.configs(problem, device))))
            for chosen in recorded_of(op, f"random call {seed}", route, args, config, device):
                if chosen.kernel_and_dtype not in seen:
                    seen.add(chosen.kernel_and_dtype)
                    results.append(chosen._replace(tuned=False))
    return [*results, *transposes(device)]


def transposes(device: Device) -> Iterator[Chosen]:
    """From channels first to last and back: routes of convolutions do so around their kernels, but not on
    meta tensors.
    """
    for dtype in (torch.bfloat16, torch.float32):
        first = torch.empty(1, 96, 64, 64, dtype=dtype, device="meta")
        last = torch.empty_like(first, memory_format=torch.channels_last)
        for x, out in ((first, last), (last, first)):
            with recorded(device) as recording:
                assert transpose(x, out)
            yield from (
                Chosen("conv2d", "another layout", "channels-last", launch, tuned=False)
                for launch in recording
            )


@functools.cache
def compiled_here(card: str) -> list[Chosen]:
    """What is compiled for a card at this level."""
    if LEVEL == "quick" and card != "sm_90":
        return []
    kinds: dict[tuple, Chosen] = {}
    for chosen in launches(card):
        kinds.setdefault(chosen.code if LEVEL == "all" else chosen.kind, chosen)
    # A float16 kernel is a bfloat16 one with other conversions: it is compiled for Hopper with one Triton
    # only. So is one in float32 on other cards where there is one in bfloat16; `make compile-all` leaves
    # nothing out.
    twins = {(kind[0], *kind[2:]) for kind in kinds if kind[1:2] == (torch.bfloat16,)}
    left_out = (
        set() if LEVEL == "all" else {torch.float16} if LEVEL == "quick" else {torch.float16, torch.float32}
    )
    if LEVEL == "usual" and card == "sm_90":
        left_out = set()
    kept = [
        chosen
        for kind, chosen in kinds.items()
        if kind[1] not in left_out or (kind[0], *kind[2:]) not in twins
    ]
    return [*kept, *others(card)]
