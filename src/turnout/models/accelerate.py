"""accelerate, restore, accelerated: the instances of one model, patched and given back."""

from __future__ import annotations

import collections
import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from turnout.models import bare, calls, diffusers, layers, patch, stock, transformers, worth
from turnout.models.graphs import ENGINES
from turnout.models.report import Entry, Report, weights_of
from turnout.models.state import FIRST_CALLS, REPLAYS
from turnout.routing.op import TurnoutWarning
from turnout.routing.settings import check_level
from turnout.routing.torch_private import uncompiled

KNOWN: dict[str, type[patch.Adapter]] = {**diffusers.ADAPTERS, **transformers.ADAPTERS}
MODELS: set[str] = diffusers.MODELS | transformers.MODELS
WHOLE: set[str] = MODELS | diffusers.WHOLE  # whose calls are seen as a whole


def accelerate(model: Any, *, numerics: str | None = None, graph: bool = False, warm: bool = True) -> Report:
    """Patch the instances of a model so that its convolutions, norms, attention and scans take turnout's
    routes.

    model: a module of diffusers or transformers, a diffusers pipeline, or any `nn.Module`. Models that are
    known run in channels-last from the first convolution to the last, their weights included, with norm,
    activation, bias and residual fused; of others the single layers are routed. Models inside
    `torch.compile`, DDP, FSDP or peft are found there. Whatever is done to a part of the model, before or
    after (hooks, offloading, casting, LoRA, caches, parametrisations), its results are
    those of the stock model: such a part runs the stock code. `numerics="exact"` keeps every bit of the stock
    model, `None` leaves it to `turnout.numerics` at the time of a call.
    graph: on a CUDA device, calls of a known model that come again are captured in a CUDA graph and replayed,
    from the third on, until something changes that a graph would not see (docs/guides/cuda-graphs.md). It
    costs the memory that a call works in, for as long as the graph is kept; `restore` frees it.
    warm: on a CUDA device, a call of a known model that lacks several compiled kernels compiles them together
    first, in processes of its own (docs/guides/warm.md). Returns a report; warns where nothing could be
    patched. Calling it again changes nothing; `restore` undoes it.

    >>> import torch, turnout
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8))
    >>> report = turnout.accelerate(model)
    >>> print(report)
    model: Sequential is not known: its single layers are routed
      routed        1 x Conv2d: turnout.conv2d
      routed        1 x GroupNorm: turnout.group_norm_silu
    >>> turnout.restore(model)
    2
    """
    if numerics is not None:
        check_level(numerics)
    _undo(model)
    report = Report()
    try:
        for path, part in _parts(model):
            _accelerate_part(path, part, numerics, report)
            if graph or (warm and report.patched):
                _see_calls(path, part, report, graph=graph, warm=warm)
    except BaseException:
        _undo(model)
        raise
    if not isinstance(model, nn.Module):
        report.notes += [f"{name} is None" for name, part in model.components.items() if part is None]
    if not report.patched:
        warnings.warn(f"turnout.accelerate patched nothing\n{report}", TurnoutWarning, stacklevel=2)
    return report


def _accelerate_part(path: str, part: nn.Module, numerics: str | None, report: Report) -> None:
    """Patch the instances of one model, and report for each what was done."""
    within: dict[int, str] = {}  # modules that a fused part reads past, and the path of that part
    channels_last: tuple[str, ...] = ()
    entries, touched = [], set()
    for inner, instance in _instances(part):
        relay = inner.startswith(channels_last) and patch.can_relay(instance)
        adapters = _adapters(instance) + ([patch.ChannelsLast] if relay else [])
        entry = _patch(instance, ".".join(filter(None, (path, inner))), numerics, adapters, relay=relay)
        if entry is None:
            continue
        touched.add(id(instance))
        entries.append(entry._replace(within=within.get(id(instance), "")))
        patched = patch.patched(instance)
        if patched is not None and patched.adapter.channels_last:
            channels_last += (f"{inner}.",)
        if patched is not None and patched.adapter.inside is not None and isinstance(instance, nn.Module):
            within |= {
                id(each): within.get(id(each)) or entry.path or "model"
                for each in bare.read_past(instance, patched.adapter.inside)
            }
    report.entries += entries
    report.models[path] = _verdict(part, entries)
    report.notes += [f"{path}: {note}" if path else note for note in weights_of(part)]
    untouched = collections.Counter(report.untouched)
    untouched.update(
        type(m).__name__
        for m in part.modules()
        if m._parameters and id(m) not in touched and id(m) not in within
    )
    report.untouched = dict(untouched.most_common())


