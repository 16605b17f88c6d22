"""What the bare-child rule costs a call: python benchmarks/bare.py"""

import timeit

import torch
from diffusers.models.resnet import ResnetBlock2D

from turnout.models.bare import is_bare
from turnout.models.image import ResnetBlock, Upsample


def main() -> None:
    block = ResnetBlock2D(in_channels=64, out_channels=64, temb_channels=None)
    x = torch.empty(1, 64, 4, 4)
    assert is_bare(block, ResnetBlock.inside, x.dtype, x.device)
    few = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, 3, 3)})
    for name, root, inside in (
        ("a convolution", few, Upsample.inside),
        ("a residual block", block, ResnetBlock.inside),
    ):
        us = (
            min(
                timeit.repeat(
                    lambda root=root, inside=inside: is_bare(root, inside, x.dtype, x.device),
                    number=10_000,
                    repeat=5,
                )
            )
            * 100
        )
        print(f"{name}: {us:.2f} us")


if __name__ == "__main__":
    main()
