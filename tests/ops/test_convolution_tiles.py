"""Tiles of the Hopper kernels: within the card, without waste where the sizes allow it; and what the kernels
say they cannot do.
"""

import itertools
from collections import Counter
from random import Random

import pytest
import torch

from turnout.ops.convolution.gpu import task as limits
from turnout.ops.convolution.gpu import tiles
from turnout.ops.convolution.gpu.implicit_gemm import hopper_configs
from turnout.ops.convolution.gpu.task import Task
from turnout.routing.device import Device

H200 = Device.named("h200")


def task(depth, height, width, channels, filters, kernel=(3, 3, 3), dtype=torch.bfloat16, **more):
    def strides(count):
        return (depth * height * width * count, 1, height * width * count, width * count, count)

    size = (1, channels, depth, height, width)
    return Task(
        size,
        (filters, channels, *kernel),
        (1, filters, *size[2:]),
        strides(channels),
        strides(filters),
        dtype,
        padding=tuple(k // 2 for k in kernel),
        **more,
    )


TASKS = [
    task(4, 480, 832, 96, 96),
    task(81, 480, 832, 96, 96),
    task(4, 240, 416, 192, 192),
    task(4, 120, 208, 384, 384),
    task(21, 60, 104, 1024, 1024),
    task(1, 1024, 1024, 128, 128, (1, 3, 3)),
    task(4, 240, 416, 192, 384, (3, 1, 1)),
    task(4, 480, 832, 192, 96, dtype=torch.float32),
    task(2, 30, 40, 320, 320),
    task(1, 7, 5, 8, 8, (1, 1, 1)),
]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_tiles_fit(task):
    result = tiles.best(task, H200.shared, H200.units, 2.0)
    assert result
    for tile in result:
        assert tile.boxes * tile.rows * tile.columns == tiles.PIXELS
        assert 1 <= len(tiles.split(tile.filters)) <= 2
        assert tile.slots * tile.filters // 2 <= tiles.REGISTERS
        assert tile.slots == 1 or task.weight[2 if tile.share == "depth" else 3] > 1


def test_a_cache_needs_boxes_of_one_frame():
    """A box with several frames cannot come from two tensors: it has one.

    Copies of a frame are found by depth.
    """

    def best(depth, **before):
        return tiles.best(task(depth, 480, 832, 96, 96, **before), H200.shared, H200.units, 2.0)

    assert {tile.share for tile in best(81, pad_mode="replicate")} == {"depth"}
    for depth in (1, 2, 81):
        assert all(
            tile.share == "depth" or (tile.rows, tile.columns) == (1, 64) for tile in best(depth, cache=2)
        )
    assert best(2, cache=2)[0].share == "height"
    assert best(1, cache=2)[0].share == "depth"


def test_small_boxes_where_tiles_would_stick_out():
    whole = tiles.best(TASKS[3], H200.shared, H200.units)
    assert [tile.boxes for tile in whole] == [1] * len(whole)
    first, second, *_ = tiles.best(TASKS[4], H200.shared, H200.units)
    assert first.boxes == 4
    assert second.boxes == 1
    assert first._replace(rows=second.rows, columns=second.columns) == second


def test_wan_gets_tiles_of_four_frames():
    best = tiles.best(TASKS[0], H200.shared, H200.units)[0]
    assert (best.share, best.slots, best.filters, best.from_registers) == ("depth", 4, 96, True)


LAYERS = {
    "Flux, 512": (512, 512, (1, 3, 3)),
    "Flux, 256": (256, 256, (1, 3, 3)),
    "Flux, 128": (256, 128, (1, 3, 3)),
    "Wan, 384": (384, 384, (3, 3, 3)),
    "Wan, 192": (192, 192, (3, 3, 3)),
    "Wan 2.2, 1024": (1024, 1024, (3, 3, 3)),
    "LTX, 128": (128, 128, (3, 3, 3)),
    "U-Net, 320": (320, 320, (1, 3, 3)),
}


def test_usual_tiles_are_few_and_as_fast_as_the_best_by_the_bound():
    """Over sizes of pictures and clips at random: within 2 % of the best of all tiles."""
    random, usual, best = Random(0), 0, 0
    for channels, filters, kernel in LAYERS.values():
        taken: dict[str, set] = {"usual": set(), "best": set()}
        for _ in range(40):
            frames = random.choice((1, 2, 4, 9)) if kernel[0] > 1 else 1
            height, width = (16 * random.randint(8, 22) for _ in range(2))
            call = task(frames, height, width, channels, filters, kernel)
            tile = tiles.usual(call, H200.shared, H200.units)
            first = tiles.best(call, H200.shared, H200.units)[0]
            assert tile is not None
            assert tile.cycles(call, H200.units) <= tiles.TIED * first.cycles(call, H200.units)
            taken["usual"].add(tile)
            taken["best"].add(first)
        usual, best = usual + len(taken["usual"]), best + len(taken["best"])
    assert usual <= 0.75 * best


def test_what_was_tried_before_is_still_offered():
    """Measured rows name the best tile by the bound, and count only where it is offered."""
    for case in TASKS:
        offered = [tiles.Tile(**config) for config in hopper_configs(case, H200)]
        assert offered[0] == tiles.usual(case, H200.shared, H200.units)
        assert set(tiles.best(case, H200.shared, H200.units)) <= set(offered)
        assert len(set(offered)) == len(offered)


def test_usual_strips():
    """Other sizes and batches of a picture take strips of few heights."""
    heights = Counter()
    for height, width in itertools.product(range(512, 1600, 64), repeat=2):
        first, *_ = tiles.rolled(task(1, height, width, 128, 3, (1, 3, 3)), H200.shared, H200.units)
        heights[first.slots] += 1
    assert len(heights) < 40
    assert sum(heights[rows] for rows in tiles.STRIPS) > 0.6 * heights.total()


def reasons(task, of=limits.implicit_gemm_hopper_refuses):
    return list(of(task))


def test_implicit_gemm_hopper_gives_every_reason():
    good = TASKS[0]
    assert not reasons(good)
    assert reasons(good._replace(stride=(1, 2, 2))) == ["stride (1, 2, 2), this route needs 1"]
    assert reasons(task(4, 8, 8, 33, 96))[0] == "33 channels, this route needs a multiple of 8"
    assert reasons(task(4, 8, 8, 32, 3))[0] == "3 filters, this route needs a multiple of 8"
    assert reasons(good._replace(dtype=torch.float32, precision="ieee")) == [
        "float32 in ieee precision, this route needs TF32 allowed"
    ]
    assert reasons(good._replace(dtype=torch.float64))[0].startswith("dtype float64")
    assert "channels side by side" in reasons(good._replace(x_strides=(96 * 64, 64, 64, 8, 1)))[0]
    assert "groups" in reasons(good._replace(weight=(96, 48, 3, 3, 3)))[0]
    assert "in the cache" in reasons(good._replace(cache=2, cache_strides=(96 * 64, 64, 64, 8, 1)))[0]


def test_narrow_out_gives_every_reason():
    few = task(4, 480, 832, 96, 3)
    for refuses in (limits.narrow_out_refuses, limits.narrow_out_hopper_refuses):
        assert not reasons(few, refuses)
        assert "this route needs at most 64" in reasons(task(4, 8, 8, 96, 96), refuses)[0]
        assert "dilation" in reasons(few._replace(dilation=(1, 2, 1)), refuses)[0]
        assert "TF32" in reasons(few._replace(dtype=torch.float32, precision="ieee"), refuses)[0]
    assert not reasons(task(1, 8, 8, 33, 3, (1, 3, 3)), limits.narrow_out_refuses)
    assert reasons(task(4, 8, 8, 256, 12), limits.narrow_out_refuses)
    assert not reasons(task(4, 8, 8, 256, 12), limits.narrow_out_hopper_refuses)
    assert reasons(task(1, 8, 8, 33, 3, (1, 3, 3)), limits.narrow_out_hopper_refuses)


def test_narrow_tiles_fit():
    for case in (
        task(1, 1024, 1024, 128, 3, (1, 3, 3)),
        task(4, 480, 832, 96, 3),
        task(4, 60, 60, 256, 12),
        task(1, 9, 9, 8, 1, (1, 1, 1)),
    ):
        result = tiles.narrow(case, H200.shared, H200.units)
        assert result
        assert all(tile.stages >= 1 and tile.slots >= 1 for tile in result)
