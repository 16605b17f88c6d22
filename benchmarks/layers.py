"""What a routed layer costs a host more than torch's own: python benchmarks/layers.py

`asking`: the router is asked, and says "the reference"; `knowing`: the layer has learned that. us, the least
of 300 runs.
"""

import timeit

import torch
import torch.nn.functional as F
from torch import nn

import turnout


def least_us(run):
    return min(timeit.repeat(run, number=300, repeat=300)) / 300 * 1e6


def compare(make, torchs, ours) -> None:
    """torchs, ours: the functions, of the layer and what it is called with."""
    x = torch.ones(1, 4, 2, 2)
    stock, layer = make().eval(), make().eval()
    turnout.accelerate(layer)
    with torch.no_grad():
        asking = least_us(lambda: ours(stock, x)) - least_us(lambda: torchs(stock, x))
        before = least_us(lambda: stock(x))
        knowing = least_us(lambda: layer(x)) - before
    print(f"{type(stock).__name__}: asking {asking:.2f}, knowing {knowing:.2f}; torch's layer {before:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    compare(
        lambda: nn.Conv2d(4, 4, 1),
        lambda m, x: F.conv2d(x, m.weight, m.bias),
        lambda m, x: turnout.conv2d(x, m.weight, m.bias),
    )
    compare(
        lambda: nn.GroupNorm(2, 4),
        lambda m, x: F.group_norm(x, 2, m.weight, m.bias, m.eps),
        lambda m, x: turnout.group_norm_silu(x, 2, m.weight, m.bias, eps=m.eps, silu=False),
    )


if __name__ == "__main__":
    main()
