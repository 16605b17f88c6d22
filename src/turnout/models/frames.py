"""What a causal decoder keeps between frames where those are so large that keeping them decides how much memory a decode needs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import turnout
from turnout.models.video import channels_last

# Pixels of a frame from which on frames go one by one, by the type of the device. A GPU is full with one frame of that size; with less it
# would wait for launches. Elsewhere it has not been measured, and frames go two by two.
LARGE = {"cuda": 2**18}

SLACK = 64  # rows by which a ring may move before it is moved back, 10 MiB where a row has 832 pixels of 96 channels in bfloat16


def are_large(pixels: int, device: torch.device) -> bool:
    """Whether frames of so many pixels go one by one."""
    return device.type in LARGE and pixels >= LARGE[device.type]


class Kept(list):
    """The stock model's list of caches, an entry for each convolution, and what stands in for the entries of those with large frames.

    It belongs to one stream. `one_by_one` says whether its large frames go so, which is decided by the first latent: the caches of the two
    ways are not the same. `arranged` holds weights in another order, until the next call of the stream.
    """

    def __init__(self, entries: int):
        super().__init__([None] * entries)
        self.one_by_one: bool | None = None
        self.rings: dict[Any, Ring] = {}
        self.arranged: dict[tuple, Any] = {}

    def ring(self, block: Any, like: Tensor) -> Ring:
        """That of one block, whose residual blocks have two convolutions each."""
        if block not in self.rings:
            self.rings[block] = Ring(2 * len(block.resnets), like, self.arranged)
        return self.rings[block]

    def settle(self, one_by_one: bool) -> bool:
        if self.one_by_one not in (None, one_by_one):
            raise RuntimeError(
                "a stream began with gradients, autocast, a compiled model or a batch, and goes on without, or the other way round; it "
                "needs to be the same for all of its latents"
            )
        self.one_by_one = one_by_one
        return one_by_one


class Ring:
    """The last frames of all convolutions of one size, in one piece of memory with room for one frame more.

    A convolution of depth 3 reads three frames as one tensor if they are the same distance apart, and keeps two of them. To have them so
    for each convolution would take a third frame for each, or copies. Here the frames of all convolutions take turns row by row, and those
    of the convolution that runs first come last:

        c0 c1  b0 b1  a0 a1  __      frame 2 of convolution a is written into the free place: a0 a1 a2 is its input
        c0 c1  b0 b1  __ a1  a2      a0 is free: the place where b2 has to be
        __ c1  c2 b1  b2 a1  a2      all have moved by one, and a3 goes to where the next row begins

    The end of a row of all frames is the beginning of the next one, so frames may move on and on, until the memory ends and all of it is
    moved back. Frames before the first are zeros.

    like: a frame `[1, C, 1, H, W]`; convolutions: how many there are, each of which takes `place` and `convolve` in turn.
    """

    def __init__(self, convolutions: int, like: Tensor, arranged: dict[tuple, Any]):
        _, self.channels, _, self.height, self.width = like.shape
        self.places = 2 * convolutions + 1
        self.rows = like.new_zeros(self.places * self.height + SLACK, self.width, self.channels)
        self.moved, self.free, self.arranged = 0, self.places - 1, arranged

    def frames(self, first: int, count: int) -> Tensor:
        """`[1, C, H, count, W]`: with rows outside, strides are those of a channels-last tensor from which some frames are taken."""
        row = self.width * self.channels
        sizes = (1, self.channels, self.height, count, self.width)
        strides = (self.places * self.height * row, 1, self.places * row, row, self.channels)
        return self.rows.as_strided(sizes, strides, first * row)

    def place(self) -> Tensor:
        """Where the next convolution's input is to be written: `[1, C, 1, H, W]`."""
        return self.frames(self.free, 1).squeeze(3).unsqueeze(2)

    def convolve(self, conv: Any, padding: tuple[int, int], residual: Tensor | None = None) -> Tensor:
        """What has been written, behind the two frames before it, through a convolution of depth 3: `[1, F, 1, H, W]`."""
        if (conv, "rows") not in self.arranged:
            self.arranged[conv, "rows"] = channels_last(conv.weight.transpose(2, 3))
        beside = None if residual is None else residual.squeeze(2).unsqueeze(3)
        x, (high, wide) = self.frames(self.free - 2, 3), padding
        y = turnout.conv3d(x, self.arranged[conv, "rows"], conv.bias, padding=(high, 0, wide), residual=beside)
        self.free -= 2
        if self.free == self.moved:
            self._move()
        return y.squeeze(3).unsqueeze(2)

    def _move(self) -> None:
        """Once all convolutions have run: the place that is free is a row further the last one."""
        self.moved += 1
        if self.moved == SLACK:
            for to, rows in itertools.pairwise(self.rows.split(SLACK)):
                to[: len(rows)] = rows
            self.moved = 0
        self.free = self.moved + self.places - 1


def convolve_ahead(
    x: Tensor, conv: Any, padding: tuple[int, int], ahead: Tensor | None, arranged: dict[tuple, Any]
) -> tuple[Tensor, Tensor]:
    """A frame through a causal convolution to few channels, which keeps sums instead of frames: of each frame, what it adds to itself and
    to all later ones is computed at once.

    x: `[1, C, 1, H, W]`, `SiLU` of an RMS norm; ahead: what earlier frames add to this one and to later ones, None before the first.
    Returns the frame `[1, F, 1, H, W]` and what is ahead now. Sums are rounded to more bits than x has: to float16 where it is bfloat16,
    whose values of this size are float16 values too, so that what is rounded on the way is an eighth of what is rounded in the end.
    Sums beyond 65504 would be infinite; a decoder's are clamped to 1.
    """
    filters, _, depth, *_ = conv.weight.shape
    kind = torch.float16 if x.dtype is torch.bfloat16 else torch.float32
    if (conv, "ahead") not in arranged:
        # [F, C, D, KH, KW] to [D * F, C, 1, KH, KW], what a frame adds to itself first
        weight = channels_last(conv.weight.to(kind).flip(2).permute(2, 0, 1, 3, 4).flatten(0, 1).unsqueeze(2))
        arranged[conv, "ahead"] = weight, None if conv.bias is None else F.pad(conv.bias.to(kind), (0, (depth - 1) * filters))
    weight, bias = arranged[conv, "ahead"]
    sums = turnout.conv3d(x.to(kind), weight, bias, padding=(0, *padding), residual=ahead)
    return sums[:, :filters].to(x.dtype), F.pad(sums[:, filters:], (0, 0, 0, 0, 0, 0, 0, filters))
