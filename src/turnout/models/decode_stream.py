"""`DecodeStream`: decode a video while its latents arrive (the VAEs of Wan and Qwen-Image)."""

from __future__ import annotations

import collections
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnout.models.frames import Clip, Conditions, StreamCache, latents_needed
from turnout.models.graphs import ENGINES, CapturedStep
from turnout.models.snapshot import ModelSnapshot
from turnout.models.wan_steps import Steps, decode_latent
from turnout.routing.fallback import autocasts
from turnout.routing.settings import splitting

Assumptions = tuple[ModelSnapshot, Conditions]  # what the steps of a clip take for granted


class DecodeStream:
    """Decodes a video while its latents arrive: the frames of all chunks are those of the whole clip, bit for
    bit from the decoder on (the convolution of one pixel before it sees all latents of a chunk at once, and
    may round otherwise for one than for many).

    vae: `AutoencoderKLWan` (2.1 or 2.2) or `AutoencoderKLQwenImage`, stock or accelerated. What the next
    chunk needs is kept here, not in the model, so one model serves several streams.

    graph: on a CUDA device, capture the step of one latent in a CUDA graph and replay it for every later one.
    The first three or four latents are decoded as they would be without it, until the caches of all
    convolutions are full. A replay costs the host next to
    nothing, which shows where the host is what a step waits for: 8.6 ms became 2.3 on an H200 (accelerated,
    base_dim 32, 240 x 416, bf16). It costs memory: for as long as the stream lives, the caches are held
    twice, each step copies them once, and what the step works in is reserved for it (426 MiB instead of 210
    there). Hooks run when a step is captured, not when replayed.

    **Failures.** A call of `decode` that raises leaves the stream as it was before that call, wherever it
    failed and however many of its latents had been decoded: make the same call again for the same frames, or
    `reset()` for another clip. That holds for arguments that are refused, hooks that raise, memory that runs
    out, KeyboardInterrupt and other signals. The caches that a failed call has spoiled are computed again by
    the next call from the last latents, which are kept for that (at most 68 for Wan, 0.6 % of the memory of a
    decode). So the next call takes longer by the time that these latents took, and runs hooks for them once
    more. The frames are the same bit for bit, if torch and turnout are set as they were before and the model
    computes the same twice, which it does not with dropout switched on.

    **What must not change within a clip.** Batch, channels, height, width, dtype and device of the latents,
    autocast, and whether gradients are wanted (`torch.no_grad` and `torch.inference_mode` are alike): a
    change is refused with a `ValueError`. So is, with a `RuntimeError`, a model that has changed since the
    clip began, because the caches come from the model as it was. Each call compares:

    - the classes and the children of all modules: `accelerate`, `restore`, and what replaces modules, as LoRA
      does;
    - their modes: `train()` and `eval()`;
    - parameters and their version counters: weights that were replaced or changed in place, by an optimizer
      or `load_state_dict`. What is done to `parameter.data`, or to inference-mode parameters, has no version
      and is not noticed: later latents are decoded with the new weights;
    - with `graph=True` also where the weights lie, and hooks: a graph does not follow the one nor run the
      other;
    - hooks on the up blocks of an accelerated decoder, which keep their frames in another way then. Other
      hooks may come and go without `graph`.

    A model that was moved by `.to()` between calls, as offloading does, goes on without `graph` where it is
    back on its device and in its dtype; else the latents do not fit to it, or not to the clip, and are
    refused.

    One call at a time: a call while another one runs, in another thread or from a hook, is refused with a
    `RuntimeError`. Copies of a stream go on by themselves: `copy` and `pickle` take the latents along, not
    the caches.

    >>> import torch
    >>> from diffusers import AutoencoderKLWan
    >>> from turnout.models import DecodeStream
    >>> latents = {"z_dim": 2, "latents_mean": [0.0] * 2, "latents_std": [1.0] * 2}
    >>> vae = AutoencoderKLWan(base_dim=4, num_res_blocks=1, **latents)
    >>> stream = DecodeStream(vae)
    >>> with torch.no_grad():
    ...     [stream.decode(torch.randn(1, 2, latents, 2, 2)).shape[2] for latents in (1, 1, 2)]
    [1, 4, 8]
    >>> stream.reset()
    >>> with torch.no_grad():
    ...     stream.decode(torch.randn(1, 2, 1, 4, 4)).shape
    torch.Size([1, 3, 1, 32, 32])
    """

    def __init__(self, vae: Any, *, graph: bool = False):
        if not hasattr(vae, "_cached_conv_counts") or not hasattr(vae, "temperal_upsample"):
            raise TypeError(
                f"{type(vae).__name__} does not decode in chunks; "
                "AutoencoderKLWan and AutoencoderKLQwenImage do"
            )
        if graph and vae.device.type not in ENGINES:
            raise ValueError(
                "graph=True captures a CUDA graph, it needs a model on a CUDA device; "
                f"this one is on {vae.device}"
            )
        self.vae, self.graph = vae, graph
        self.captured: CapturedStep | None = None
        self._clip = Clip()
        self._running = threading.Lock()
        self.of_ranks: dict[int, DecodeStream] = {}  # of a distributed model whose ranks are threads
        self._distribution: Any = None  # of the model when this clip began

    @property
    def cache(self) -> list | None:
        """What the next step needs; None before the first one and after a call that failed."""
        return self._clip.cache

    def reset(self) -> None:
        """Begin another clip, with the model as it is now; its latents may be of another size.

        A captured graph is kept, and replayed again once the caches are full, unless the model has changed or
        the latents are others than it was captured with.
        """
        self._refuse_if_running()
        self._drop_stale_graph()
        self._clip = Clip()
        self.of_ranks.clear()

    def decode(self, z: Tensor) -> Tensor:
        """`[B, C, T, h, w]` latents to `[B, 3, frames, H, W]`: one frame for the very first latent of a clip,
        2 or 4 for each of the others. A call that raises changes nothing, see above."""
        if torch.compiler.is_compiling():
            return self.decode_alone(z)
        distribution = getattr(type(self.vae), "_turnout_distribution", None)
        if distribution is not self._distribution:
            if self._has_begun():
                raise RuntimeError(
                    "DecodeStream: the model was distributed, distributed otherwise, or restored since this "
                    "clip began, and what is kept of its frames is that of other parts; call reset() to "
                    "begin another clip"
                )
            self._distribution = distribution
            self.of_ranks.clear()
        return self.decode_alone(z) if distribution is None else distribution.decode_in(self, z)

    def _has_begun(self) -> bool:
        return self._clip.begun or any(stream._clip.begun for stream in self.of_ranks.values())

    def decode_alone(self, z: Tensor) -> Tensor:
        """`decode` of what is given, also where the model is distributed."""
        if torch.compiler.is_compiling() and not self.graph:
            return self._decode_traced(z)
        self._refuse_if_running()
        with self._running:
            before = self._clip
            replays = self.captured is not None and before.cache is self.captured.cache
            model = before.model if replays else self._model(before)
            conditions = self._conditions(z, before, model)
            latents = self.vae.post_quant_conv(z)
            # caches that can be computed again count as spoiled from here on; others are copied
            earlier_latents = None if conditions.gradients or before.latents is None else before.latents
            during = before if earlier_latents is None else before._replace(cache=None)
            self._clip = during
            video, after = self._decode(latents, before, earlier_latents, (model, conditions))
            if replays:
                self._model(before)  # while the card works: a graph takes the host less time than this
        # The last act, and behind `with`: from the assignment on, Python looks at no signal before the caller
        # has the frames. Whoever used the stream since the lock was given back has found the caches spoiled.
        if self._clip is not during:
            raise RuntimeError(f"DecodeStream: {ONE_AT_A_TIME}")
        self._clip = after
        return video

    def _decode(
        self,
        latents: Tensor,
        before: Clip,
        earlier_latents: tuple[Tensor, ...] | None,
        assumptions: Assumptions,
    ) -> tuple[Tensor, Clip]:
        """The frames of latents, and the clip behind them.

        earlier_latents: those before these latents; None: keep none.
        """
        entries = self.vae._cached_conv_counts["decoder"]
        missing = earlier_latents if before.cache is None and earlier_latents else ()
        if before.cache is None:
            # a graph needs caches that stay where they are: no rings
            cache = (
                [None] * entries
                if self.graph
                else StreamCache([None] * entries, rings=earlier_latents is not None)
            )
            steps = Steps(self.vae, cache, watch_layouts=self.graph)
        else:
            cache = before.cache
            if earlier_latents is None:
                cache = cache.fork() if isinstance(cache, StreamCache) else list(cache)
            steps = Steps(self.vae, cache, begun=before.begun, steady=before.steady, watch_layouts=self.graph)
        last = (
            None if earlier_latents is None else collections.deque(earlier_latents, latents_needed(entries))
        )

        def run(latent: Tensor) -> Tensor:
            frames = self._replayed(steps, latent, assumptions) if self.graph else steps.run(latent)
            if last is not None:
                split = splitting()
                last.extend([latent] if split is None or split.calls == 1 else split.apart(latent))
            return frames

        try:
            if isinstance(cache, StreamCache):
                cache.packed_weights.clear()  # what is done to the data of weights is not noticed
            for latent in missing:
                steps.run(latent)
            video = steps.video(latents, run)
        except BaseException:
            if isinstance(cache, StreamCache):
                cache.release()
            elif self.captured is None or cache is not self.captured.cache:
                cache.clear()
            raise
        model, conditions = assumptions
        latest = None if last is None else tuple(last)
        return video, Clip(True, steps.steady, steps.cache, latest, conditions, model)

    def _replayed(self, steps: Steps, latent: Tensor, assumptions: Assumptions) -> Tensor:
        """A step by the graph, once the caches are full and lie in the graph's buffers."""
        captured = self.captured
        if captured is None or steps.cache is not captured.cache:
            if not steps.steady:
                return steps.run(latent)
            if captured is not None and captured.fits(steps.cache, assumptions):
                captured.load(steps.cache)
                steps.cache.clear()  # whoever else holds this list has no use for it
            else:
                self.captured = captured = None  # its memory is free before another one needs as much
                step = partial(decode_latent, self.vae, first=False)
                self.captured = captured = CapturedStep(step, latent, steps.cache, assumptions)
            steps.cache = captured.cache
        return captured(latent)

    def _decode_traced(self, z: Tensor) -> Tensor:
        """`decode` in a compiled program, which has its own guards, and changes nothing before it ends."""
        before = self._clip
        cache = StreamCache([None] * self.vae._cached_conv_counts["decoder"], rings=False)
        has_rings = isinstance(before.cache, StreamCache) and before.cache.rings
        if has_rings or (before.begun and before.cache is None):
            raise RuntimeError(
                "DecodeStream: this clip keeps frames in rings, or was interrupted, and cannot go on in a "
                "compiled program; decode outside of torch.compile, or call reset() to begin another clip"
            )
        if before.cache is not None:
            cache[:] = before.cache
        steps = Steps(self.vae, cache, begun=before.begun)
        video = steps.video(self.vae.post_quant_conv(z))
        self._clip = Clip(begun=True, cache=steps.cache, latents=None)
        return video

    def _model(self, clip: Clip) -> ModelSnapshot:
        """The model of the clip, which has not changed since."""
        if clip.model is None:
            self._drop_stale_graph()
            if self.captured is not None:
                return self.captured.assumptions[0]
            return ModelSnapshot(self.vae, ("post_quant_conv", "decoder"), for_graph=self.graph)
        change = clip.model.change()
        if change is not None:
            raise RuntimeError(
                f"DecodeStream: {change} since this clip began, and what is kept of its frames comes from "
                "the model as it was; call reset() to begin another clip with the model as it is now"
            )
        return clip.model

    def _conditions(self, z: Any, clip: Clip, model: ModelSnapshot) -> Conditions:
        """Those of latents that fit to the model and to the clip; others are refused."""
        _check_latents(z, self.vae)
        gradients = torch.is_grad_enabled() and (z.requires_grad or model.wants_gradients())
        if self.graph and torch.is_grad_enabled():
            problem = "graph=True was asked for and gradients are enabled"
            raise RuntimeError(f"{problem}; a CUDA graph has none, decode under torch.no_grad()")
        conditions = Conditions.of(z, gradients)
        if clip.conditions is not None and clip.conditions != conditions:
            both = zip(Conditions._fields, conditions, clip.conditions, strict=True)
            others = [(name, now, was) for name, now, was in both if now != was]
            changed = ", ".join(f"{name} {now}" for name, now, _ in others)
            needed = ", ".join(f"{name} {was}" for name, _, was in others)
            raise ValueError(
                f"DecodeStream.decode: latents {list(z.shape)} with {changed}; this clip began with "
                f"{needed}, which needs to be the same for all of its latents: call reset() to begin "
                "another clip"
            )
        return conditions

    def _drop_stale_graph(self) -> None:
        """Free a graph that was captured before the model changed, and the weights that it reads."""
        if self.captured is not None and self.captured.assumptions[0].change() is not None:
            self.captured = None

    def _refuse_if_running(self) -> None:
        if self._running.locked():
            raise RuntimeError(f"DecodeStream: {ONE_AT_A_TIME}")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: no graph, no lock, and of the clip what its caches can be computed from."""
        if self._distribution is not None and self._has_begun():
            raise RuntimeError(
                "DecodeStream: a stream of a distributed model cannot be copied in the middle of a clip, of "
                "which every rank holds its part; call reset(), or restore() the model before the clip begins"
            )
        clip = self._clip._replace(model=None, steady=False)
        clip = clip._replace(cache=None) if clip.latents is not None else clip
        state = {"vae": self.vae, "graph": self.graph, "captured": None, "_clip": clip}
        return state | {"of_ranks": {}, "_distribution": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._running = threading.Lock()


ONE_AT_A_TIME = (
    "another call of this stream is running, in another thread or around the hook that made this one; the "
    "latents of a clip are decoded one after the other: wait for it, or use a DecodeStream for each clip"
)


def _check_latents(z: Any, vae: Any) -> None:
    """Refuse what the model cannot decode, before anything is touched."""
    channels = vae.config.z_dim
    needed = f"a tensor [B, {channels}, T, h, w] of latents"
    if not isinstance(z, Tensor):
        raise TypeError(f"DecodeStream.decode: z is of type {type(z).__name__}, it needs {needed}")
    if z.dim() != 5 or z.shape[1] != channels or 0 in z.shape:
        raise ValueError(
            f"DecodeStream.decode: latents {list(z.shape)}, it needs {needed}, none of the sizes 0"
            + ("; add the batch with z.unsqueeze(0)" if z.dim() == 4 else "")
        )
    if not z.is_floating_point() or z.layout is not torch.strided:
        given = f"latents of {z.dtype} in layout {z.layout}"
        raise ValueError(f"DecodeStream.decode: {given}, it needs dense floating-point latents")
    entry = vae.post_quant_conv
    weight = getattr(entry, "weight", None)
    hooked = entry._forward_pre_hooks or "forward" in vars(entry)  # may bring the latents to the weights
    if hooked or not isinstance(weight, Tensor) or weight.is_meta or weight.dtype.itemsize < 2:
        return
    if z.device != weight.device:
        problem = f"latents on {z.device}, the model is on {weight.device}"
        raise ValueError(f"DecodeStream.decode: {problem}; move one of them, z.to({str(weight.device)!r})")
    if z.dtype != weight.dtype and not autocasts(z.device.type):
        problem = f"latents of {z.dtype}, the model is of {weight.dtype}"
        raise ValueError(f"DecodeStream.decode: {problem}; convert them, z.to({weight.dtype})")
