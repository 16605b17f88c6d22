"""Along which axis frames are cut, and where."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from turnout.ops.group_norm_silu.blocks import grain
from turnout.parallel.exchange import AXES, levels_of, parts_of
from turnout.parallel.vaes import known_parts, pixels_of_a_latent


class Cut(NamedTuple):
    """Along which axis, in how many rows or columns of latents, and how many of them parts are multiples of;
    the sizes of a picture that is no multiple of the latents (see `Exchange`)."""

    axis: int
    units: int
    grain: int
    levels: dict[int, int]


class Cuts(NamedTuple):
    """How calls of one VAE may be cut: by `split`, for so many ranks. sums_blocks: whether its group norms
    may sum blocks of rows and columns."""

    split: str
    ranks: int
    sums_blocks: bool

    def best(self, vae: Any, name: str, x: Tensor) -> Cut | str:
        """The cut whose longest part is the smallest share; or why the call is computed whole."""
        pixels = pixels_of_a_latent(vae) if name == "encode" else 1
        names = (self.split,) if self.split in AXES else AXES
        sizes = {AXES[each]: x.shape[AXES[each]] for each in names}
        up = known_parts(vae).rest == "up"
        units = {axis: -(-size // pixels) if up else size // pixels for axis, size in sizes.items()}
        units = {axis: n for axis, n in units.items() if n >= self.ranks}
        if not units:
            size = " and ".join(f"{each} {x.shape[AXES[each]]}" for each in names)
            raise ValueError(
                f"{name}: {size} for {self.ranks} ranks; each needs at least {pixels} rows or columns: "
                "use fewer ranks, another split, or restore() the model"
            )
        cuts = [
            Cut(axis, n, self.grain(n), self._levels(vae, sizes[axis], pixels, n))
            for axis, n in units.items()
        ]
        cuts = [cut for cut in cuts if cut.levels or sizes[cut.axis] % pixels == 0]
        if not cuts:
            size = " and ".join(f"{each} {x.shape[AXES[each]]}" for each in names)
            return f"{size} of a picture is no multiple of {pixels}, and cannot be split as the latents are"
        return min(cuts, key=lambda cut: (self._longest(cut) / cut.units, bool(cut.levels), -cut.units))

    def _levels(self, vae: Any, size: int, pixels: int, units: int) -> dict[int, int]:
        """Those of a picture that is no multiple of the latents; none for a multiple, or where it cannot be
        split: an encoder that takes multiples only says so itself."""
        rest = known_parts(vae).rest
        in_patches = isinstance(getattr(vae.config, "patch_size", None), int)
        if size % pixels == 0 or rest is None or in_patches or pixels & (pixels - 1):
            return {}
        levels = levels_of(size, pixels, up=rest == "up")
        begin, _ = parts_of(units, self.ranks, self.grain(units))[-1]
        of_last_rank = [whole - begin * times for times, whole in levels.items()]
        return levels if len(set(of_last_rank)) == len(levels) and min(of_last_rank) > 0 else {}

    def _longest(self, cut: Cut) -> int:
        """The rows of latents of the longest part."""
        begin, end = parts_of(cut.units, self.ranks, cut.grain)[0]
        return end - begin

    def grain(self, units: int) -> int:
        """Where group norms sum blocks of several rows of latents, parts are made of whole ones, as far as
        they go round.
        """
        blocks = grain(units) if self.sums_blocks else 1
        return blocks if -(-units // blocks) >= self.ranks else 1
