"""Turn the padding of a public call into the lengths that routes work with.

A caller passes lengths, as a list or a tensor, or a boolean mask over keys. Each becomes two numbers per
batch element: the first `prefix` keys and the last `suffix` keys are valid, those between are padding. Text
padded to a fixed length with an image behind it is (text length, image length); padding at the end is
(length, 0).
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
    """Check `kv_lengths` and bring them to one form: a flat list of 2 B numbers if the host knows them.

    Else a tensor [B, 2] on the device, and an empty list.
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
        values = _values(kv_lengths, Tensor.tolist)
        if values is None:
            both = (
                kv_lengths
                if kv_lengths.dim() == 2
                else torch.stack([kv_lengths, torch.zeros_like(kv_lengths)], 1)
            )
            return both.contiguous(), []
        kv_lengths = values
    if len(kv_lengths) != batch:
        raise ValueError(
            f"kv_lengths has {len(kv_lengths)} entries, it needs one for each of {batch} batch elements"
        )
    flat: list[int] = []
    for entry in kv_lengths:
        prefix, suffix = _lengths(entry)
        if prefix < 0 or suffix < 0 or prefix + suffix > keys:
            raise ValueError(f"kv_lengths has {entry}, it needs lengths from 0 to {keys}, the number of keys")
        flat += prefix, suffix
    return None, flat


def _lengths(entry: Any) -> tuple[int, int]:
    """(prefix, suffix) of an entry of `kv_lengths`: an integer or a pair of them, NumPy's too."""
    try:
        return operator.index(entry), 0
    except TypeError:
        prefix, suffix = map(operator.index, entry)
        return prefix, suffix


def of_mask(mask: Tensor, batch: int, keys: int) -> list[int] | None:
    """Read lengths from a boolean mask over keys.

    None for another kind of mask, one with holes, or one whose values cannot be read now.
    """
    if key_mask(mask, batch, keys) is None:
        return None
    return _values(mask, lambda values: _runs(key_mask(values, batch, keys)))


