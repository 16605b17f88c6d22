"""Keys that do not count: from what a caller gives (lengths, a list or a tensor, a boolean mask over keys) to
what routes work with.

All of it becomes two numbers per batch element: the first `head` keys and the last `tail` keys count. Text
padded to a fixed length and an image behind it is (text length, image length); padding at the end is (length,
0).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.routing.device import is_planning
from turnout.routing.fallback import can_read_values, version_of


def pairs(kv_lengths: Any, batch: int, keys: int) -> tuple[Tensor | None, list[int]]:
    """`kv_lengths` of a public call as a tensor [B, 2] that only the device knows, or as a flat list of 2 B
    numbers.
    """
    if isinstance(kv_lengths, Tensor):
        shape = tuple(kv_lengths.shape)
        if shape not in ((batch,), (batch, 2)):
            raise ValueError(
                f"kv_lengths is {list(shape)}, it needs to be [batch] or [batch, 2] with batch {batch}"
            )
        if kv_lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"kv_lengths are {str(kv_lengths.dtype).removeprefix('torch.')}, "
                "they need to be int32 or int64"
            )
        known = _values(kv_lengths, Tensor.tolist)
        if known is None:
            both = (
                kv_lengths
                if kv_lengths.dim() == 2
                else torch.stack([kv_lengths, torch.zeros_like(kv_lengths)], 1)
            )
            return both.contiguous(), []
        kv_lengths = known
    if len(kv_lengths) != batch:
        raise ValueError(
            f"kv_lengths has {len(kv_lengths)} entries, it needs one for each of {batch} batch elements"
        )
    flat: list[int] = []
    for entry in kv_lengths:
        head, tail = _lengths(entry)
        if head < 0 or tail < 0 or head + tail > keys:
            raise ValueError(f"kv_lengths has {entry}, it needs lengths from 0 to {keys}, the number of keys")
        flat += head, tail
    return None, flat


def _lengths(entry: Any) -> tuple[int, int]:
    """Two numbers from an entry of `kv_lengths`: a number or a pair of them, NumPy's too."""
    try:
        return operator.index(entry), 0
    except TypeError:
        head, tail = map(operator.index, entry)
        return head, tail


def of_mask(mask: Tensor, batch: int, keys: int) -> list[int] | None:
    """The lengths that a boolean mask over keys says, or None: another kind of mask, or one with holes, or
    values that cannot be read.
    """
    if key_mask(mask, batch, keys) is None:
        return None
    return _values(mask, lambda values: _runs(key_mask(values, batch, keys)))


