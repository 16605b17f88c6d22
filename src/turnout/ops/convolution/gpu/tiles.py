"""Choose tiles for the Hopper kernels by a model of their bounds: tensor cores, shared memory, cache."""

from __future__ import annotations

import functools
import itertools
from math import prod
from typing import NamedTuple

from turnout.ops.convolution.gpu.task import Task
from turnout.ops.integers import ceil_div, power_of_two

PIXELS = 128  # of one slot: 64 for each of two warpgroups
# Registers of a thread, of 240, for accumulators and operands: with more, products wait for one another.
REGISTERS = 210
BARRIERS = 2048  # bytes of shared memory
FILTERS = (16, 32, 48, 64, 96, 128, 160, 192, 256)
COLUMNS = (32, 64, 16, 8, 128)  # of a tile, the better ones first: rows of many pixels are fetched faster
SMALL = (4, 8)  # rows and columns of a box that covers most images without sticking out much
# Rows of a strip of `narrow_out_rolled`, those first that were fastest in measured rows.
STRIPS = (37, 55, 97, 160, 22, 13)
READING = 9.45  # the time of reading a row of a strip, in steps
TIED_STRIPS = 1.03  # and heights whose bounds differ by less
TIED = 1.02  # bounds that differ by less are the same: the bound itself is off by more
# Rows and columns of a box, those first that most sizes share: 32 columns divide the sides of pictures, which
# are multiples of 64 pixels or more, and seldom those of clips.
OF_PICTURES = ((4, 32), (8, 16), (16, 8), (2, 64), (1, 128), (1, 64), SMALL)
OF_CLIPS = ((8, 16), (4, 32), (16, 8), (2, 64), (1, 128), (1, 64), SMALL)


class GemmTile(NamedTuple):
    """A configuration of the portable implicit GEMM: the pixels and filters of a program, the channels it
    multiplies at a time, its warps."""

    pixels: int = 64
    filters: int = 32
    channels: int = 32
    warps: int = 4


class StripTile(NamedTuple):
    """A configuration of the portable kernel for few filters: rows and columns of a program, its warps."""

    rows: int = 16
    columns: int = 128
    warps: int = 4


class Tile(NamedTuple):
    """A configuration of `implicit_gemm_hopper`: `slots` outputs along the shared axis, each of 128 pixels,
    in boxes of `rows` x `columns`, and `filters`; `channels` and `stages` of what is fetched at a time;
    pixels reach the tensor cores from registers, or from shared memory."""

    share: str = "depth"
    slots: int = 1
    rows: int = 8
    columns: int = 16
    channels: int = 32
    filters: int = 64
    stages: int = 3
    from_registers: bool = False

    @property
    def boxes(self) -> int:
        return PIXELS // (self.rows * self.columns)

    def cycles(self, task: Task, units: int) -> float:
        """Estimate the cycles of one multiprocessor, at about 1.6 GHz on an H200: all of its tiles, one after
        the other."""
        batch, count, *sizes = task.out
        s, u = (0, 1) if self.share == "depth" else (1, 0)
        tiles = ceil_div(sizes[s], self.slots) * ceil_div(
            ceil_div(sizes[u], self.rows) * ceil_div(sizes[2], self.columns), self.boxes
        )
        rounds = ceil_div(batch * tiles * ceil_div(count, self.filters), units)
        return rounds * self.tile_cycles(task)

    def tile_cycles(self, task: Task) -> float:
        """Estimate the cycles of one tile.

        The tensor cores of a multiprocessor take half a cycle for a filter, 64 pixels and 32 bytes of
        channels. Its shared memory feeds them 140 bytes a cycle: filters for every product, pixels too unless
        they are in registers. The cache delivers a row of up to 128 bytes, a pixel or a filter, every 1.7
        cycles. Fitted to twelve tiles on an H200.
        """
        _, channels, *kernel = task.weight
        taps = kernel[0 if self.share == "depth" else 1] if self.slots > 1 else 1
        places, products, row = self.slots + taps - 1, self.slots * taps, self.channels * task.dtype.itemsize
        pieces = len(split(self.filters))
        pixels = places if self.from_registers else pieces * products
        group = max(
            row / 16 * products * self.filters / 2,
            row / 16 * 0.9 * (16 * pixels + products * self.filters / 4),
            1.7 * (PIXELS * places + taps * self.filters),
        )
        single = task.dtype.itemsize == 4
        # Barriers; issuing products; where nothing is shared, or in TF32, waiting for them.
        group += 20 * places + 4 * pieces * products + (150 if single else 40 if self.slots == 1 else 0)
        group *= (1.17 if self.stages == 1 else 1.0) * (1.03 if self.share == "height" else 1.0)
        groups = (
            prod(kernel) // taps * ceil_div(channels, self.channels) * (1.0 if self.slots > 1 else task.seen)
        )
        ending = 500 + 2 * self.slots * PIXELS * self.filters * task.dtype.itemsize / 128
        return groups * group + ending


