"""What attention costs, in seconds: its arithmetic at the share of the card's peak that a kernel reaches, and
the host's time a launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from turnout.routing.device import Device

if TYPE_CHECKING:
    from turnout.ops.attention import Attention

HALF = (torch.float16, torch.bfloat16)
STEP = 128  # keys at a time of cuDNN's kernel for Hopper
FITTED = "attention"  # the section of a device's constants: shares of the peak and times of the host


def flops(problem: Attention) -> int:
    """Two products a score, of those that count."""
    scores = problem.batch * problem.heads * problem.rows * problem.keys * problem.share // 100
    if problem.causal:  # a triangle, and what is below it
        side = min(problem.rows, problem.keys)
        pairs = side * (side + 1) // 2 + max(0, problem.rows - problem.keys) * problem.keys
        scores = scores * pairs // max(1, problem.rows * problem.keys)
    return 2 * scores * (problem.dim + problem.dim_v)


def at_share(share: float, problem: Attention, device: Device) -> float | None:
    """The time of the arithmetic at a share of the card's peak, and never less than a launch."""
    peak = device.flops.get(str(problem.dtype).removeprefix("torch."))
    if peak is None or device.type != "cuda":
        return None
    fitted = device.fitted(FITTED)
    return max(fitted.launch, fitted.start + flops(problem) / (share * peak.value))


def was_measured(device: Device) -> bool:
    """The shares are those of a Hopper card.

    Elsewhere the kernels rank differently, and only `tune` can say how.
    """
    return device.capability is not None and device.capability[0] == 9


def share_of(kernel: str, problem: Attention, device: Device) -> float:
    """The share of the peak that a kernel reaches."""
    narrow = max(problem.dim, problem.dim_v) <= 64
    return getattr(device.fitted(FITTED), f"{kernel}_of_64" if narrow else kernel)


def cudnn_share(problem: Attention, device: Device) -> float:
    uneven = was_measured(device) and problem.keys % STEP and problem.mask is None and problem.padding is None
    return share_of("cudnn", problem, device) * (device.fitted(FITTED).uneven if uneven else 1.0)


