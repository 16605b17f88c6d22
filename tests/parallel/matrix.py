"""Which models, sizes and cuts the tests of several ranks go through, in short and (TURNOUT_PARALLEL=all) in
full.
"""

import itertools
import os

import torch

import turnout
from tests.models.zoo import made

ALL = os.environ.get("TURNOUT_PARALLEL") == "all"

LATENTS = {
    "wan": [(1, 4, 3, 5, 7), (1, 4, 2, 8, 9)],
    "wan22": [(1, 6, 3, 4, 5), (1, 6, 2, 9, 8)],
    "qwen-image-vae": [(1, 4, 1, 5, 6), (1, 4, 1, 9, 8)],
}
CLIPS = {"wan": (1, 3, 5, 40, 48), "wan22": (1, 3, 5, 48, 64), "qwen-image-vae": (1, 3, 1, 40, 32)}
AXES = {"height": -2, "width": -1}
DTYPES = (torch.float32, torch.bfloat16)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def model(name, dtype, fast):
    vae = made(name, dtype)
    if fast:
        turnout.accelerate(vae)
    return vae


def cases(sizes, pixels=1):
    """(name, shape, ranks, split, dtype, fast) for every model: a few of all that fit."""
    for name, shapes in sizes.items():
        fitting = [
            (name, shape, ranks, split, dtype, fast)
            for shape, ranks, split, dtype, fast in itertools.product(
                shapes, (2, 3, 4, 8), AXES, DTYPES, (False, True)
            )
            if shape[AXES[split]] // pixels >= ranks
        ]
        # Eight cases differ in axis, dtype and kind for each number of ranks: a step of 3, 5 or 7 beyond a
        # multiple of eight lets all of them take turns.
        step = len(fitting) // 5 | 1
        yield from fitting if ALL else fitting[:: step + 2 if step % 8 == 1 else step]


def said(case):
    name, shape, ranks, split, dtype, fast = case
    sizes, kind = "x".join(map(str, shape)), "accelerated" if fast else "stock"
    return f"{name}-{sizes}-{ranks}-{split}-{str(dtype).removeprefix('torch.')}-{kind}"