def key_mask(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """A boolean mask that is the same for all heads and queries, as [B, keys] without a copy; None for any
    other.
    """
    if (
        mask is None
        or mask.dtype is not torch.bool
        or mask.dim() > 4
        or mask.dim() < 1
        or mask.shape[-1] != keys
    ):
        return None
    full = mask[(None,) * (4 - mask.dim())]
    if full.shape[0] not in (1, batch) or any(full.shape[i] != 1 and full.stride(i) != 0 for i in (1, 2)):
        return None
    return full[:, 0, 0].expand(batch, keys) if 0 not in full.shape else None


def counted(
    lengths: Sequence[int], kv_lengths: Tensor | None, batch: int, keys: int, device: torch.device
) -> Tensor | None:
    """Which keys count, as a boolean [B, keys]; None for all."""
    if keys == 0:
        return None
    if kv_lengths is not None:
        at = torch.arange(keys, device=device)
        return (at < kv_lengths[:, :1]) | (at >= keys - kv_lengths[:, 1:])
    if not lengths:
        return None
    counts = torch.zeros(batch, keys, dtype=torch.bool, device=device)
    # Filled, not copied: a copy from the host waits for the device.
    for first, size, head, tail in alike(lengths):
        counts[first : first + size, :head] = True
        counts[first : first + size, keys - tail :] = True
    return counts


def blanked(k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with nothing in them that does not count, NaN included. Such a key becomes the first that
    counts, not zero: its score is masked all the same, and is NaN or infinite only where another is too."""
    is_valid = counts[:, None, :, None]
    first = counts.int().argmax(1)[:, None, None, None].expand(k.shape[0], k.shape[1], 1, k.shape[3])
    return torch.where(is_valid, k, k.gather(2, first)), torch.where(is_valid, v, 0.0)


def lengthened(
    k: Tensor, v: Tensor, mask: Tensor | None, counts: Tensor | None, keys: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The same call with more keys, which are masked."""
    more = keys - k.shape[2]
    if counts is None:
        counts = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    if mask is not None:
        mask = F.pad(mask.expand(*mask.shape[:-1], k.shape[2]), (0, more))
    k, v = (F.pad(x, (0, 0, 0, more)) for x in (k, v))
    return k, v, mask, F.pad(counts, (0, more))


@functools.lru_cache(maxsize=256)
def on_device(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The flat list as [B, 2], copied there once: a copy from the host waits for the device.

    For routes, which never see a fake tensor.
    """
    return torch.tensor(lengths, dtype=torch.int32, device=device).view(-1, 2)


def _runs(mask: Tensor | None) -> list[int] | None:
    assert mask is not None
    rows = mask.cpu()
    head = rows.long().cumprod(1).sum(1)
    tail = torch.where(head == rows.shape[1], 0, rows.flip(1).long().cumprod(1).sum(1))
    if not torch.equal(head + tail, rows.sum(1)):
        return None
    return torch.stack([head, tail], 1).flatten().tolist()


_MOST_KEPT = 16
_kept: list[tuple[Any, int, Any]] = []


def _values(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """What `read` makes of a tensor's values; None where they cannot be looked at: in transforms, and while a
    graph is traced or captured.

    On a GPU reading waits for the device, so a tensor is read once: the layers of a model share theirs. One
    that was made in inference mode may change unnoticed, and is read every time.
    """
    if not can_read_values(tensor):
        return None
    if tensor.device.type == "cpu" or is_planning():
        return read(tensor)
    version = version_of(tensor)
    for seen, then, value in _kept if version is not None else ():
        if seen() is tensor and then == version:
            return value
    if torch.cuda.is_current_stream_capturing():
        return None
    value = read(tensor)
    if version is None:
        return value
    _kept[:] = [(weakref.ref(tensor), version, value), *_alive(_kept, tensor)][:_MOST_KEPT]
    return value


def _alive(entries: Iterable[tuple[Any, int, Any]], but: Tensor) -> list[tuple[Any, int, Any]]:
    return [entry for entry in entries if entry[0]() is not None and entry[0]() is not but]


def alike(lengths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Neighbours of one batch with the same lengths, as (first, how many, head, tail).

    >>> alike([7, 0, 7, 0, 3, 0])
    [(0, 2, 7, 0), (2, 1, 3, 0)]
    """
    groups: list[tuple[int, int, int, int]] = []
    for i, (head, tail) in enumerate(zip(lengths[::2], lengths[1::2], strict=True)):
        if groups and groups[-1][2:] == (head, tail):
            first, count, *_ = groups.pop()
            groups.append((first, count + 1, head, tail))
        else:
            groups.append((i, 1, head, tail))
    return groups


class Common(NamedTuple):
    """One run of keys that counts for every batch element, and what else counts, as lengths within what is
    left of the keys.
    """

    first: int
    size: int
    rest: tuple[int, ...]  # two numbers per batch element, as kv_lengths has them

    @staticmethod
    def of(lengths: Sequence[int], keys: int, step: int = 1) -> Common:
        """The longer of the runs that start at the first key and that end at the last; of many keys a
        multiple of `step`.

        >>> Common.of([4400, 0, 4608, 0], 4608)
        Common(first=0, size=4400, rest=(0, 0, 208, 0))
        >>> Common.of([4400, 0, 4608, 0], 4608, step=128)
        Common(first=0, size=4352, rest=(48, 0, 256, 0))
        >>> Common.of([300, 4096, 512, 4096], 4608)
        Common(first=512, size=4096, rest=(300, 0, 512, 0))
        """
        # Where all keys count, they are a run from the start as well as one to the end.
        both = [
            (keys, keys) if head + tail == keys else (head, tail)
            for head, tail in zip(lengths[::2], lengths[1::2], strict=True)
        ]
        start, end = min(head for head, _ in both), min(tail for _, tail in both)
        if start >= end:
            start -= start % step if start >= step else 0
            rest = [(head - start, 0 if head == keys else tail) for head, tail in both]
            return Common(0, start, tuple(n for pair in rest for n in pair))
        end -= end % step if end >= step else 0
        left = keys - end
        rest = [(left, 0) if head == keys else (min(head, left), tail - end) for head, tail in both]
        return Common(left, end, tuple(n for pair in rest for n in pair))

    @property
    def some(self) -> tuple[int, int]:
        """The first batch element of which more keys count, and how many there are up to the last."""
        having = [i for i, pair in enumerate(zip(self.rest[::2], self.rest[1::2], strict=True)) if any(pair)]
        return (having[0], having[-1] + 1 - having[0]) if having else (0, 0)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of x [B, G, N, D] in common, and what is left."""
        left = x.shape[2] - self.size
        return x.narrow(2, self.first, self.size), x.narrow(2, 0 if self.first else self.size, left)


def counting(x: Tensor, head: int, tail: int) -> Tensor:
    """The keys of x [B, G, N, D] that count: a view, or a copy where they are in two places."""
    keys = x.shape[2]
    if head + tail == keys:
        return x
    if head == 0 or tail == 0:
        return x.narrow(2, 0 if head else keys - tail, head + tail)
    return torch.cat([x.narrow(2, 0, head), x.narrow(2, keys - tail, tail)], 2)