def key_mask(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """View a boolean mask that is the same for all heads and queries as [B, keys]; None for any other."""
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


def valid_key_mask(
    lengths: Sequence[int], kv_lengths: Tensor | None, batch: int, keys: int, device: torch.device
) -> Tensor | None:
    """A boolean mask [B, keys] that is true for valid keys; None if all are valid."""
    if keys == 0:
        return None
    if kv_lengths is not None:
        at = torch.arange(keys, device=device)
        return (at < kv_lengths[:, :1]) | (at >= keys - kv_lengths[:, 1:])
    if not lengths:
        return None
    valid = torch.zeros(batch, keys, dtype=torch.bool, device=device)
    # Filled, not copied: a copy from the host waits for the device.
    for first, size, prefix, suffix in alike(lengths):
        valid[first : first + size, :prefix] = True
        valid[first : first + size, keys - suffix :] = True
    return valid


def blanked(k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Replace padding in k and v, so that NaN in it has no effect.

    A padded key becomes a copy of the first valid one, not zero: its score is masked all the same, and is NaN
    or infinite only if that of a valid key is. A padded value becomes zero.
    """
    is_valid = valid[:, None, :, None]
    first = valid.int().argmax(1)[:, None, None, None].expand(k.shape[0], k.shape[1], 1, k.shape[3])
    return torch.where(is_valid, k, k.gather(2, first)), torch.where(is_valid, v, 0.0)


def lengthened(
    k: Tensor, v: Tensor, mask: Tensor | None, valid: Tensor | None, keys: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The same call with more keys, which are masked."""
    more = keys - k.shape[2]
    if valid is None:
        valid = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    if mask is not None:
        mask = F.pad(mask.expand(*mask.shape[:-1], k.shape[2]), (0, more))
    k, v = (F.pad(x, (0, 0, 0, more)) for x in (k, v))
    return k, v, mask, F.pad(valid, (0, more))


@functools.lru_cache(maxsize=256)
def on_device(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy the flat list to the device as [B, 2], once, as each copy from the host waits for the device.

    For routes, which never see a fake tensor.
    """
    return torch.tensor(lengths, dtype=torch.int32, device=device).view(-1, 2)


def _runs(mask: Tensor | None) -> list[int] | None:
    assert mask is not None
    rows = mask.cpu()
    prefix = rows.long().cumprod(1).sum(1)
    suffix = torch.where(prefix == rows.shape[1], 0, rows.flip(1).long().cumprod(1).sum(1))
    if not torch.equal(prefix + suffix, rows.sum(1)):
        return None
    return torch.stack([prefix, suffix], 1).flatten().tolist()


_MOST_KEPT = 16
_kept: list[tuple[Any, int, Any]] = []


def _values(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """Apply `read` to a tensor; None in transforms and while a graph is traced or captured.

    On a GPU reading waits for the device, so the result is cached, as the layers of a model share one mask. A
    tensor made in inference mode may change without a new version, and is read every time.
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
    """Group neighbours of a batch with the same lengths, as (first, count, prefix, suffix).

    >>> alike([7, 0, 7, 0, 3, 0])
    [(0, 2, 7, 0), (2, 1, 3, 0)]
    """
    groups: list[tuple[int, int, int, int]] = []
    for i, (prefix, suffix) in enumerate(zip(lengths[::2], lengths[1::2], strict=True)):
        if groups and groups[-1][2:] == (prefix, suffix):
            first, count, *_ = groups.pop()
            groups.append((first, count + 1, prefix, suffix))
        else:
            groups.append((i, 1, prefix, suffix))
    return groups


class Common(NamedTuple):
    """One run of keys that are valid for every batch element, and the lengths of each in the other keys."""

    first: int
    size: int
    rest: tuple[int, ...]  # two numbers per batch element, as kv_lengths has them

    @staticmethod
    def of(lengths: Sequence[int], keys: int, step: int = 1) -> Common:
        """Take the longer of two runs: from the first key on, or up to the last key.

        A run of at least `step` keys is cut to a multiple of it.

        >>> Common.of([4400, 0, 4608, 0], 4608)
        Common(first=0, size=4400, rest=(0, 0, 208, 0))
        >>> Common.of([4400, 0, 4608, 0], 4608, step=128)
        Common(first=0, size=4352, rest=(48, 0, 256, 0))
        >>> Common.of([300, 4096, 512, 4096], 4608)
        Common(first=512, size=4096, rest=(300, 0, 512, 0))
        """
        # If all keys are valid, they are a run from the first key as well as one up to the last.
        both = [
            (keys, keys) if prefix + suffix == keys else (prefix, suffix)
            for prefix, suffix in zip(lengths[::2], lengths[1::2], strict=True)
        ]
        start, end = min(prefix for prefix, _ in both), min(suffix for _, suffix in both)
        if start >= end:
            start -= start % step if start >= step else 0
            rest = [(prefix - start, 0 if prefix == keys else suffix) for prefix, suffix in both]
            return Common(0, start, tuple(n for pair in rest for n in pair))
        end -= end % step if end >= step else 0
        left = keys - end
        rest = [(left, 0) if prefix == keys else (min(prefix, left), suffix - end) for prefix, suffix in both]
        return Common(left, end, tuple(n for pair in rest for n in pair))

    @property
    def some(self) -> tuple[int, int]:
        """First and count of the batch elements, from the first to the last, that have more valid keys."""
        having = [i for i, pair in enumerate(zip(self.rest[::2], self.rest[1::2], strict=True)) if any(pair)]
        return (having[0], having[-1] + 1 - having[0]) if having else (0, 0)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split x [B, G, N, D] into the keys of the run and the others."""
        left = x.shape[2] - self.size
        return x.narrow(2, self.first, self.size), x.narrow(2, 0 if self.first else self.size, left)


def valid_keys(x: Tensor, prefix: int, suffix: int) -> Tensor:
    """The valid keys of x [B, G, N, D]: a view, or a copy if they are in two places."""
    keys = x.shape[2]
    if prefix + suffix == keys:
        return x
    if prefix == 0 or suffix == 0:
        return x.narrow(2, 0 if prefix else keys - suffix, prefix + suffix)
    return torch.cat([x.narrow(2, 0, prefix), x.narrow(2, keys - suffix, suffix)], 2)