def _see_calls(path: str, part: nn.Module, report: Report, *, graph: bool, warm: bool) -> None:
    """See the calls of every known model in a part, that is not inside another one, as a whole."""
    wholes: tuple[str, ...] = ()
    for inner, instance in list(part.named_modules()):
        if _key(instance, WHOLE) and not (wholes and f"{inner}.".startswith(wholes)):
            calls.install(instance, graph=graph, warm=warm)
            location, held = ".".join(filter(None, (path, inner))), vars(instance)
            report.graphs |= {location: held[REPLAYS]} if graph else {}
            report.first_calls |= {location: held[FIRST_CALLS]} if warm else {}
            wholes += (f"{inner}." if inner else "",)
    if graph:
        _note_graphs(path, part, report, any_known=bool(wholes))


def _note_graphs(path: str, part: nn.Module, report: Report, *, any_known: bool) -> None:
    """Why there will be no graphs."""
    if not any_known:
        name = type(_unwrapped(part)).__name__
        report.notes.append(f"{path or 'model'}: graph=True needs a known model, {name} is none: no graphs")
    elif all(x.device.type not in ENGINES for x in part.parameters()):
        devices = " and ".join(sorted({x.device.type for x in part.parameters()}))
        report.notes.append(
            f"{path or 'model'}: on {devices}, CUDA graphs need a CUDA device: no graphs there"
        )


def _verdict(part: nn.Module, entries: list[Entry]) -> str:
    inner = _unwrapped(part)
    name = type(inner).__name__
    if _key(inner, MODELS):
        return f"{name} is known"
    fused = sum(entry.fused and entry.adapter is not None for entry in entries)
    if fused:
        parts = "1 part of it is" if fused == 1 else f"{fused} parts of it are"
        return f"{name} is partly known: {parts} fused, single layers of the rest are routed"
    return f"{name} is not known: its single layers are routed"


def _unwrapped(model: Any) -> nn.Module:
    """The model inside torch.compile, DDP, FSDP and peft."""
    while True:
        inner = uncompiled(model)
        if inner is not None:
            model = inner
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif type(model).__name__ in _WRAPPERS and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model


_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def restore(model: Any) -> int:
    """Give every patched instance its own class, and every weight its old layout, back: the model is the
    stock model again, bit for bit. A distributed model is undone too.

    Returns how many instances were patched.

    >>> import torch, turnout
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> report = turnout.accelerate(model)
    >>> turnout.restore(model), type(model) is torch.nn.Conv2d
    (1, True)
    """
    fronts = 0
    for _, part in _parts(model):
        for _, instance in _instances(part):
            calls.uninstall(instance)
            fronts += patch.take_front(instance) is not None and patch.patched(instance) is None
    return fronts + _undo(model)


def _undo(model: Any) -> int:
    """Undo what `accelerate` did; a distributed model stays distributed."""
    instances = [instance for _, part in _parts(model) for _, instance in _instances(part)]
    bare.forget(instances)
    worth.forget(instances)
    for instance in instances:
        calls.uninstall(instance)
    return sum(map(patch.undo, instances))


