"""accelerate, restore, accelerated: the instances of one model, patched and given back."""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from turnout.models import diffusers, layers, patch, transformers
from turnout.routing.op import TurnoutWarning
from turnout.routing.settings import check_level

KNOWN: dict[str, type[patch.Adapter]] = {**diffusers.ADAPTERS, **transformers.ADAPTERS}
MODELS: set[str] = diffusers.MODELS | transformers.MODELS


class Entry(NamedTuple):
    """One instance: where it is in the model, its class, the adapter it got (None: none), and why not."""

    path: str
    name: str
    adapter: str | None
    reasons: tuple[str, ...] = ()


@dataclass
class Report:
    """What `accelerate` patched, what it did not patch, and why."""

    models: dict[str, str] = field(default_factory=dict)  # path to "AutoencoderKLWan: known" or "...: not known, ..."
    entries: list[Entry] = field(default_factory=list)

    @property
    def patched(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.adapter is not None]

    @property
    def refused(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.adapter is None]

    def __str__(self) -> str:
        lines = [f"{path or 'model'}: {said}" for path, said in self.models.items()]
        taken = collections.Counter((entry.name, entry.adapter) for entry in self.patched)
        lines += [f"  {count:4d} x {name}: {adapter}" for (name, adapter), count in taken.items()]
        missed = collections.Counter((entry.name, entry.reasons) for entry in self.refused)
        lines += [f"  {count:4d} x {name}: not patched, {'; '.join(reasons)}" for (name, reasons), count in missed.items()]
        return "\n".join(lines) if self.patched else "\n".join([*lines, "  nothing was patched"])


def accelerate(model: Any, *, numerics: str | None = None) -> Report:
    """Patch the instances of a model so that its convolutions, norms, attention and scans take turnout's routes.

    model: a module of diffusers or transformers, a diffusers pipeline, or any `nn.Module`. Models that are known run in channels-last from
    the first convolution to the last, their weights included, with norm, activation, bias and residual fused; of others the single layers
    are routed.
    `numerics="exact"` keeps every bit of the stock model, `None` leaves it to `turnout.numerics` at the time of a call. Returns a report;
    warns where nothing could be patched. Calling it again changes nothing; `restore` undoes it.

    >>> import torch, turnout
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
    >>> report = turnout.accelerate(model)
    >>> print(report)
    model: Sequential is not known: its single layers are routed
         1 x Conv2d: turnout.conv2d
         1 x GroupNorm: turnout.group_norm_silu
    >>> turnout.restore(model)
    2
    """
    if numerics is not None:
        check_level(numerics)
    restore(model)
    report = Report()
    for path, part in _parts(model):
        name = type(part).__name__
        report.models[path] = f"{name} is known" if _key(part, MODELS) else f"{name} is not known: its single layers are routed"
        covered: tuple[str, ...] = ()
        channels_last: tuple[str, ...] = ()
        for inner, instance in _instances(part):
            relay = inner.startswith(channels_last) and patch.can_relay(instance)
            adapters = [] if inner.startswith(covered) else _adapters(instance)
            adapters += [patch.ChannelsLast] if relay else []
            entry = _patch(instance, ".".join(filter(None, (path, inner))), numerics, adapters, relay=relay)
            report.entries += [entry] if entry is not None else []
            made = patch.patched(instance)
            covered += (f"{inner}.",) if made is not None and made.adapter.covers else ()
            channels_last += (f"{inner}.",) if made is not None and made.adapter.channels_last else ()
    if not report.patched:
        warnings.warn(f"turnout.accelerate patched nothing\n{report}", TurnoutWarning, stacklevel=2)
    return report


def restore(model: Any) -> int:
    """Give every patched instance its own class, and every weight its old layout, back: the model is the stock model again, bit for bit.

    Returns how many instances were patched.

    >>> import torch, turnout
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> report = turnout.accelerate(model)
    >>> turnout.restore(model), type(model) is torch.nn.Conv2d
    (1, True)
    """
    return sum(patch.undo(instance) for _, part in _parts(model) for _, instance in _instances(part))


@contextlib.contextmanager
def accelerated(model: Any, *, numerics: str | None = None) -> Iterator[Report]:
    """`accelerate` for the length of a `with` block.

    >>> import torch, turnout
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> with turnout.accelerated(model) as report:
    ...     y = model(torch.ones(1, 3, 8, 8))
    >>> type(model) is torch.nn.Conv2d
    True
    """
    report = accelerate(model, numerics=numerics)
    try:
        yield report
    finally:
        restore(model)


def _parts(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules handed in: one model, or those of a pipeline, under their names."""
    if isinstance(model, nn.Module):
        return [("", model)]
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"{type(model).__name__} is neither an nn.Module nor a pipeline with components")
    return [(name, part) for name, part in components.items() if isinstance(part, nn.Module)]


def _instances(part: nn.Module) -> Iterator[tuple[str, object]]:
    """Every module, and every attention processor that a module holds, each once."""
    seen = set()
    for path, module in part.named_modules():
        yield path, module
        processor = vars(module).get("processor")
        if processor is not None and id(processor) not in seen:
            seen.add(id(processor))
            yield f"{path}.processor", processor


def _key(instance: object, table: Any) -> str | None:
    """The name under which an instance's class, or the nearest class it comes from, stands in a table."""
    patch_of = patch.patched(instance)
    for cls in (patch_of.base if patch_of else type(instance)).__mro__:
        key = f"{cls.__module__}.{cls.__qualname__}"
        if key in table:
            return key
    return None


def _adapters(instance: object) -> list[type[patch.Adapter]]:
    """The adapter of an instance's class, if it is known, and that of its kind of layer."""
    key = _key(instance, KNOWN)
    layer = layers.adapter_of(instance)
    return ([KNOWN[key]] if key else []) + ([layer] if layer is not None else [])


def _patch(instance: object, path: str, numerics: str | None, adapters: list[type[patch.Adapter]], *, relay: bool) -> Entry | None:
    """Patch one instance by the first of the adapters that does not refuse. None: nothing here is turnout's business."""
    name = type(instance).__name__
    reasons: list[str] = []
    for adapter in adapters:
        said = list(adapter.refuses(instance))
        if numerics == "exact" and not adapter.exact:
            said.append("numerics exact, this adapter computes in another order")
        if isinstance(instance, nn.Module) and "forward" in vars(instance) and "forward" in dir(adapter):
            said.append("forward was replaced on this instance, accelerate needs to come before offloading hooks")
        if not said:
            patch.apply(instance, adapter, numerics, relay=relay)
            return Entry(path, name, (adapter.__doc__ or adapter.__name__).splitlines()[0].rstrip("."))
        reasons += said
    return Entry(path, name, None, tuple(dict.fromkeys(reasons))) if reasons else None