def filled(problem: Attention, device: Device, rows: int) -> float:
    """The share of the multiprocessors that have work in the waves it takes, at `rows` queries a program, one
    program each.
    """
    programs = problem.batch * problem.heads * -(-problem.rows // rows)
    waves = -(-programs // device.units)
    return programs / (waves * device.units) if programs else 1.0


def prefers_cudnn(device: Device) -> bool:
    """torch asks cuDNN first on Hopper and data-centre Blackwell, from cuDNN 9.15 on."""
    newer = device.cudnn is None or device.cudnn > 91500
    return device.capability is not None and device.capability[0] in (9, 10) and newer


def torch_share(problem: Attention, device: Device) -> float:
    """The share of the peak that the kernel torch would pick reaches."""
    dim = max(problem.dim, problem.dim_v)
    by_cudnn = problem.dtype in HALF and prefers_cudnn(device) and dim <= 128 and dim % 8 == 0
    if problem.mask in ("bool", "float"):
        return share_of("any_mask", problem, device)
    if problem.mask == "keys" or problem.padding is not None:
        return share_of("cudnn_mask_over_keys" if by_cudnn else "any_mask", problem, device)
    if by_cudnn:
        return cudnn_share(problem, device)
    if problem.dtype in HALF and dim <= 256 and problem.dim == problem.dim_v:
        return share_of("flash", problem, device)
    return (
        share_of("efficient", problem, device)
        if dim <= 256
        else device.fitted(FITTED).efficient_wide * filled(problem, device, 64)
    )


def reference(problem: Attention, device: Device) -> float | None:
    """torch's attention. With a mask it computes all scores, those of padded keys and of causal calls too."""
    masked = problem.mask is not None or problem.padding is not None
    whole = problem._replace(share=100, causal=problem.causal and not masked)
    if device.type == "cuda":
        return at_share(torch_share(problem, device), whole, device)
    seconds, fitted = cpu(whole, device), device.fitted(FITTED)
    return None if seconds is None else fitted.masked * seconds + fitted.masked_start if masked else seconds


def cpu(problem: Attention, device: Device) -> float | None:
    """torch's flash kernel on a CPU."""
    peak = device.flops.get("float64" if problem.dtype is torch.float64 else "float32")
    fitted = device.fitted(FITTED)
    return (
        None
        if peak is None or device.type != "cpu"
        else fitted.start + flops(problem) / (fitted.share * peak.value)
    )


def cudnn(problem: Attention, device: Device) -> float | None:
    return at_share(cudnn_share(problem, device), problem, device) if was_measured(device) else None


def flash(problem: Attention, device: Device) -> float | None:
    return at_share(share_of("flash", problem, device), problem, device) if was_measured(device) else None


def efficient(problem: Attention, device: Device) -> float | None:
    if not was_measured(device):
        return None
    wide = max(problem.dim, problem.dim_v) > 256
    share = (
        device.fitted(FITTED).efficient_wide * filled(problem, device, 64)
        if wide
        else share_of("efficient", problem, device)
    )
    return at_share(share, problem, device)


def narrow(problem: Attention, device: Device) -> float | None:
    """torch's attention on the valid keys, a call for each batch element, and a copy of the outputs.

    Each call is a little below its best. On an H200 874 us at 2x24x4608x128 with lengths 4400 and 4608; 1059
    where the keys are in two parts and copied too.
    """
    unpadded = problem._replace(padding=None)
    copied = device.seconds(
        2 * problem.batch * problem.heads * problem.rows * problem.dim_v * problem.dtype.itemsize
    )
    fitted = device.fitted(FITTED)
    if device.type == "cpu":
        whole, each = cpu(unpadded, device), fitted.narrow_each
    else:
        whole, each = at_share(torch_share(unpadded, device), unpadded, device), 2 * fitted.launch
    return None if whole is None or copied is None else fitted.narrow * whole + copied + each * problem.batch


def common(problem: Attention, device: Device) -> float | None:
    """The lower cost of `common_keys` with one call for all batch elements and with one for each."""
    together = common_together(problem, device)
    apart = common_apart(problem, device)
    return together if together is None or apart is None else min(together, apart)


def common_together(problem: Attention, device: Device) -> float | None:
    """torch's attention on the keys that all batch elements share, then our kernel on the others.

    On an H200 912 and 951 us for the two calls of `narrow` above, 34.7 ms of cuDNN's 38.6 at 1x40x32760x128.
    The host takes 110 us.
    """
    if problem.padding is None and not was_measured(device):
        return None
    shared = at_share(
        torch_share(_even(problem), device), _even(problem)._replace(share=problem.common), device
    )
    rest = _rest(problem, device)
    return None if shared is None or rest is None else max(device.fitted(FITTED).together_host, shared + rest)


def common_apart(problem: Attention, device: Device) -> float | None:
    """A call for each batch element on two streams, which hide most of our kernel's and the copies' time.

    On an H200 843 and 859 us for the same two calls. The host takes 150 us a batch element.
    """
    if problem.common == problem.share:
        return None
    whole = at_share(torch_share(_even(problem), device), _even(problem), device)
    rest = _rest(problem, device)
    copied = device.seconds(2 * problem.heads * problem.rows * problem.dim_v * problem.dtype.itemsize)
    if whole is None or rest is None or copied is None:
        return None
    fitted = device.fitted(FITTED)
    return max(fitted.apart_host * problem.batch, whole + fitted.apart * rest + copied)


def _even(problem: Attention) -> Attention:
    """The problem without lengths, its keys rounded up to a multiple of cuDNN's step."""
    return problem._replace(padding=None, keys=-(-problem.keys // STEP) * STEP)


def _rest(problem: Attention, device: Device) -> float | None:
    """Our kernel on keys that are not valid for all batch elements, and on those beyond a multiple of STEP.

    The latter are STEP / 2 on average. The kernel reads q and the output and writes the output once more, at
    0.7 of the bandwidth.
    """
    left = (problem.share - problem.common) * problem.keys // 100 + (
        STEP // 2 if prefers_cudnn(device) else 0
    )
    moved = device.seconds(
        problem.batch
        * problem.heads
        * problem.rows
        * (problem.dim + 2 * problem.dim_v)
        * problem.dtype.itemsize
    )
    fitted, others = device.fitted(FITTED), problem._replace(keys=left, share=100, padding=None)
    added = at_share(fitted.rest * share_of("triton", problem, device), others, device)
    return None if moved is None or added is None else added + fitted.rest_moving * moved


def flash_triton(problem: Attention, device: Device) -> float | None:
    if not was_measured(device) and problem.mask is None and problem.padding is None:
        return None
    kernel = "triton" if problem.mask is None else "triton_mask_over_keys"
    at_work = min(1.0, device.fitted(FITTED).unfilled + filled(problem, device, 128))
    return at_share(share_of(kernel, problem, device) * at_work, problem, device)


def wide(problem: Attention, device: Device) -> float | None:
    if not was_measured(device):
        return None
    return at_share(device.fitted(FITTED).wide * filled(problem, device, 64), problem, device)


def wide_hopper(problem: Attention, device: Device) -> float | None:
    """Parts of the keys fill the card where queries do not; joining them is another launch.

    The host's time is mostly TMA's descriptors.
    """
    fitted = device.fitted(FITTED)
    seconds = at_share(fitted.wide_hopper, problem, device) if device.type == "cuda" else None
    return None if seconds is None else max(fitted.wide_hopper_host, seconds + fitted.wide_hopper_join)
