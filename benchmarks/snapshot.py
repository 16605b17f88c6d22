"""What a look at a model costs the host before its graph is replayed: `ModelSnapshot.change`, in
microseconds.

`python benchmarks/snapshot.py` prints a line for the Flux transformer (19 + 38 blocks, narrow: its size does
not count), Wan's decoder as a stream sees it, and Mamba with 24 layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import turnout
from turnout.models.snapshot import ModelSnapshot


def flux() -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        in_channels=4,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def wan() -> torch.nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(base_dim=8)


def mamba() -> torch.nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(num_hidden_layers=24, hidden_size=16, vocab_size=64, state_size=4))


def microseconds(call: Callable[[], object]) -> float:
    """The median of 300 calls."""
    times = []
    for _ in range(300):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    decoder = ("post_quant_conv", "decoder")
    for name, make, parts in (("Flux", flux, ()), ("Wan's decoder", wan, decoder), ("Mamba", mamba, ())):
        model = make().eval()
        turnout.accelerate(model)
        modules = len([each for part in parts or ("",) for each in model.get_submodule(part).modules()])
        for for_graph in (False, True):
            snapshot = ModelSnapshot(model, parts, for_graph=for_graph)
            assert snapshot.change() is None
            took = microseconds(snapshot.change)
            print(f"{name}, {modules} modules, {'for a graph' if for_graph else 'eager'}: {took:.0f} us")
