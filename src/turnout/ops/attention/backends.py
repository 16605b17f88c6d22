"""torch's own kernels for attention, called by name: what each takes, and the call itself.

The aten ops are called directly. `torch.nn.attention.sdpa_kernel` would set flags of the whole thread around
every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from turnout.ops import needs
from turnout.ops.attention import Attention, like_queries
from turnout.ops.attention.costs import HALF
from turnout.routing.device import Device
from turnout.routing.outputs import returns_own

aten = torch.ops.aten


def refuses(
    problem: Attention, device: Device, *, widest: int, dtypes: tuple[torch.dtype, ...] = HALF
) -> Iterator[str]:
    """Reasons why none of torch's fused kernels can take a problem."""
    if device.type != "cuda":
        yield f"device {device.name}, this route needs a GPU"
    yield from needs.needs_dtype(problem.dtype, *dtypes)
    if problem.mask is not None or problem.padding is not None:
        yield "some keys do not count, this route needs all of them to"
    if 0 in (problem.batch, problem.rows, problem.keys):
        yield "nothing to attend to, this route needs at least one query and one key"
    for dim in {problem.dim, problem.dim_v}:
        if dim > widest or dim % 8 or not dim:
            yield f"head dim {dim}, this route needs a multiple of 8 up to {widest}"
    if any(strides[3] != 1 for strides in problem.strides):
        yield "elements of a head that are not side by side, this route needs a last stride of 1"


def refuses_cudnn(problem: Attention, device: Device) -> Iterator[str]:
    yield from refuses(problem, device, widest=128)
    if device.backend == "hip":
        yield f"device {device.name}, this route needs an NVIDIA GPU"
    if device.capability is not None and device.capability[0] not in (8, 9, 10):
        yield (
            f"compute capability {device.capability[0]}.{device.capability[1]}, "
            "this route needs 8.x, 9.x or 10.x"
        )
    if problem.keys == 1:
        yield "one key, this route needs more"


def refuses_flash(problem: Attention, device: Device) -> Iterator[str]:
    yield from refuses(problem, device, widest=256)
    if device.capability is not None and device.capability < (8, 0):
        yield (
            f"compute capability {device.capability[0]}.{device.capability[1]}, this route needs 8.0 or newer"
        )
    if problem.dim != problem.dim_v:
        yield f"head dims {problem.dim} and {problem.dim_v}, this route needs equal ones"
    yield from needs_square_causal(problem)


def refuses_efficient(problem: Attention, device: Device) -> Iterator[str]:
    yield from refuses(problem, device, widest=2**16, dtypes=(*HALF, torch.float32))
    if problem.heads != problem.kv_heads:
        yield f"{problem.heads} heads of q and {problem.kv_heads} of k, this route needs as many"


def refuses_flash_attention(problem: Attention, device: Device, *, package: str) -> Iterator[str]:
    """FlashAttention 3 and 4: Hopper and newer."""
    if not device.has(package):
        yield f"{package} is not installed, this route needs it"
    yield from refuses_flash(problem, device)
    if device.capability is None or device.capability[0] not in (9, 10):
        yield f"device {device.name}, this route needs compute capability 9.x or 10.x"


def refuses_math(problem: Attention, device: Device) -> Iterator[str]:
    # Half types are computed in float32; in float32 itself the error would exceed `close`.
    yield from needs.needs_dtype(problem.dtype, *HALF)
    if problem.padding is not None or problem.mask == "float":
        yield "keys that do not count for all, this route needs all keys or a boolean mask"
    scores = problem.batch * problem.heads * problem.rows * problem.keys
    if scores > 2**24:
        yield f"{scores} scores, this route needs at most {2**24}, as it writes them down"


def needs_square_causal(problem: Attention) -> Iterator[str]:
    if problem.causal and problem.rows != problem.keys:
        yield f"causal with {problem.rows} queries and {problem.keys} keys, this route needs as many"


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return like_queries(
        aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, causal, False, scale=scale)[0], q
    )


def by_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return like_queries(
        aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0], q
    )


def by_efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return like_queries(
        aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0, causal, scale=scale)[0], q
    )


def with_sums(q: Tensor, k: Tensor, v: Tensor, scale: float, cudnn: bool) -> tuple[Tensor, Tensor]:
    """The output and the logarithms of its sums of exponentials, float32 [B, H, S], by cuDNN or by flash."""
    if cudnn:
        out, sums, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False, False, scale=scale
        )
    else:
        out, sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return like_queries(out, q), sums.reshape(q.shape[:3])


def by_flash_attention_3(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    from flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    return _output(
        flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal), q
    )


def by_flash_attention_4(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    return _output(
        flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal), q
    )


@returns_own
def _output(result: Tensor | tuple[Tensor, ...], q: Tensor) -> Tensor:
    """The output alone: some versions return sums with it."""
    return like_queries((result if isinstance(result, Tensor) else result[0]).transpose(1, 2), q)


def by_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    lengths: list[int],
) -> Tensor:
    """Attention in three steps, which writes all scores to memory: for short sequences."""
    if mask is not None:
        if causal:
            mask = mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
    alone, grouped = causal and mask is None, bool(q.shape[1] != k.shape[1])
    return like_queries(
        aten._scaled_dot_product_attention_math(q, k, v, mask, 0.0, alone, scale=scale, enable_gqa=grouped)[
            0
        ],
        q,
    )


def on_all_keys(run: Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]) -> Callable[..., Tensor]:
    """A route by a kernel that takes neither a mask nor lengths: `run(q, k, v, causal, scale)`."""

    def route(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        kv_lengths: Tensor | None,
        lengths: list[int],
    ) -> Tensor:
        return run(q, k, v, causal, scale)

    return route
