"""Every Triton kernel that a route launches, compiled for cards that are not here, within their shared memory."""

import sys

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.walk import LAUNCHING, random_call, takes
from turnout.ops import launching
from turnout.routing.device import Device

CARDS = {"a100": 80, "h200": 90, "b200": 100}
KINDS = (torch.bfloat16, torch.float32, torch.complex64)  # the interpreter runs float32 and float16; bfloat16 is compiled only here
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def kind(x):
    """Triton's name for the type of a tensor, or of a descriptor of one."""
    if isinstance(x, torch.Tensor):
        return "*" + TYPES[x.dtype]
    return f"tensordesc<{TYPES[x.base.dtype]}{list(x.block_shape)},{x.layout!r}>"


class Compiler:
    """Stands in for `launch`: compiles what would be launched."""

    def __init__(self, capability):
        self.capability, self.compiled = capability, {}

    def __call__(self, kernel, programs, tensors, numbers, constants, *, warps, **options):
        pointers = [("constexpr", False) if x is None else (kind(x), isinstance(x, torch.Tensor)) for x in tensors]
        whole = "i32" if kernel.is_gluon() else "i64"  # TMA takes no wider coordinates
        scalars = [(whole if isinstance(n, int) else "fp32", isinstance(n, int) and n % 16 == 0) for n in numbers]
        names = kernel.arg_names[: len(pointers) + len(scalars)]
        signature = {name: kind for name, (kind, _) in zip(names, pointers + scalars, strict=True)}
        fixed = dict(constants) | {name: None for name, x in zip(names, tensors, strict=False) if x is None}
        for name, number in zip(names[len(pointers) :], numbers, strict=True):
            if number == 1:  # Triton makes ones constant
                fixed[name] = 1
        signature |= dict.fromkeys(fixed, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i, (_, even) in enumerate(pointers + scalars) if even and names[i] not in fixed}
        key = (kernel.fn.__name__, tuple(signature.items()), tuple(fixed.items()), tuple(aligned), warps)
        if key not in self.compiled:
            write = GluonASTSource if kernel.is_gluon() else ASTSource
            source = write(kernel, signature, constexprs=fixed, attrs=aligned)
            target = GPUTarget("cuda", self.capability, 32)
            self.compiled[key] = triton.compile(source, target=target, options={"num_warps": warps, **options})


PLACES = [(op, route, card) for op, route in LAUNCHING for card in CARDS if takes(op, route, Device.named(card))]


@pytest.mark.parametrize(("op", "route", "card"), PLACES, ids=[f"{op.name}-{route.name}-{card}" for op, route, card in PLACES])
def test_compiles(op, route, card, monkeypatch):
    device, compiler = Device.named(card), Compiler(CARDS[card])
    real = launching.launch
    for module in [m for name, m in sys.modules.items() if name.startswith("turnout.ops")]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):  # plans made for another card
                value.cache_clear()
        if getattr(module, "launch", None) is real:
            monkeypatch.setattr(module, "launch", compiler)
    monkeypatch.setattr(Device, "of", lambda where: device)
    seen: set[torch.dtype] = set()
    for seed in range(400):
        args = random_call(op, seed, torch.device("cpu"))
        problem, kind = op.problem(*args), args[0].dtype
        if kind in seen or kind not in KINDS or any(route.refuses(problem, device)):
            continue
        seen.add(kind)
        configs = list(route.configs(problem, device))
        for config in configs if card == "h200" and kind is torch.bfloat16 else configs[:1]:
            route.run(*args, **config)
    assert seen
    assert compiler.compiled
    for kernel in compiler.compiled.values():
        assert kernel.metadata.shared <= device.shared
