"""How much memory a call needs, counted from the tensors that live: at full size, of tensors without
elements.
"""

import functools

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import turnout
from turnout import ops
from turnout.models import frames, patch, sdpa, unet
from turnout.race import calls, models
from turnout.routing.public import PUBLIC

META = torch.device("meta")


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that live at once, beside those of the model, in a `with` block.

    A call of a public function of ours, and of torch's attention, counts as one step: under a mode torch's
    own code stands in for kernels that need no memory beside their result. counts: which tensors do. `then`
    has
    what lived at the peak: bytes, shape and what made it.
    """

    def __init__(self, model, monkeypatch, counts=lambda x: True):
        super().__init__()
        self.living, self.most, self.then, self.inside = {}, 0, [], 0
        self.counts = counts
        self.held = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
        for owner, name in [
            (F, "scaled_dot_product_attention"),
            (sdpa, "STOCK"),
            *((ops, name) for name in PUBLIC),
        ]:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, functools.partial(self.step, getattr(owner, name)))

    def step(self, op, *args, **kwargs):
        self.inside += 1
        self.hold((args, kwargs))
        try:
            actual = op(*args, **kwargs)
            given = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            several = isinstance(actual, tuple)
            first = _in_layout_of(given, actual[0] if several else actual)
            actual = (first, *actual[1:]) if several else first
        finally:
            self.inside -= 1
        return self.counted(actual, op)

    def hold(self, arguments):
        """What was not made in the block, such as a call's inputs, does not count, nor do views of it."""
        storages = {x.untyped_storage()._cdata for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
        self.held |= storages - self.living.keys()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside:
            self.hold((args, kwargs))
        actual = func(*args, **(kwargs or {}))
        return actual if self.inside else self.counted(actual, func)

    def counted(self, actual, func):
        for x in tree_leaves(actual):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.held and self.counts(x):
                self.living[storage._cdata] = (
                    StorageWeakRef(storage),
                    storage.nbytes(),
                    (tuple(x.shape), func),
                )
        self.living = {key: held for key, held in self.living.items() if not held[0].expired()}
        if (now := sum(size for _, size, _ in self.living.values())) > self.most:
            self.most, self.then = now, [(size, what) for _, size, what in self.living.values()]
        return actual


def _in_layout_of(x, actual):
    """Channels-last if x is, as on a card; torch's convolutions on meta return it channels first."""
    if x.dim() in (4, 5) and actual.dim() == x.dim() and x.stride(1) == 1 < actual.stride(1):
        return actual.contiguous(memory_format=patch._LAST[x.dim()])
    return actual


def on_meta(name, monkeypatch, dtype=torch.bfloat16):
    """A model that races, at its full size on meta, and its call; frames are as large there as they are on a
    card.
    """
    monkeypatch.setattr(
        calls, "random_tensor", lambda settings, *shape: torch.empty(shape, dtype=settings.dtype, device=META)
    )
    monkeypatch.setitem(frames.LARGE, "meta", frames.LARGE["cuda"])
    monkeypatch.setattr(unet, "_DEVICES", (*unet._DEVICES, "meta"))
    return models.racer_named(name).make("full", dtype, META)


def peaks(name, monkeypatch):
    """Of the stock model, and of the accelerated one."""
    model, call = on_meta(name, monkeypatch)
    actual = []
    for accelerated in (False, True):
        if accelerated:
            turnout.accelerate(model)
        with torch.no_grad(), monkeypatch.context() as steps, Peak(model, steps) as peak:
            call(model)
        actual.append(peak)
    return actual
