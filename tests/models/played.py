"""CUDA graphs without a GPU: a replay runs the step again, on the same buffers as a graph would."""

import contextlib
import types

import torch

from turnout.models.graphs import CapturedStep


def play_graphs(monkeypatch):
    """Let every `CapturedStep` play its graph, and count captures and replays."""
    from diffusers import AutoencoderKLWan  # noqa: F401  (its annotations name what is patched below)

    count = types.SimpleNamespace(captures=0, replays=0)

    def capture(self, step, stream):
        frames = step(self.latent, list(self.cache))
        count.captures += 1

        def replay():
            after = list(self.cache)
            frames.copy_(step(self.latent, after))
            for held, new in zip(self.cache, after, strict=True):
                if held is not new:
                    held.copy_(new)
            count.replays += 1

        self.graph.replay = replay
        return frames

    monkeypatch.setattr(CapturedStep, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", types.SimpleNamespace)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    for name in ("Stream", "current_stream"):
        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, name, lambda *given, stream=stream: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("diffusers.ModelMixin.device", torch.device("cuda"))
    return count
