"""Run by tests, in a process of its own: a model's first calls, and what they compile. "card": on a card;
"stand-in": on one that a stand-in driver pretends.

There tensors are in the host's memory and say they are on "cuda:0", so that all of the host's code runs as on
a card: routes are chosen and bound, addresses are real ones, kernels are loaded and launched into the
stand-in driver. Prints a line of JSON for each call: how many kernels Triton compiled, and how many it found
in its cache.
"""

import contextlib
import json
import sys
import types

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


ANSWERS = {
    Tensor.device.__get__: CARD,
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.get_device: 0,
}


class OnTheHost(TorchFunctionMode):
    """Every tensor says it is on the card, and is in the host's memory."""

    __module__ = "turnout.tests"  # a mode of ours: models run as they do without it

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in ANSWERS:
            return ANSWERS[func]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        named = {name: CPU if self.is_card(x) else x for name, x in (kwargs or {}).items()}
        if func is Tensor.cuda:
            return args[0]
        return func(*(CPU if self.is_card(x) else x for x in args), **named)

    @staticmethod
    def is_card(x):
        return (isinstance(x, torch.device) and x.type == "cuda") or (
            isinstance(x, str) and x.startswith("cuda")
        )


def pretend_a_card():
    """What torch without CUDA does not know: which card is current, its name, its stream."""
    from turnout.routing import torch_private

    stream = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "current_stream": stream,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
    }.items():
        setattr(torch.cuda, name, lambda *args, value=value: value)
    torch_private.cuda_stream = torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch_private.cuda_device = torch._C._cuda_getDevice = lambda: 0
    torch_private.is_capturing = torch._C._cuda_isCurrentStreamCapturing = lambda: False


def stand_in():
    """Everything that a card and its driver are asked, answered without one."""
    pretend_a_card()
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from turnout.race import calls

    calls.is_planning = lambda: True  # its inputs are drawn without a generator on the card
    driver.set_active(CudaDriver())
    return OnTheHost()


def main():
    on_a_card, *names = sys.argv[1:]
    mode = contextlib.nullcontext() if on_a_card == "card" else stand_in()
    from triton import knobs

    from tests.warming.things import CALLS

    seen = []
    knobs.compilation.listener = lambda src, cache_hit, **more: seen.append(cache_hit)
    for name in names:
        seen.clear()
        with mode, torch.no_grad():
            CALLS[name](CARD)()
        print(
            json.dumps({"name": name, "compiled": seen.count(False), "found": seen.count(True)}), flush=True
        )


if __name__ == "__main__":
    main()
