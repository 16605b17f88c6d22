"""How many kernels a model's call compiles, and how many more another size does: no more than this, on an
H200.
"""

import pytest

from turnout.launch.ahead import launch_of, look_up
from turnout.race.ahead import specs_of_race
from turnout.warming.warmed import card_named

pytest.importorskip("triton")
pytest.importorskip("diffusers")

# Model, a size and its kernels, another size and how many more it needs. docs/guides/warm.md says why.
COUNTS = [
    ("wan-vae", "480x832x9", 28, "720x1280x9", 5),
    ("wan-vae", "480x832x9", 28, "480x832x13", 0),
    ("wan-vae", "480x832x9", 28, "832x480x9", 11),
    ("wan22-vae", "704x1280x9", 30, "704x1280x17", 0),
    ("wan22-vae", "704x1280x9", 30, "480x832x9", 14),
    ("qwen-image-vae", "1328x1328", 17, "928x1664", 4),
    ("flux-vae", "1024x1024", 24, "768x1360", 7),
    ("flux-vae", "1024x1024", 24, "1328x1328", 7),
    ("flux-vae", "1024x1024", 24, "832x1216", 2),
    ("sdxl-vae", "1024x1024", 21, "1152x896", 5),
    ("sd-vae", "4x512x512", 21, "2x512x512", 1),
    ("sd-vae", "4x512x512", 21, "1x512x512", 5),
    ("sd-vae", "4x512x512", 21, "8x512x512", 2),
    ("sd-vae", "4x512x512", 21, "4x768x512", 1),
    ("ltx-vae", "512x768x121", 12, "704x1216x97", 9),
    ("ltx-vae", "512x768x121", 12, "768x512x121", 0),
    ("ltx-vae", "512x768x121", 12, "512x768x25", 0),
    ("hunyuan-vae", "544x960x33", 20, "720x1280x33", 5),
    ("hunyuan-vae", "544x960x33", 20, "544x960x65", 2),
    ("cogvideox-vae", "480x720x49", 30, "768x1360x17", 14),
    ("cogvideox-vae", "480x720x49", 30, "480x720x9", 0),
    ("flux", "4x8x64x512", 7, "4x8x48x512", 0),
    ("flux", "4x8x64x512", 7, "4x8x83x77", 0),
    ("wan", "4x21x60x104x512", 6, "4x21x90x160x512", 0),
    ("wan", "4x21x60x104x512", 6, "4x9x68x120x226", 0),
    ("qwen-image", "4x83x512", 5, "4x58x200", 1),
    ("mamba", "4x1536x8x2048", 4, "4x1536x2x1000", 2),
    ("mamba-decode", "4x1536x8x4", 5, "4x1536x4x4", 1),
    ("mamba-decode", "4x1536x8x4", 5, "4x1536x1x4", 2),
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The keys in Triton's cache of what a model launches."""
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        card = card_named("h200")

        def keys_of(model, size):
            if (model, size) not in results:
                results[model, size] = {
                    look_up(launch_of(spec), card).key for spec in specs_of_race(model, size, None, card)
                }
            return results[model, size]

        yield keys_of


@pytest.mark.parametrize(("model", "size", "most", "other", "more"), COUNTS, ids=lambda value: str(value))
def test_kernels_of_a_call_and_of_another_size(keys, model, size, most, other, more):
    assert 0 < len(keys(model, size)) <= most
    assert len(keys(model, other) - keys(model, size)) <= more
