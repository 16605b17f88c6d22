"""A list of clips on several ranks: whole clips are dealt out, and only results travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from turnout.parallel.exchange import Engine, broadcast


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which rank takes each clip: the largest first, always the rank that has least so far.

    >>> deal([1, 1, 8, 3, 4], 2)
    [1, 0, 0, 1, 1]
    """
    loads, owners = [0] * ranks, [0] * len(sizes)
    for clip in sorted(range(len(sizes)), key=lambda clip: -sizes[clip]):
        owner = owners[clip] = loads.index(min(loads))
        loads[owner] += sizes[clip]
    return owners


def check_clips(name: str, clips: Sequence[Any]) -> None:
    """Refuse a list that holds anything but tensors of clips or images."""
    for i, clip in enumerate(clips):
        if not isinstance(clip, Tensor) or clip.dim() not in (4, 5):
            described = list(clip.shape) if isinstance(clip, Tensor) else type(clip).__name__
            raise TypeError(
                f"{name}: item {i} of the list is {described}; "
                "it needs tensors [B, C, T, H, W] or [B, C, H, W]"
            )


def gather_results(
    engine: Engine, own: dict[int, Any], owners: Sequence[int], to: str, clips: Sequence[Tensor]
) -> list[Any]:
    """What each clip gave, in the order of clips: on all ranks, or on the first one (None on the others).

    own: by the number of a clip, what this rank computed. Other ranks learn first, as meta tensors, what they
    will receive.
    """
    outlines: list[dict[int, Any]] = engine.agree(
        {clip: map_tensors(result, lambda x: x.to("meta")) for clip, result in own.items()}
    )
    receivers = range(engine.ranks) if to == "all" else range(1)
    results: list[Any] = []
    for clip, owner in enumerate(owners):
        result = own.get(clip)
        if result is None:
            result = outlines[owner].get(clip)  # None where no other rank is there

        def travel(x: Tensor, owner: int = owner, clip: int = clip) -> Tensor | None:
            return broadcast(engine, x, owner, receivers, clips[clip].device)

        results.append(map_tensors(result, travel))
    return results


def map_tensors(result: Any, change: Callable[[Tensor], Any]) -> Any:
    """What a model returns, with its tensors changed."""
    if isinstance(result, Tensor):
        return change(result)
    if isinstance(result, tuple):
        return tuple(map_tensors(each, change) for each in result)
    if isinstance(result, dict):  # diffusers' outputs are such
        return type(result)(**{name: map_tensors(each, change) for name, each in result.items()})
    if isinstance(getattr(result, "parameters", None), Tensor):  # of a distribution of latents
        parameters = change(result.parameters)
        return None if parameters is None else type(result)(parameters, deterministic=result.deterministic)
    return result
