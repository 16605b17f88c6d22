"""What a routed layer costs a host more than torch's own: python benchmarks/layers.py

`asking`: the router is asked, and says "the reference"; `knowing`: the layer has learned that. us, the least of 15 runs.
"""

import timeit

import torch
import torch.nn.functional as F
from torch import nn

import turnout


def least_us(run):
    return min(timeit.repeat(run, number=5000, repeat=15)) / 5000 * 1e6


def main() -> None:
    torch.set_num_threads(1)
    x = torch.ones(1, 4, 2, 2)
    for make in (lambda: nn.Conv2d(4, 4, 1), lambda: nn.GroupNorm(2, 4)):
        stock, layer = make().eval(), make().eval()
        turnout.accelerate(layer)
        weight, bias = stock.weight, stock.bias
        if isinstance(stock, nn.Conv2d):
            functions = (lambda: F.conv2d(x, weight, bias)), (lambda: turnout.conv2d(x, weight, bias))
        else:
            functions = (
                lambda: F.group_norm(x, 2, weight, bias, 1e-5),
                lambda: turnout.group_norm_silu(x, 2, weight, bias, eps=1e-5, silu=False),
            )
        with torch.no_grad():
            torchs, asked, before, now = map(least_us, (*functions, lambda: stock(x), lambda: layer(x)))
        print(f"{type(stock).__name__}: asking {asked - torchs:.2f}, knowing {now - before:.2f}; torch's layer {before:.2f}")


if __name__ == "__main__":
    main()
