"""Every kernel that a route launches, compiled for cards that are not here, within what they have."""

from dataclasses import replace

import pytest
import torch

from tests.walk import LAUNCHING, random_call, takes
from turnout.launch.crosscompile import compile_launches
from turnout.launch.recording import recorded
from turnout.routing import versions
from turnout.routing.device import KIB, Device

TRITON = versions.minor(versions.triton())
A10 = replace(Device.named("4090"), name="NVIDIA A10", capability=(8, 6), shared=99 * KIB, units=72)  # as RTX 3090 too
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
KINDS = (torch.bfloat16, torch.float32, torch.complex64)  # the interpreter runs float32 and float16

PLACES = [(op, route, card) for op, route in LAUNCHING for card in CARDS if takes(op, route, CARDS[card])]


@pytest.mark.parametrize(("op", "route", "card"), PLACES, ids=[f"{op.name}-{route.name}-{card}" for op, route, card in PLACES])
def test_compiles_within_shared_memory(op, route, card):
    device = CARDS[card]
    kinds: set[torch.dtype] = set()
    launches = []
    for seed in range(400):
        args = random_call(op, seed, torch.device("cpu"))
        problem, kind = op.problem(*args), args[0].dtype
        if kind in kinds or kind not in KINDS or any(route.refuses(problem, device)):
            continue
        kinds.add(kind)
        configs = list(route.configs(problem, device))
        for config in configs if card == "sm_90" and kind is torch.bfloat16 else configs[:1]:
            with recorded(device) as launched:
                route.run(*args, **config)
            launches += launched
    assert kinds
    assert launches
    for compiled in compile_launches(launches, device):
        assert compiled.resources.shared <= device.shared