def usual(task: Task, shared: int, units: int) -> Tile | None:
    """The tile for a call that was not measured: the first of those that are as fast as the best, by that
    bound, in an order that does not depend on the size of the picture.

    So other sizes take few other tiles, and compile few other kernels. One slot and boxes in one piece come
    first, which were fastest in most of what was measured.
    """
    bounds = {tile: tile.cycles(task, units) for tile in candidates(task, shared)}
    most = TIED * min(bounds.values(), default=0.0)

    def order(tile: Tile) -> tuple:
        boxes = OF_CLIPS if task.weight[2] > 1 and tile.slots == 1 else OF_PICTURES
        pixels = PIXELS * tile.slots / ceil_div(task.weight[0], tile.filters)  # for all filters
        return tile.boxes > 2, tile.slots, tile.tile_cycles(task) / pixels, boxes.index(tile[2:4])

    return min((tile for tile, bound in bounds.items() if bound <= most), key=order, default=None)


@functools.lru_cache(4096)
def best(task: Task, shared: int, units: int, within: float = 1.15) -> tuple[Tile, ...]:
    """The fastest tile by that bound, and others that are nearly as fast, as the bound is off by up to 10 %.

    The others have another number of slots, or are one box. `shared` is the card's shared memory in bytes,
    `units` its number of multiprocessors, `within` the slowest bound to return, as a multiple of the best.
    """
    fitting = candidates(task, shared)
    selected = []
    for slots in (1, 2, 4):
        ranked = sorted(
            (tile for tile in fitting if tile.slots == slots), key=lambda tile: tile.cycles(task, units)
        )
        selected += ranked[:1]
        if selected and selected[-1].boxes > 1:
            selected += [tile for tile in ranked if tile.boxes == 1][:1]
    first, *others = sorted(selected, key=lambda tile: tile.cycles(task, units))
    return (
        first,
        *(tile for tile in others if tile.cycles(task, units) <= within * first.cycles(task, units)),
    )


@functools.lru_cache(4096)
def candidates(task: Task, shared: int) -> tuple[Tile, ...]:
    """All tiles that fit."""
    axes = (("depth", task.weight[2], task.dilation[0]), ("height", task.weight[3], task.dilation[1]))
    shared_axes = [
        (share, taps)
        for share, taps, dilation in axes[: 1 if task.replicates else 2]
        if 1 < taps <= 3 and dilation == 1
    ]
    # Narrower tiles fetch pixels more often than they have to.
    wide = [n for n in FILTERS if n >= min(task.weight[0], 96)]
    return tuple(
        tile
        for slots in (1, 2, 4)
        for share, taps in ([("depth", 1)] if slots == 1 else shared_axes)
        for filters in wide
        for channels in (16, 32, 64)
        for tile in shaped(task, share, slots, taps, channels, filters, shared)
    )


