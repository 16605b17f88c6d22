"""The state of a decode stream between latents: caches, rings for large frames, and the last latents.

How a failed call is undone
---------------------------
A call of `DecodeStream.decode` that fails must leave the stream as it was. But a step replaces every cache,
so either the old ones are kept, or they can be computed again. Wan 2.1 at 480 x 832 in bfloat16, base_dim 96,
where an H200 takes 24 ms for a step and has a peak of 2211 MiB; in each step four frames pass the ring, which
is the two frames of each of six convolutions of the last size:

    method                                       memory           time of a step   to repeat a call
    keep the old entries of the list             +777 MiB, 35 %   the same         the call
      and the 12 old frames of the ring, either  +878 MiB, 40 %   +0.4 ms, 1.6 %   the call
        copied before they are overwritten
        or not overwritten, in a larger ring     +878 MiB, 40 %   the same         the call
    compute them again from the last latents     +13 MiB, 0.6 %   the same         up to 68 steps, the call

(Bytes are counted; 0.4 ms is an estimate, 1.84 GB read and written at 4.8 TB/s. What all methods need beside,
the checks of arguments and model, takes the host 0.07 ms in a call.) Only the last method is within a few
percent of memory, and it costs time only once something has failed.

It gives the same bits, because the caches are a function of a limited number of latents. Each of E caches
holds at most two frames, which are those of two latents at most. So the input of convolution e for latent n
depends on latents n - 2e to n, and its cache on n - 2e - 1 to n: starting from nothing 2E + 2 latents ago
gives the very same caches. That is more than needed, for behind a doubling in time a convolution sees several
frames of each latent: a NaN in a latent of Wan 2.1 is gone after 38, while 2E + 2 is 68. But this bound does
not depend on how a model is built.

Where gradients are wanted this is not right, for the old caches carry the graph of the latents before them.
There the old list is kept until the call has succeeded; the graph keeps most of it alive anyway. No ring is
used there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout import ops
from turnout.models.video import channels_last
from turnout.routing.fallback import autocasts
from turnout.routing.settings import splitting

# Pixels of a frame from which on frames go one by one, by the type of the device. A GPU is full with one
# frame of that size; with less it would wait for launches. Elsewhere it has not been measured, and frames go
# two by two.
LARGE = {"cuda": 2**18}

# Rows by which a ring may move before it is moved back: 10 MiB where a row has 832 pixels of 96 channels
# in bfloat16.
SLACK = 64


def are_large(pixels: int, device: torch.device) -> bool:
    """Whether frames of so many pixels are processed one at a time."""
    return device.type in LARGE and pixels >= LARGE[device.type]


class StreamCache(list):
    """The stock model's list of caches, an entry for each convolution, and the rings that replace the entries
    of convolutions with large frames. It belongs to one stream.

    one_by_one: whether large frames are processed one at a time. The first latent decides, because the caches
    of the two ways differ. blocks: those that may have a ring; they stay the same for the same reason.
    packed_weights: weights as a ring's convolutions read them, until the next call of the stream.
    rings: False where none is to be used. ends: no frame comes after those of the first latent, so
    convolutions need not keep any.

    It is constructed from its entries, as a list is: hooks that move arguments to a device construct lists
    anew.
    """

    def __init__(self, entries: Iterable[Any] = (), *, rings: bool = True, ends: bool = False):
        super().__init__(entries)
        self.may_have_rings, self.ends = rings, ends
        self.one_by_one: bool | None = None
        self.blocks: list[Any] | None = None
        self.rings: dict[Any, FrameRing] = {}
        self.packed_weights: dict[tuple, Any] = {}

    def fork(self) -> StreamCache:
        """A copy of the list with the same entries, without rings: steps replace entries, and never write
        into one."""
        other = StreamCache(self, rings=self.may_have_rings)
        other.one_by_one, other.blocks = self.one_by_one, self.blocks
        return other

    def release(self) -> None:
        """Drop all entries: others may hold this list, such as the traceback of a step that ran out of
        memory."""
        self.clear()
        self.rings.clear()
        self.packed_weights.clear()

    def ring(self, block: Any, like: Tensor) -> FrameRing:
        """That of one block, whose residual blocks have two convolutions each."""
        if block not in self.rings:
            self.rings[block] = FrameRing(2 * len(block.resnets), like, self.packed_weights)
        return self.rings[block]

    def decide_one_by_one(self, one_by_one: bool) -> bool:
        if self.one_by_one not in (None, one_by_one):
            was, now = ("one by one" if x else "two by two" for x in (self.one_by_one, one_by_one))
            raise RuntimeError(
                f"DecodeStream: this clip began with large frames {was}, and would go on with them {now}; "
                "gradients, autocast, compilation and batch size need to be the same for all latents of a "
                "clip: call reset() to begin another clip"
            )
        self.one_by_one = one_by_one
        return one_by_one

    def keep_to(self, blocks: list[Any]) -> None:
        """Refuse a step in which other blocks than before may have a ring: what they kept would be lost."""
        if self.blocks is not None and self.blocks != blocks:
            raise RuntimeError(
                "DecodeStream: a hook was added to, or removed from, a block of an accelerated decoder since "
                "this clip began, and the block keeps its frames in another way with a hook than without; "
                "undo that, or call reset() to begin another clip"
            )
        self.blocks = blocks


class Conditions(NamedTuple):
    """What needs to be the same for all latents of a clip."""

    batch: int
    channels: int
    height: int
    width: int
    dtype: torch.dtype
    device: torch.device
    gradients: bool  # whether any are wanted
    autocast: torch.dtype | None  # what it casts to; None where it is off

    @classmethod
    def of(cls, z: Tensor, gradients: bool) -> Conditions:
        batch, channels, _, height, width = z.shape
        kind = z.device.type
        autocast = torch.get_autocast_dtype(kind) if autocasts(kind) else None
        return cls(batch, channels, height, width, z.dtype, z.device, gradients, autocast)


class Clip(NamedTuple):
    """The clip that a stream decodes, after some of its latents.

    It is never written to: a call that has succeeded replaces it by another one in a single assignment, which
    no signal can split. steady: the last step left the layout of every cache as it was. cache: what the next
    step needs, or None while a call changes it and after one that failed; it is then computed again from
    `latents`, the last that were decoded, `[B, C, 1, h, w]` each. latents: None if they are not kept and the
    cache is copied instead. conditions, model: what must not change; None if not known yet.
    """

    begun: bool = False
    steady: bool = False
    cache: list | None = None
    latents: tuple[Tensor, ...] | None = ()
    conditions: Conditions | None = None
    model: Any = None


def latents_needed(entries: int) -> int:
    """How many of the last latents determine so many caches of two frames; see the module's docstring."""
    return 2 * entries + 2


