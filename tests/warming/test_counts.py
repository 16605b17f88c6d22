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
    ("wan-vae", "480x832x9", 36, "720x1280x9", 9),
    ("wan-vae", "480x832x9", 36, "480x832x13", 0),
    ("flux-vae", "1024x1024", 24, "768x1360", 8),
    ("flux-vae", "1024x1024", 24, "1328x1328", 13),
    ("sd-vae", "4x512x512", 20, "1x512x512", 11),
    ("sd-vae", "4x512x512", 20, "4x768x512", 1),
    ("ltx-vae", "512x768x121", 12, "704x1216x97", 10),
    ("hunyuan-vae", "544x960x33", 23, "720x1280x33", 9),
    ("flux", "4x8x64x512", 7, "4x8x48x512", 0),
    ("wan", "4x21x60x104x512", 11, "4x21x90x160x512", 7),
    ("mamba-decode", "4x1536x8x4", 6, "4x1536x4x4", 1),
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
