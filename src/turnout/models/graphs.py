"""What a decode stream takes for granted of its model, and one step of it as a CUDA graph: the host launches once what it otherwise
launches kernel by kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Decodes one latent. What the next one needs replaces what the list held before; the tensors that were in it are not written.
Step = Callable[[Tensor, list], Tensor]

_versions = attrgetter("_version")


class ModelState(NamedTuple):
    """What a snapshot compares. Lists run over the modules, their children, or their parameters and buffers."""

    classes: list[type]
    training: list[bool]
    children: list[nn.Module | None]
    tensors: list[int]
    versions: list[int]
    addresses: list[int]
    hooks: list[Any]


class ModelSnapshot:
    """The parts of a model that a stream relies on, as they were when this was made; `change` says what is no longer so.

    Compared are, for every module of the decoder and the convolution before it: its class (`accelerate` and `restore` change it), its
    children, whether it is in training mode, its parameters and buffers, and their version counters (an optimizer, `load_state_dict`
    and every operation in place change those). That takes 30 us for the 150 modules of Wan, and is done once in a call.
    for_graph: also where the weights lie, hooks, and replaced `forward` methods, none of which a captured graph would notice. The
    memory of the weights is then kept, so that a graph never reads what has become another's.

    Not noticed: what is written or assigned to `parameter.data` (so does `.to()`, which for eager steps is right: they read the weights
    where they are), inference-mode parameters that are written to (they have no version), and weights on the meta device, where
    offloading puts them between calls.
    """

    def __init__(self, vae: Any, *, for_graph: bool):
        self.vae, self.for_graph = vae, for_graph
        self.parts = vae.post_quant_conv, vae.decoder
        named = [*self.parts[0].named_modules(prefix="post_quant_conv"), *self.parts[1].named_modules(prefix="decoder")]
        self.paths = [path for path, _ in named]
        self.modules = [module for _, module in named]
        # the dictionaries themselves, and only those that hold something: half the time of going through all modules
        self.children = [module._modules for module in self.modules if module._modules]
        held = [(path, held) for path, module in named for held in (module._parameters, module._buffers) if held]
        self.tensor_paths, self.tensors = [path for path, _ in held], [tensors for _, tensors in held]
        self.hooks = [hooks for module in self.modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        live = self._live()
        self.alive = [x.detach() for x in live] if for_graph else live  # an id or an address of these is nobody else's
        self.state = self._now(live)

    def change(self) -> str | None:
        """The first thing that is not as it was, "<what> was <changed>"; None where all is."""
        if self.vae.post_quant_conv is not self.parts[0] or self.vae.decoder is not self.parts[1]:
            return "the decoder or the convolution before it was replaced by another module"
        was, live = self.state, self._live()
        now = self._now(live)
        if now.classes != was.classes:
            return f"{self._first(now.classes, was.classes)} was accelerated, restored or given another class"
        if now.children != was.children:
            return "a module of the decoder was added, removed or replaced"
        if now.training != was.training:
            path = self._first(now.training, was.training)
            mode = "training" if now.training[self.paths.index(path)] else "evaluation"
            return f"{path} was switched to {mode} mode"
        if now.tensors != was.tensors:
            return f"{self._first_tensor(now.tensors, was.tensors)} was replaced by another tensor"
        if now.versions != was.versions:
            return f"{self._first_tensor(now.versions, was.versions)} was changed in place"
        if now.addresses != was.addresses:
            return f"{self._first_tensor(now.addresses, was.addresses)} was moved, and a CUDA graph reads it where it lay,"
        if now.hooks != was.hooks:
            return "a hook or another forward was given to, or taken from, a module, and a CUDA graph runs none of them,"
        return None

    def wants_gradients(self) -> bool:
        """Whether any parameter does; asked only where gradients are enabled."""
        return any(x.requires_grad for tensors in self.tensors for x in tensors.values() if x is not None)

    def _live(self) -> list[Tensor]:
        return [x for tensors in self.tensors for x in tensors.values() if x is not None and not x.is_meta]

    def _now(self, live: list[Tensor]) -> ModelState:
        try:
            versions = list(map(_versions, live))
        except RuntimeError:  # an inference-mode tensor has none
            versions = [0 if x.is_inference() else x._version for x in live]
        return ModelState(
            classes=list(map(type, self.modules)),
            training=[module.training for module in self.modules],
            children=[child for children in self.children for child in children.values()],
            tensors=list(map(id, live)),
            versions=versions,
            addresses=[_address(x) for x in live] if self.for_graph else [],
            hooks=[list(hooks.values()) for hooks in self.hooks if hooks]
            + [vars(module)["forward"] for module in self.modules if "forward" in vars(module)]
            if self.for_graph
            else [],
        )

    def _first(self, now: list, was: list) -> str:
        return next(path for path, a, b in zip(self.paths, now, was, strict=True) if a != b)

    def _first_tensor(self, now: list, was: list) -> str:
        named = [
            f"{path}.{name}"
            for path, tensors in zip(self.tensor_paths, self.tensors, strict=True)
            for name, x in tensors.items()
            if x is not None and not x.is_meta
        ]
        if len(now) != len(was):
            return "a parameter of the decoder"
        return next(name for name, a, b in zip(named, now, was, strict=True) if a != b)


def _address(x: Tensor) -> int:
    """Zero for a tensor that is made of others."""
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter, nn.Buffer) else 0


def layouts(cache: list) -> list[Any]:
    """What a graph takes for granted of every entry. Once a step leaves it unchanged, every later step is the same program."""
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in cache]


class CapturedStep:
    """A step that was captured with this latent's shape and this cache's layouts, to be called with one latent after the other.

    A graph reads and writes the same addresses at every replay, so the latent is copied into a buffer, and the caches into theirs at the
    end of a step; the list is given these buffers. What is returned lies in a buffer too: use it, or copy it, before the next call.
    Nobody can tell how much of an interrupted call has run on the card: whoever makes it takes the caches for lost until it has
    returned, and gives the buffers others by `load` after a failure. What a replay reads is the latent and the caches, so that suffices.

    assumptions: what else must be the same for the graph to be of use to another clip. A failure while capturing leaves no capture
    behind and the current stream as it was: the step can run again, and so can others on the same device.
    """

    def __init__(self, step: Step, latent: Tensor, cache: list, assumptions: Any = None):
        self.latent, self.cache, self.assumptions = _buffer(latent), cache, assumptions
        for i, x in enumerate(cache):  # one by one: all of them twice would be the peak
            cache[i] = _buffer(x) if isinstance(x, Tensor) else x
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(latent.device):
            before, beside = torch.cuda.current_stream(), torch.cuda.Stream()
            try:
                beside.wait_stream(before)
                with torch.cuda.stream(beside):  # a first run compiles, chooses routes and makes workspaces, which a capture must not
                    step(self.latent, list(self.cache))
                before.wait_stream(beside)
                self.frames = self._capture(step, beside)
            except BaseException:
                self._abandon(before, beside)
                raise

    def _capture(self, step: Step, stream: torch.cuda.Stream) -> Tensor:
        cause = None
        try:
            with torch.cuda.graph(self.graph, stream=stream):
                try:
                    after = list(self.cache)
                    frames = step(self.latent, after)
                    for held, new in zip(self.cache, after, strict=True):
                        if held is not new:
                            held.copy_(new)
                except BaseException as failure:
                    cause = failure  # a broken capture raises once more when it ends
                    raise
            return frames
        except BaseException as failure:
            cause = cause or failure
            if not isinstance(cause, Exception):  # an interrupt stays one
                raise cause from None
            reason = f"{type(cause).__name__}: {(str(cause).strip() or 'no message').splitlines()[0]}"
            message = f"the decode step could not be captured as a CUDA graph ({reason}); graph=False needs no capture"
            raise RuntimeError(message) from failure
        finally:
            del cause  # it knows this frame, which would keep the step's memory until garbage is collected

    def _abandon(self, before: torch.cuda.Stream, beside: torch.cuda.Stream) -> None:
        """End a capture that is still open, and go back to the stream of the caller. `torch.cuda.graph` does neither where an interrupt
        comes as it is entered, and stays on its own stream where the end of the capture fails (torch 2.13)."""
        torch.cuda.set_stream(beside)
        if torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):  # says that what was captured is of no use
                self.graph.capture_end()
        torch.cuda.set_stream(before)
        before.wait_stream(beside)  # what the first run reads is freed now, and others may write there

    def fits(self, cache: list, assumptions: Any) -> bool:
        """Whether this graph is the step that follows on other caches, after a failure or of another clip."""
        return self.assumptions == assumptions and layouts(self.cache) == layouts(cache)

    def load(self, cache: list) -> None:
        """Go on from other caches of the same layouts."""
        for held, new in zip(self.cache, cache, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new)

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
