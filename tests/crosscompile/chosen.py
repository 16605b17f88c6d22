"""What every case would launch on a card: the route and configuration that are chosen there, recorded."""

from dataclasses import replace
from typing import NamedTuple

import torch

from turnout.launch.recording import Launch, recorded
from turnout.routing import versions
from turnout.routing.case import outline
from turnout.routing.device import KIB, Device
from turnout.routing.op import OPS, Key

TRITON = versions.minor(versions.triton())
A10 = replace(Device.named("4090"), name="NVIDIA A10", capability=(8, 6), shared=99 * KIB, units=72)  # as an RTX 3090
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


class Chosen(NamedTuple):
    """One launch of the route that is chosen for a case."""

    op: str
    case: str
    route: str
    launch: Launch

    @property
    def code(self) -> tuple:
        """What its compiled code depends on, of the launches of one card."""
        _, kernel, _, tensors, numbers, constants, warps, options = (self.op, *self.launch)
        kinds = [getattr(x, "kind", None) or (x is not None and x.dtype) for x in tensors]
        # Triton makes ones constant, and knows which numbers 16 divides and which need 64 bits; Gluon's do not count.
        about = [0 if kernel.is_gluon() or isinstance(n, float) else (n == 1, n % 16 == 0, abs(n) >= 2**31) for n in numbers]
        return (kernel.fn, *kinds, *about, *constants.values(), warps, *options.items())

    @property
    def kind(self) -> tuple:
        """What is compiled once for each: a kernel and a dtype; of Hopper's convolutions also how sums are shared out,
        and whether frames come from two tensors, as that decides how many registers there are."""
        shares = [self.launch.constants.get(name) for name in ("SLOTS", "BN1", "BN2", "ROWS", "W1", "CAUSAL")]
        first = self.launch.tensors[0]
        dtype = first.dtype if isinstance(first, torch.Tensor) else first.base.dtype
        has_cache = "SLOTS" in self.launch.constants and self.launch.tensors[1] is not None
        return (self.launch.kernel.fn, dtype, *shares, has_cache)


def launches(device: Device) -> list[Chosen]:
    """All launches of all cases on a device, one for each code."""
    found: dict[tuple, Chosen] = {}
    for op in OPS.values():
        for case in op.cases():
            problem, args = outline(op, case)
            verdict = op.verdict(Key(problem, False, ()), device)
            route = op.routes.get(verdict.chosen)
            if route is None or not route.kernels or (op.name, route.name) in NEEDS_A_CARD:
                continue
            with recorded(device) as recording:
                route.run(*args, **verdict.config)
            for launch in recording:
                chosen = Chosen(op.name, str(case), route.name, launch)
                found.setdefault(chosen.code, chosen)
    return list(found.values())


NEEDS_A_CARD = {("attention", "common-keys")}  # cuDNN's kernels come first; ours is flash-triton's
