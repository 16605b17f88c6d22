"""What a decode stream takes for granted of its model, and one step of it as a CUDA graph.

Of a graph the host launches once what it otherwise launches kernel by kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# Decodes one latent. What the next one needs replaces what the list held before; the tensors that were in it are not written.
Step = Callable[[Tensor, list], Tensor]

_version, _is_training = attrgetter("_version"), attrgetter("training")
_everything = itertools.chain.from_iterable


class ModelSnapshot:
    """Remembers what a stream relies on of its model; `change` says what is no longer so.

    Compared are, for every module of the decoder and the convolution before it: its class (`accelerate` and
    `restore` change it), its children, whether it is in training mode, its parameters and buffers, and their
    version counters (an optimizer, `load_state_dict` and every operation in place change those). for_graph:
    also where the weights lie, hooks, and replaced `forward` methods, none of which a captured graph would
    notice. The memory of the weights is then kept, so that a graph never reads what has become another's, and
    no address is used twice.

    Not noticed: what is written or assigned to `parameter.data` (`.to()` does that; eager steps read the
    weights where they are), inference-mode parameters that are written to (they have no version), and weights
    on the meta device, where offloading puts them between calls.

    A stream asks once in a call. That takes 26 us for the 150 modules of Wan, 38 for a graph (Xeon at 2.8
    GHz, torch 2.13, all of it in the processor's caches), which is why there is hardly a Python loop here.
    """

    def __init__(self, vae: Any, *, for_graph: bool):
        self.vae, self.for_graph = vae, for_graph
        self.parts = vae.post_quant_conv, vae.decoder
        first, second = self.parts
        named = [*first.named_modules(prefix="post_quant_conv"), *second.named_modules(prefix="decoder")]
        self.paths, self.modules = [path for path, _ in named], [module for _, module in named]
        self.attributes = [vars(module) for module in self.modules]
        # dictionaries that hold nothing are left out; a scripted module has others
        self.child_dicts = [m._modules for m in self.modules if m._modules and isinstance(m._modules, dict)]
        held = [(path, x) for path, module in named for x in (module._parameters, module._buffers)]
        held = [(path, x) for path, x in held if x and isinstance(x, dict)]
        self.tensor_paths, self.tensor_dicts = [path for path, _ in held], [x for _, x in held]
        self.hook_dicts = [x for m in self.modules for x in (m._forward_pre_hooks, m._forward_hooks)]

        self.classes = list(map(type, self.modules))
        self.children = list(_everything(map(dict.values, self.child_dicts)))
        self.training = self._training()
        self.tensors = list(_everything(map(dict.values, self.tensor_dicts)))
        self.watched = [x for x in self.tensors if x is not None and not x.is_meta]
        self.versions = self._versions()
        if for_graph:
            self.with_address = [x for x in self.watched if type(x) in _PLAIN_TENSORS]
            self.addresses, self.hooks, self.forwards = self._addresses(), self._hooks(), self._forwards()
            self.alive = [x.detach() for x in self.with_address]

    def change(self) -> str | None:
        """The first thing that is not as it was, "<what> was <changed>"; None where all is."""
        if self.vae.post_quant_conv is not self.parts[0] or self.vae.decoder is not self.parts[1]:
            return "the decoder or the convolution before it was replaced by another module"
        if (classes := list(map(type, self.modules))) != self.classes:
            path = _first(self.paths, classes, self.classes)
            return f"{path} was accelerated, restored or given another class"
        if list(_everything(map(dict.values, self.child_dicts))) != self.children:
            return "a module of the decoder was added, removed or replaced"
        if (training := self._training()) != self.training:
            path = _first(self.paths, training, self.training)
            mode = "training" if training[self.paths.index(path)] else "evaluation"
            return f"{path} was switched to {mode} mode"
        tensors = list(_everything(map(dict.values, self.tensor_dicts)))
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            replaced = self._replaced(tensors)
            if replaced is not None:
                return f"{replaced} was replaced by another tensor"
        if (versions := self._versions()) != self.versions:
            return f"{self._first_tensor(self.watched, versions, self.versions)} was changed in place"
        if not self.for_graph:
            return None
        if (addresses := self._addresses()) != self.addresses:
            name = self._first_tensor(self.with_address, addresses, self.addresses)
            return f"{name}, which a CUDA graph reads where it lay, was moved"
        if self._hooks() != self.hooks or self._forwards() != self.forwards:
            return "a hook or a forward, which a CUDA graph does not run, was given to or taken from a module"
        return None

    def wants_gradients(self) -> bool:
        """Whether any parameter does; asked only where gradients are enabled."""
        return any(x.requires_grad for x in self.tensors if x is not None)

    def _training(self) -> list[bool]:
        return list(map(_is_training, self.modules))

    def _versions(self) -> list[int]:
        try:
            return list(map(_version, self.watched))
        except RuntimeError:  # an inference-mode tensor has none
            return [0 if x.is_inference() else x._version for x in self.watched]

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.with_address))

    def _hooks(self) -> list[list[Any]]:
        return [list(hooks.values()) for hooks in self.hook_dicts if hooks] if any(self.hook_dicts) else []

    def _forwards(self) -> list[Any]:
        return [attributes["forward"] for attributes in self.attributes if "forward" in attributes]

    def _replaced(self, tensors: list[Tensor | None]) -> str | None:
        """The name of a tensor that is another one now. None: only such as come and go with offloading."""
        if len(tensors) != len(self.tensors):
            return "a parameter of the decoder"
        for name, now, was in zip(self._names(), tensors, self.tensors, strict=True):
            offloaded = now is not None and was is not None and now.is_meta and was.is_meta
            if now is not was and not offloaded:
                return name
        return None

    def _names(self) -> list[str]:
        paths = zip(self.tensor_paths, self.tensor_dicts, strict=True)
        return [f"{path}.{name}" for path, tensors in paths for name in tensors]

    def _first_tensor(self, tensors: list[Tensor], now: list[int], was: list[int]) -> str:
        names = {id(x): name for name, x in zip(self._names(), self.tensors, strict=True)}
        return _first([names[id(x)] for x in tensors], now, was)


_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)  # others, made of several, have no address


def _first(names: list[str], now: list[Any], was: list[Any]) -> str:
    return next(name for name, a, b in zip(names, now, was, strict=True) if a != b)


def layouts(cache: list) -> list[Any]:
    """What a graph takes for granted of every entry. Once a step leaves it unchanged, every later step is the same program."""
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in cache]


class CapturedStep:
    """A step that was captured with this latent's shape and this cache's layouts, to be called with one latent after the other.

    A graph reads and writes the same addresses at every replay, so the latent is copied into a buffer, and the caches into theirs at the
    end of a step; the list is given these buffers. What is returned lies in a buffer too: use it, or copy it, before the next call.

    Nobody can tell how much of an interrupted call has run on the card. Whoever calls this takes the caches
    for lost until it has returned, and after a failure fills the buffers by `load`. That suffices: a replay
    reads nothing but the latent, the caches and the weights. A failure while capturing leaves no capture
    behind, and the current stream as it was: the step can run again, and so can others on the same device.

    assumptions: what else must be the same for the graph to be of use to another clip.
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
                # a first run compiles, chooses routes and makes workspaces, which a capture must not
                with torch.cuda.stream(beside):
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
            message = f"the decode step could not be captured as a CUDA graph ({reason})"
            raise RuntimeError(f"{message}; graph=False needs no capture") from failure
        finally:
            del cause  # it knows this frame, which would keep the step's memory until garbage is collected

    def _abandon(self, before: torch.cuda.Stream, beside: torch.cuda.Stream) -> None:
        """End a capture that is still open, and go back to the stream of the caller.

        `torch.cuda.graph` does neither where an interrupt comes as it is entered, and stays on its own stream
        where the end of the capture fails (torch 2.13).
        """
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