@contextlib.contextmanager
def accelerated(
    model: Any, *, numerics: str | None = None, graph: bool = False, warm: bool = True
) -> Iterator[Report]:
    """`accelerate` for the length of a `with` block. Behind it the model is as it was before: stock, or
    accelerated in another way.

    >>> import torch, turnout
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> with turnout.accelerated(model) as report:
    ...     y = model(torch.ones(1, 3, 8, 8))
    >>> type(model) is torch.nn.Conv2d
    True
    """
    before = _accelerated_now(model)
    report = accelerate(model, numerics=numerics, graph=graph, warm=warm)
    try:
        yield report
    finally:
        if before:
            _undo(model)
            _accelerate_again(before)
        else:
            restore(model)


def _accelerated_now(model: Any) -> list[tuple[Any, list[patch.Patch], bool, bool]]:
    """Every patched instance, its patches, and whether its calls are replayed and compiled together."""
    instances = [instance for _, part in _parts(model) for _, instance in _instances(part)]
    held = [getattr(instance, "__dict__", {}) for instance in instances]
    every = zip(instances, map(patch.patches_of, instances), held, strict=True)
    return [(one, patches, REPLAYS in own, FIRST_CALLS in own) for one, patches, own in every if patches]


def _accelerate_again(before: list[tuple[Any, list[patch.Patch], bool, bool]]) -> None:
    for instance, patches, graph, warm in before:
        for each in reversed(patches):
            if each.adapter in (calls.WholeForward, calls.WholeAutoencoder):
                calls.install(instance, graph=graph, warm=warm)
            else:
                relay = each.relaid and patch.can_relay(instance)
                patch.apply(instance, each.adapter, each.numerics, relay=relay)


def _parts(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules handed in: one model, or those of a pipeline, under their names."""
    if isinstance(model, nn.Module):
        return [("", model)]
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        hint = (
            "; load the model first: from_pretrained(...)"
            if isinstance(model, (str, os.PathLike, type))
            else ""
        )
        raise TypeError(f"{kind} is neither an nn.Module nor a pipeline with components{hint}")
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


def _refusals(instance: object, adapter: type[patch.Adapter]) -> list[str]:
    """Every reason against an adapter: others' code in the class, others' modules inside, and the adapter's
    own.
    """
    key = _key(instance, KNOWN)
    if key is not None and adapter is KNOWN[key]:
        refusals = list(stock.unlike_stock(type(instance), key, adapter))
        if refusals:
            return refusals
    if isinstance(instance, nn.Module) and adapter.inside is not None:
        refusals = list(bare.strangers(instance, adapter.inside))
        if refusals:
            return refusals
    return list(adapter.refuses(instance))


def _patch(
    instance: object, path: str, numerics: str | None, adapters: list[type[patch.Adapter]], *, relay: bool
) -> Entry | None:
    """Patch one instance by the first of the adapters that does not refuse.

    None: nothing here is turnout's business.
    """
    name = type(instance).__name__
    reasons: list[str] = []
    for adapter in adapters:
        refusals = _refusals(instance, adapter)
        if numerics == "exact" and not adapter.exact:
            refusals.append("numerics exact, this adapter computes in another order")
        if isinstance(instance, nn.Module):
            refusals += _taken(instance, adapter)
        if not refusals:
            patch.apply(instance, adapter, numerics, relay=relay)
            return Entry(
                path,
                name,
                adapter.summary,
                fused=adapter in _FUSED,
            )
        reasons += refusals
    return Entry(path, name, None, tuple(dict.fromkeys(reasons))) if reasons else None


_FUSED = set(KNOWN.values())


def _taken(instance: nn.Module, adapter: type[patch.Adapter]) -> Iterator[str]:
    """Why an instance whose methods are another's already is left as it is."""
    if "forward" in vars(instance) and "forward" in dir(adapter):
        yield (
            "its forward was replaced, as offloading, casting and caches do; "
            "accelerate before them to have it patched"
        )
    if "parametrizations" in instance._modules:
        yield "its weights are parametrised; accelerate before that to have it patched"
