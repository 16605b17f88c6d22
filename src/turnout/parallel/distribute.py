"""distribute: decode and encode on the ranks of a mesh, the same bits as on one."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

from turnout.models import patch
from turnout.models.report import Entry, Report
from turnout.parallel.distribution import Distribution
from turnout.parallel.exchange import Engine
from turnout.parallel.fake import Fake
from turnout.parallel.fronts import Attention, Distributed, Whole
from turnout.parallel.lockstep import Lockstep
from turnout.parallel.vaes import Known, known_parts, most_latents, refuse_noise, refuse_tiling

SPLITS = ("auto", "height", "width", "batch")
GATHERS = ("all", "first", "none")
ROUTES = ("auto", "parts", "alone")


def distribute(
    vae: Any,
    mesh: Any,
    *,
    split: Literal["auto", "height", "width", "batch"] = "auto",
    gather: Literal["all", "first", "none"] = "all",
    routes: Literal["auto", "parts", "alone"] = "auto",
    latents: int | Literal["auto"] = "auto",
    timeout: float = 600.0,
) -> Report:
    """Decode and encode on all ranks of a mesh, each with a part of the rows, columns or samples, bit for bit
    as on one rank.

    vae: `AutoencoderKLWan` (2.1, 2.2), `AutoencoderKLQwenImage`, `AutoencoderKL` (SD, SDXL, Flux),
    `AutoencoderKLFlux2`, `AutoencoderKLHunyuanVideo`, `AutoencoderKLCogVideoX`, `AutoencoderKLLTXVideo` or
    `AutoencoderKLLTX2Video`, stock or accelerated, on this rank's device; `accelerate` may also come later.
    Every rank makes this call with the same weights, then calls `decode`, `encode` or `DecodeStream.decode`
    with the same whole input.
    mesh: a 1-D `torch.distributed.DeviceMesh`, or `turnout.parallel.Lockstep(ranks)`: ranks as threads on one
    device, or `turnout.parallel.Fake(rank, ranks)`: one rank's compute alone.
    split: the axis. "auto" takes samples where there are as many as ranks, else the axis whose longest part
    is the smallest share. Parts may differ by one row of latents.
    gather: "all" ranks get the whole result, the "first" one (others get None), or "none": each has its part.
    routes: which routes an accelerated model takes. "alone": those that it takes without a mesh, with the
    same bits. What such a route needs of other parts is gathered, and where a part would have other bits, as
    may be with a group norm or a convolution of torch, every rank computes the whole. "parts": those that
    ranks can compute of their parts, where there is one that does not take much longer. The bits are then
    the same for any number of ranks, one included, and differ from those of the model without a mesh as
    those of two routes do. "auto": "parts" on a GPU, "alone" elsewhere.
    latents: how many latents an accelerated decoder of Wan takes at a time at most, behind the first one of a
    clip; "auto": four. At each stage as many of them go on together as have no more elements than two frames
    of the last stage, which one process has there in any case.
    timeout: seconds to wait for another rank; then the call fails on all.

    A distributed `decode` or `encode` also takes a list of clips or images, of whatever sizes, and returns a
    list. With split "auto" or "batch", and at least as many clips as ranks, each clip is computed whole by
    one rank, and only results are sent; with fewer, each clip in turn is split. With gather="none" the clips
    of other ranks are None.

    Ranks compare versions, settings, measured tables, weights and shapes, and raise `RanksDiffer` where they
    are not the same. An exception on one rank is raised on all. Calls that want gradients, or run under
    autocast, are computed whole on every rank, with a warning. `restore` undoes it.

    >>> import torch, turnout
    >>> from diffusers import AutoencoderKLWan
    >>> from turnout.parallel import Lockstep
    >>> latents = {"z_dim": 2, "latents_mean": [0.0] * 2, "latents_std": [1.0] * 2}
    >>> vae = AutoencoderKLWan(base_dim=4, num_res_blocks=1, **latents)
    >>> z = torch.randn(1, 2, 2, 2, 4)
    >>> with torch.no_grad():
    ...     alone = vae.decode(z).sample
    ...     report = turnout.distribute(vae, Lockstep(2), split="width")
    ...     torch.equal(vae.decode(z).sample, alone)
    True
    """
    engine = _engine(mesh, timeout)
    try:
        known, distribution = _agreed(vae, engine, split, gather, routes, latents)
    except BaseException as failure:
        if not isinstance(engine, Lockstep):
            engine.fail(failure)  # or other ranks would wait for this one
        raise
    for module in vae.modules():
        patch.take_front(module)
    report = Report()
    for path, module in vae.named_modules():
        name = type(module).__name__
        if name in known.attention:
            patch.put_front(module, Attention, {})
            report.entries.append(
                Entry(path, name, "attention of own pixels, the rest whole on every rank", fused=True)
            )
        elif name in known.whole:
            patch.put_front(module, Whole, {})
            report.entries.append(Entry(path, name, "whole on every rank", fused=True))
    patch.put_front(vae, Distributed, {"_turnout_distribution": distribution})
    name = type(vae).__name__
    report.entries.append(Entry("", name, f"decode and encode on {distribution.ranks} ranks", fused=True))
    report.models[""] = f"{name} is split over {distribution.ranks} ranks by {split}, results go to: {gather}"
    return report


def _agreed(
    vae: Any, engine: Lockstep | Engine, split: str, gather: str, routes: str, latents: Any
) -> tuple[Known, Distribution]:
    """What is known of the VAE, and how it is distributed, which all ranks have said alike."""
    for name, given, accepted in (
        ("split", split, SPLITS),
        ("gather", gather, GATHERS),
        ("routes", routes, ROUTES),
    ):
        if given not in accepted:
            raise ValueError(f"distribute: {name} {given!r}; one of: {', '.join(accepted)}")
    known = known_parts(vae)
    at_once = most_latents(vae, latents)
    refuse_tiling(vae)
    refuse_noise(vae)
    distribution = Distribution(vae, engine, split, gather, routes, at_once)
    distribution.meet()
    return known, distribution


def _engine(mesh: Any, timeout: Any) -> Lockstep | Engine:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < inf:
        raise ValueError(f"distribute: timeout {timeout!r}; it needs a number of seconds above 0")
    if isinstance(mesh, Lockstep | Fake):
        return mesh
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        from turnout.parallel.dist import Dist

        return Dist(mesh, timeout)
    raise TypeError(
        f"distribute: a mesh of type {type(mesh).__name__}; "
        "it needs a torch.distributed.DeviceMesh of one dimension"
    )