class FrameRing:
    """The last frames of all convolutions of one size, in one piece of memory with room for one frame more.

    A convolution of depth 3 reads three frames as one tensor if they are the same distance apart, and keeps
    two of them. To have them so for each convolution would take a third frame for each, or copies. Here the
    frames of all convolutions take turns row by row, and those of the convolution that runs first come last:

        c0 c1  b0 b1  a0 a1  __      frame 2 of convolution a is written into the free place: a0 a1 a2 is its
        input c0 c1  b0 b1  __ a1  a2      a0 is free: the place where b2 has to be __ c1  c2 b1  b2 a1  a2
        all have moved by one, and a3 goes to where the next row begins

    The end of a row of all frames is the beginning of the next one, so frames may move on and on, until the
    memory ends and all of it is moved back. Frames before the first are zeros.

    On a rank of a distributed model each frame has room for the rows or columns of its neighbours around it.

    like: a frame `[1, C, 1, H, W]`; convolutions: how many there are, each of which takes `place` and
    `convolve` in turn.
    """

    def __init__(self, convolutions: int, like: Tensor, packed_weights: dict[tuple, Any]):
        split = splitting()
        self.margins = (0, 0) if split is None else split.ring_margins()
        _, self.channels, _, height, width = like.shape
        self.height, self.width = height + 2 * self.margins[0], width + 2 * self.margins[1]
        self.places = 2 * convolutions + 1
        with torch.inference_mode(False):  # may be written in and out of inference mode
            self.rows = like.new_zeros(self.places * self.height + SLACK, self.width, self.channels)
        self.moved, self.free, self.packed_weights = 0, self.places - 1, packed_weights

    def frames(self, first: int, count: int) -> Tensor:
        """`[1, C, H, count, W]`: with rows outside, strides are those of a channels-last tensor from which
        some frames are taken.
        """
        row = self.width * self.channels
        sizes = (1, self.channels, self.height, count, self.width)
        strides = (self.places * self.height * row, 1, self.places * row, row, self.channels)
        return self.rows.as_strided(sizes, strides, first * row)

    def place(self) -> Tensor:
        """Where the next convolution's input is to be written: `[1, C, 1, H, W]`."""
        (high, wide), frame = self.margins, self.frames(self.free, 1)
        inside = frame[:, :, high : self.height - high, :, wide : self.width - wide]
        return inside.squeeze(3).unsqueeze(2)

    def convolve(self, conv: Any, padding: tuple[int, int], residual: Tensor | None = None) -> Tensor:
        """What has been written, behind the two frames before it, through a convolution of depth 3: `[1, F,
        1, H, W]`.
        """
        if (conv, "rows") not in self.packed_weights:
            self.packed_weights[conv, "rows"] = channels_last(conv.weight.transpose(2, 3))
        beside = None if residual is None else residual.squeeze(2).unsqueeze(3)
        x, (high, wide) = self.frames(self.free - 2, 3), padding
        call = self.packed_weights[conv, "rows"], conv.bias
        split = splitting() if any(self.margins) else None
        if split is None:
            y = ops.conv3d(x, *call, padding=(high, 0, wide), residual=beside)
        else:
            y = split.ring_convolution(x, self.frames(self.free, 1), *call, (high, 0, wide), beside)
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
    x: Tensor, conv: Any, padding: tuple[int, int], ahead: Tensor | None, packed_weights: dict[tuple, Any]
) -> tuple[Tensor, Tensor]:
    """A frame through a causal convolution to few channels, which keeps sums instead of frames: of each
    frame, what it adds to itself and to all later ones is computed at once.

    x: `[1, C, 1, H, W]`, `SiLU` of an RMS norm; ahead: what earlier frames add to this one and to later ones,
    None before the first. Returns the frame `[1, F, 1, H, W]` and what is ahead now. Sums are rounded to more
    bits than x has: to float16 where it is bfloat16, whose values of this size are float16 values too, so
    that what is rounded on the way is an eighth of what is rounded in the end. Sums beyond 65504 would be
    infinite; a decoder's are clamped to 1.
    """
    filters, _, depth, *_ = conv.weight.shape
    kind = torch.float16 if x.dtype is torch.bfloat16 else torch.float32
    if (conv, "ahead") not in packed_weights:
        # [F, C, D, KH, KW] to [D * F, C, 1, KH, KW], what a frame adds to itself first
        weight = channels_last(conv.weight.to(kind).flip(2).permute(2, 0, 1, 3, 4).flatten(0, 1).unsqueeze(2))
        packed_weights[conv, "ahead"] = (
            weight,
            None if conv.bias is None else F.pad(conv.bias.to(kind), (0, (depth - 1) * filters)),
        )
    weight, bias = packed_weights[conv, "ahead"]
    sums = ops.conv3d(x.to(kind), weight, bias, padding=(0, *padding), residual=ahead)
    return sums[:, :filters].to(x.dtype), F.pad(sums[:, filters:], (0, 0, 0, 0, 0, 0, 0, filters))
