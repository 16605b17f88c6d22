"""Pictures that are no multiple of the latents are encoded in parts as one process encodes them: what is left
over goes with the last rank.
"""

import contextlib
import itertools
import warnings

import pytest
import torch

import turnout
from tests.parallel.matrix import ALL, AXES, DTYPES, model, random
from tests.parallel.test_families import pixels, plan
from tests.parallel.test_norms import pinned
from turnout.ops.group_norm_silu.block_routes import NAME
from turnout.parallel import Lockstep
from turnout.parallel.exchange import Exchange, levels_of
from turnout.routing.op import TurnoutWarning

FRAMES = {"wan": (5,), "qwen-image-vae": (1,), "hunyuan": (5,), "cogvideox": (5,)}
NAMES = ["wan", "qwen-image-vae", "flux-vae", "sdxl-vae", "flux2-vae", "hunyuan", "cogvideox"]
MATRIX = [
    (name, ranks, split, dtype, fast)
    for name, ranks, split, dtype, fast in itertools.product(NAMES, (2, 3), AXES, DTYPES, (False, True))
]


def picture(name, rows, columns, dtype=torch.float32):
    return random(1, 3, *FRAMES.get(name, ()), rows, columns, dtype=dtype)


def encoded(vae, x):
    return vae.encode(x).latent_dist.parameters


@pytest.mark.parametrize("case", MATRIX if ALL else MATRIX[:: len(MATRIX) // 12 | 1], ids=str)
@torch.no_grad()
def test_an_odd_picture_gives_the_latents_of_one_process(case):
    name, ranks, split, dtype, fast = case
    vae = model(name, dtype, fast)
    each = pixels(name)
    for rest in (1, each // 2, each - 1) if ALL else (each - 1,):
        rows, columns = 4 * each + (split == "height") * rest, 4 * each + (split == "width") * rest
        x = picture(name, rows, columns, dtype)
        alone = encoded(vae, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", TurnoutWarning)  # computed whole
            turnout.distribute(vae, Lockstep(ranks), split=split)
            for _ in range(2):
                assert torch.equal(encoded(vae, x), alone)
        turnout.restore(vae)
        if fast:
            turnout.accelerate(vae)


@pytest.mark.parametrize("name", ["flux-vae", "hunyuan"])
@torch.no_grad()
def test_norms_in_blocks_of_an_odd_picture(name):
    pytest.importorskip("numba")
    vae, each = model(name, torch.bfloat16, fast=True), pixels(name)
    x = picture(name, 8 * each + 3, 5 * each, torch.bfloat16)
    with pinned(NAME):
        alone = encoded(vae, x)
        turnout.distribute(vae, Lockstep(3), split="height")
        for _ in range(2):
            assert torch.equal(encoded(vae, x), alone)


@torch.no_grad()
def test_only_the_last_part_is_of_another_size():
    vae = model("wan", torch.bfloat16, fast=True)
    turnout.distribute(vae, Lockstep(3), split="height", gather="none")
    parts = [
        result.latent_dist.parameters.shape[3] for result in vae.encode(picture("wan", 39, 16).bfloat16())
    ]
    assert parts == [2, 1, 1]
    exchange = plan(vae).exchange
    assert exchange.levels == {8: 39, 4: 19, 2: 9, 1: 4}
    assert [exchange.spans(size)[-1] for size in (39, 19, 9, 4)] == [(24, 39), (12, 19), (6, 9), (3, 4)]


@torch.no_grad()
def test_a_last_part_that_cannot_be_told_from_size_to_size_is_computed_whole():
    """One row of 33 on the last of five ranks is one row at every size."""
    vae = model("hunyuan", torch.float32, fast=True)
    x = picture("hunyuan", 33, 16)
    alone = encoded(vae, x)
    turnout.distribute(vae, Lockstep(5), split="height")
    with pytest.warns(TurnoutWarning, match="height 33 of a picture is no multiple of 8"):
        assert torch.equal(encoded(vae, x), alone)


@pytest.mark.parametrize("name", ["wan22", "ltx"])
@torch.no_grad()
def test_models_that_take_multiples_only_say_so_themselves(name):
    vae, each = model(name, torch.float32, fast=True), pixels(name)
    x = random(1, 3, 5, 3 * each + each // 2 + 1, 2 * each)
    messages = []
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)) as refused, contextlib.suppress(TurnoutWarning):
            encoded(vae, x)
        messages.append(str(refused.value))
        turnout.distribute(vae, Lockstep(2), split="height")
    assert messages[0] == messages[1]


def test_sizes_of_an_odd_picture():
    def spans(engine):
        exchange = Exchange(engine, axis=-2, units=5, levels=levels_of(36, 8, up=True))
        own = [exchange.spans(size)[engine.rank] for size in exchange.levels.values()]
        return own, [exchange.global_size(end - begin) for begin, end in own]

    (first, sizes), (last, of_last) = Lockstep(2).run(spans)
    assert first == [(0, 24), (0, 12), (0, 6), (0, 3)]
    assert last == [(24, 36), (12, 18), (6, 9), (3, 5)]
    assert sizes == of_last == [36, 18, 9, 5]

    def wrong(engine):
        exchange = Exchange(engine, axis=-2, units=4, levels=levels_of(36, 8, up=False))
        with pytest.raises(ValueError, match=r"an axis of 20, .* needs one of \[4, 9, 18, 36\]"):
            exchange.spans(20)
        return exchange.times(5)

    assert Lockstep(2).run(wrong) == [None, 2]  # five of nine are those of the last rank
