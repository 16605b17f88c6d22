"""One step of a streaming decoder as a CUDA graph: the host launches once what it otherwise launches kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Decodes one latent. What the next one needs replaces what the list held before; the tensors that were in it are not written.
Step = Callable[[Tensor, list], Tensor]


def layouts(cache: list) -> list[Any]:
    """What a graph takes for granted of every entry. Once a step leaves it unchanged, every later step is the same program."""
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in cache]


class CapturedStep:
    """A step that was captured with this latent's shape and this cache's layouts, to be called with one latent after the other.

    A graph reads and writes the same addresses at every replay, so the latent is copied into a buffer, and the caches into theirs at the
    end of a step; the list is given these buffers. What is returned lies in a buffer too: use it, or copy it, before the next call.
    """

    def __init__(self, step: Step, latent: Tensor, cache: list):
        self.latent, self.cache = _buffer(latent), cache
        for i, x in enumerate(cache):  # one by one: all of them twice would be the peak
            cache[i] = _buffer(x) if isinstance(x, Tensor) else x
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(latent.device):
            before, beside = torch.cuda.current_stream(), torch.cuda.Stream()
            beside.wait_stream(before)
            with torch.cuda.stream(beside):  # a first run compiles, chooses routes and makes workspaces, which a capture must not
                step(self.latent, list(self.cache))
            before.wait_stream(beside)
            self.frames = self._capture(step, beside)

    def _capture(self, step: Step, stream: torch.cuda.Stream) -> Tensor:
        try:
            with torch.cuda.graph(self.graph, stream=stream):
                after = list(self.cache)
                frames = step(self.latent, after)
                for held, new in zip(self.cache, after, strict=True):
                    if held is not new:
                        held.copy_(new)
        except Exception as failure:
            why = failure.__context__ or failure  # a broken capture raises once more when it ends
            said = f"{type(why).__name__}: {(str(why).strip() or 'no message').splitlines()[0]}"
            raise RuntimeError(f"the decode step could not be captured as a CUDA graph ({said}); graph=False needs no capture") from failure
        return frames

    def __call__(self, latent: Tensor) -> Tensor:
        given, needed = (f"{list(x.shape)} of {x.dtype} on {x.device}" for x in (latent, self.latent))
        if given != needed:
            raise ValueError(f"a latent {given}; this stream was captured with {needed}, another clip needs another stream")
        self.latent.copy_(latent)
        self.graph.replay()
        return self.frames


def _buffer(x: Tensor) -> Tensor:
    """A copy in the same layout, which may be written in and out of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
