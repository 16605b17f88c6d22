"""Run by tests, in a process of its own: first calls of small autoencoders on a stand-in for a card, with an
empty cache. Prints a line of JSON for each step.
"""

import json
import sys
import threading

import torch
from torch import nn

import turnout
from tests.warming.first_call import CARD, stand_in
from turnout.models import replays


def autoencoder(dtype=torch.bfloat16):
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
    )
    model.eval().requires_grad_(False)
    return nn.Module.to(model, dtype)


class Steps:
    """First calls, and how many kernels each compiled in this process or found in the cache."""

    def __init__(self, mode):
        from triton import knobs

        self.mode, self.seen = mode, []
        knobs.compilation.listener = lambda src, cache_hit, **more: self.seen.append(cache_hit)

    def decode(self, name, model, *, height=64, threads=1, report=None):
        self.seen.clear()
        dtype = next(model.parameters()).dtype
        failures = []

        def run():
            try:
                with self.mode, torch.no_grad():
                    model.decode(torch.randn(1, 4, height, 64, device=CARD).to(dtype))
            except BaseException as failure:
                failures.append(repr(failure))

        runs = [threading.Thread(target=run) for _ in range(threads - 1)]
        for thread in runs:
            thread.start()
        run()
        for thread in runs:
            thread.join()
        found = next(iter(report.first_calls.values())) if report else None
        said = {"together": found.together, "lines": list(found.lines())} if found else {}
        counts = {"compiled": self.seen.count(False), "found": self.seen.count(True)}
        print(json.dumps({"name": name, **counts, **said, "failures": failures}), flush=True)


def main():
    steps = Steps(stand_in())
    replays.rewritten = lambda: None  # the stand-in is a mode; a card is none
    with steps.mode:
        model = autoencoder()
        report = turnout.accelerate(model)
    if "interrupted" in sys.argv:
        print("begin", flush=True)
        with steps.mode, torch.no_grad():
            model.decode(torch.randn(1, 4, 64, 64, device=CARD).to(torch.bfloat16))
        return
    steps.decode("first", model, report=report)
    steps.decode("again", model, report=report)
    steps.decode("another size", model, height=96, report=report)
    with steps.mode:
        other = autoencoder(torch.float16)
        report = turnout.accelerate(other)
    steps.decode("another dtype, two threads at once", other, threads=2, report=report)


if __name__ == "__main__":
    main()