def shaped(
    task: Task, share: str, slots: int, taps: int, channels: int, filters: int, shared: int
) -> list[Tile]:
    """Tiles of every shape that fit registers and shared memory."""
    size, row = task.dtype.itemsize, channels * task.dtype.itemsize
    places = slots + taps - 1
    biases = 4 * filters * ceil_div(task.weight[0], filters)
    free = shared - BARRIERS - biases - PIXELS * filters * size
    stages = min(free // ((PIXELS * places + taps * filters) * row), 8)
    if not 32 <= row <= 128 or stages * places < 3:
        return []
    # Whether pixels go through registers: TF32 is rounded there; where each is used once, it does not pay.
    sources = [True] if size == 4 else [False] if slots == 1 else [True, False]
    sources = [
        from_registers
        for from_registers in sources
        if slots * filters // 2 + from_registers * row // 4 <= REGISTERS
    ]
    boxes = [(PIXELS // w, w) for w in COLUMNS] + [SMALL]
    if share == "height" and task.cache:  # frames may come from two tensors
        boxes = [(1, PIXELS // 2)]
    return [
        Tile(share, slots, *box, channels, filters, stages, from_registers)
        for box in boxes
        for from_registers in sources
    ]


def split(filters: int) -> list[int]:
    """Powers of two that add up: tensors in Gluon have no other sizes.

    >>> split(96), split(128)
    ([64, 32], [128])
    """
    return [1 << i for i in reversed(range(filters.bit_length())) if filters >> i & 1]


class NarrowTile(NamedTuple):
    """A configuration of `narrow_out_hopper`.

    Where `share` is "rolled", rows are gone through one by one, `slots` of them to a strip.
    """

    share: str = "depth"
    slots: int = 1
    channels: int = 32
    stages: int = 3

    def resident(self, weight: tuple[int, ...], itemsize: int, shared: int) -> int:
        """How many programs a multiprocessor holds: with two, one multiplies while the other one adds up and
        writes.
        """
        if self.share == "rolled":
            return 2
        columns, row = narrow_columns(weight), self.channels * itemsize
        taps = weight[2 if self.share == "depth" else 3]
        group = ((self.slots + taps - 1) * PIXELS + taps * columns) * row
        few = self.slots * columns // 2 + row // 4 <= 64  # of 104 registers a thread
        return 2 if few and self.stages * group <= narrow_room(columns, shared, 2) else 1


def narrow(task: Task, shared: int, units: int) -> list[NarrowTile]:
    """Rows one by one where that fits. Few rows and two programs on a multiprocessor, or many rows, of which
    fewer are fetched twice; and as many channels at once as fit, or half of them, which leaves room for the
    next ones to be fetched meanwhile."""
    columns, size = narrow_columns(task.weight), task.dtype.itemsize
    share = "depth" if task.frames_before or task.weight[3] == 1 else "height"
    taps, places = (task.weight[2], task.out[2]) if share == "depth" else (task.weight[3], task.out[3])
    wide, half = 128 // size, 64 // size
    fetched = {n: ceil_div(task.weight[1], n) * n for n in (wide, half)}
    at_once = [half] if fetched[half] < fetched[wide] else [wide, half]
    candidates = rolled(task, shared, units)
    for channels, (most, resident) in itertools.product(at_once, ((4, 2), (8, 1))):
        slots = max(1, min(most, 256 // columns, power_of_two(places)))
        group = ((slots + taps - 1) * PIXELS + taps * columns) * channels * size
        stages = min(narrow_room(columns, shared, resident) // group, 4)
        tile = NarrowTile(share, slots, channels, stages)
        if stages > 0 and tile.resident(task.weight, size, shared) == resident:
            candidates.append(tile)
    return candidates


def rolled(task: Task, shared: int, units: int) -> list[NarrowTile]:
    """Strips of usual height, or as high as two programs on each multiprocessor take one of, or as few as
    there can be, and all of the weight at hand. 48 KiB asked for in advance, or all that fits: more do not
    come sooner, and stand further apart in memory."""
    columns, size, (_, channels, depth, taps, _) = (
        narrow_columns(task.weight),
        task.dtype.itemsize,
        task.weight,
    )
    if size != 2 or not 1 < taps <= 3 or taps * columns > 96:
        return []
    batch, _, frames, high, wide = task.out
    across = batch * frames * ceil_div(wide, PIXELS - 2 * (task.weight[4] - 1))

    def steps(rows: int) -> int:  # of the program that has most to do
        return ceil_div(across * ceil_div(high, rows), 2 * units) * (rows + taps + 1)

    def bound(rows: int) -> float:
        """Reading, with the rows that two strips share, and steps; fitted to five heights on an H200."""
        return across * high / (2 * units) * (rows + taps - 1) / rows * READING + steps(rows)

    heights = range(taps + 1, max(high, taps + 1) + taps, taps)
    best = min(heights, key=steps)
    most = TIED_STRIPS * min(map(bound, heights))
    usual = [rows for rows in STRIPS if (rows - 1) % taps == 0 and bound(rows) <= most]
    candidates = []
    for rows, row in itertools.product(dict.fromkeys((*usual[:1], best)), (128, 64)):
        weight = depth * taps * ceil_div(channels * size, row) * columns * row
        most_stages = min((narrow_room(columns, shared, 2) - weight) // (PIXELS * row), 8)
        if most_stages >= 3 and (row == 128 or channels * size % 128):
            candidates += [
                NarrowTile("rolled", rows, row // size, stages)
                for stages in sorted({min(384 // row, most_stages), most_stages})
            ]
    return candidates


def narrow_room(columns: int, shared: int, resident: int) -> int:
    """Shared memory for what is fetched: less 1 KiB for barriers, 1 KiB of the driver's, and 512 bytes a
    column, where sums are moved.
    """
    return shared // resident - 2048 - 512 * columns


def narrow_columns(weight: tuple[int, ...]) -> int:
    """Columns of the product of `narrow_out`: columns of the kernel times filters, each a power of two."""
    return max(power_of_two(weight[4]) * power_of_two(weight[0]), 16)
