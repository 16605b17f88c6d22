"""Every Triton kernel that a route launches, compiled for cards that are not here, within their shared memory."""

import sys

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.walk import random_call, routes
from turnout.ops import launching
from turnout.routing.device import Device

CARDS = {"a100": 80, "h200": 90, "b200": 100}
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Compiler:
    """Stands in for `launch`: compiles what would be launched."""

    def __init__(self, capability):
        self.capability, self.compiled = capability, {}

    def __call__(self, kernel, programs, tensors, numbers, constants, *, warps, **options):
        pointers = [("constexpr", False) if x is None else ("*" + TYPES[x.dtype], True) for x in tensors]
        scalars = [("i64" if isinstance(n, int) else "fp32", isinstance(n, int) and n % 16 == 0) for n in numbers]
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
            source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
            target = GPUTarget("cuda", self.capability, 32)
            self.compiled[key] = triton.compile(source, target=target, options={"num_warps": warps, **options})


@pytest.mark.parametrize("card", CARDS)
@routes
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
    seen = set()
    for seed in range(400):
        args = random_call(op, seed, torch.device("cpu"))
        problem = op.problem(*args)
        kind = tuple(x.dtype for x in args if isinstance(x, torch.Tensor))
        dense = all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor))
        if (kind, dense) in seen or any(route.refuses(problem, device)):
            continue
        seen.add((kind, dense))
        for config in route.configs(problem, device):
            route.run(*args, **config)
    for kernel in compiler.compiled.values():
        assert kernel.metadata.shared <= device.shared
    if seen and compiler.compiled and any(torch.bfloat16 in kind for kind, _ in seen):
        assert any("bf16" in str(key) for key in compiler.compiled)
