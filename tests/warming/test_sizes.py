"""In one configuration, one kernel serves all sizes and batches: they are run-time numbers."""

from random import Random

import pytest
import torch

from turnout.launch.ahead import launch_of, look_up, specs_of
from turnout.launch.recording import recorded
from turnout.routing.device import Device
from turnout.routing.op import OPS

pytest.importorskip("triton")
H200, BF16 = Device.named("h200"), torch.bfloat16


def empty(*shape):
    return torch.empty(shape, dtype=BF16, device="meta")


def last(*shape):
    return empty(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def tokens(random):
    """Text and image of a transformer."""
    return random.choice((1, 77, 226, 300, 512)), random.choice((1, 49, 50)) * random.randint(20, 90)


def norm_of_tokens(random):
    modulation = empty(1, 1, 3072)
    return empty(1, tokens(random)[1], 3072), None, None, None, None, modulation, modulation, 1e-6


def rotation(random):
    text, image = tokens(random)
    streams = [empty(1, length, 24, 128) for length in (text, image, text, image)]
    tables = [torch.empty(text + image, 128, device="meta") for _ in range(2)]
    weights = [empty(128) for _ in streams]
    return *streams, *weights, *tables, 1e-6, "head", 128, "interleaved", "bhsd", False


def clip(random, channels=128):
    """A batch of clips, of which the larger ones have more than 2**31 elements, or one of those."""
    batch = random.choice((1, 1, 2, 3, 4, 8, 16))
    frames = 1 if batch > 1 else random.choice((1, 9, 33))
    return last(batch, channels, frames, random.randint(60, 90) * 8, random.randint(60, 160) * 8)


def group_norm(random):
    return clip(random), 32, empty(128), empty(128), 1e-6, True


def rms_norm(random):
    return clip(random), empty(128), None, 1e-6, 1, "rms_norm", True


CALLS = {
    "layer_norm_modulate": (norm_of_tokens, "rows", 1),
    "norm_rope": (rotation, "one-pass", 1),
    "group_norm_silu": (group_norm, "rows", 2),
    "rms_norm_silu": (rms_norm, "rows", 1),
}


@pytest.mark.parametrize("op", CALLS)
def test_sizes_and_batches_share_kernels(op, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    make, name, kernels = CALLS[op]
    route, random = OPS[op].routes[name], Random(0)
    first = make(random)
    config = route.configs(OPS[op].problem(*first), H200)[0]
    with recorded(H200) as launches:
        for args in (first, *(make(random) for _ in range(30))):
            assert not [*route.refuses(OPS[op].problem(*args), H200)]
            route.run(*args, **config)
    assert len({look_up(launch_of(spec), H200).key for spec in specs_of(launches)}) == kernels


def test_one_row_is_read_in_vectors():
    """A step of decoding with one sequence, as one with several."""
    with recorded(H200) as launches:
        for batch in (1, 8):
            args = (empty(batch, 1, 1536), empty(1536), None, 1e-5, 2, "rms_norm", False)
            OPS["rms_norm_silu"].routes["rows"].run(*args)
    assert [launch.constants["V"] for launch in launches] == [8, 8]
