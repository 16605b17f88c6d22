"""Every configuration that the Triton kernels of attention can be launched with, and what the walkers do not
ask. In Triton's interpreter, on CPU tensors, collected by tests/interpret. float16 only: it is silently wrong
for bfloat16."""

import functools

import pytest
import torch

from turnout.launch import start
from turnout.measure.verify import Verifier, truth
from turnout.ops.attention import ATTENTION, like_queries, valid_keys
from turnout.ops.attention.launches import combine_launch, run_flash

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero encountered"),
    pytest.mark.usefixtures("poison"),
]


def call(rows, keys, dim, causal, lengths, masked, dtype=torch.float16):
    """Grouped heads, [B, S, H, D] in memory, the arguments of the reference."""
    generator = torch.Generator().manual_seed(rows + keys + dim)
    q, k, v = (
        torch.randn(2, n, h, dim, generator=generator).to(dtype).transpose(1, 2)
        for n, h in ((rows, 2), (keys, 1), (keys, 1))
    )
    mask = (torch.rand(2, 1, 1, keys, generator=generator) < 0.6) if masked else None
    ends = torch.tensor([[keys // 3, keys // 4], [0, 0]], dtype=torch.int32) if lengths else None
    return q, k, v, mask, causal, dim**-0.5, ends, []


def run_with(rows, keys, warps=4, stages=1):
    def run(q, k, v, mask, causal, scale, kv_lengths, lengths):
        over_keys = None if mask is None else mask[:, 0, 0]
        return run_flash(q, k, v, over_keys, causal, scale, kv_lengths, rows, keys, warps, stages)

    return run


@pytest.mark.parametrize("keys", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_every_block_size_is_close(rows, keys):
    """More rows and keys than a block, not a multiple of it, and fewer; with all that the kernel knows."""
    for causal, lengths, masked in ((False, False, False), (True, True, True)):
        for length in (rows + 5, 7):
            args = call(length, keys + 9, 24, causal, lengths, masked)
            assert Verifier(ATTENTION, args).mismatch("close", run_with(rows, keys)) is None, (
                length,
                causal,
                lengths,
                masked,
            )


@pytest.mark.parametrize("dim", [5, 16, 72, 257, 320, 512])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 40), (19, 1)])
def test_short_and_odd_lengths(dim, rows, keys):
    assert (
        Verifier(ATTENTION, call(rows, keys, dim, False, False, False)).mismatch("close", run_with(16, 32))
        is None
    )


@pytest.mark.parametrize(
    "lengths", [[[0, 0], [0, 0]], [[99, 0], [40, 99]], [[-3, 2], [5, -1]], [[20, 20], [0, 40]]]
)
def test_lengths_beyond_the_keys_stay_inside_them(lengths):
    """On a GPU lengths are not read before every launch; whatever they hold, only k and v are read, and no
    key counts twice.
    """
    q, k, v, *_ = call(5, 40, 16, False, False, False)
    arguments = torch.tensor(lengths, dtype=torch.int32)
    out = run_flash(q, k, v, None, False, 0.25, arguments, 16, 16, 4, 1)
    at = torch.arange(40)
    expected = ATTENTION.reference(
        q,
        k,
        v,
        ((at < arguments[:, :1]) | (at >= 40 - arguments[:, 1:]))[:, None, None],
        False,
        0.25,
        None,
        [],
    )
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


def test_large_scores_and_fully_masked_queries():
    q, k, v, *_ = call(5, 40, 16, False, False, False)
    args = (200 * q, 200 * k, v, None, False, 0.01, torch.tensor([[40, 0], [0, 0]], dtype=torch.int32), [])
    out = run_with(16, 16)(*args)
    assert Verifier(ATTENTION, args).mismatch("close", run_with(16, 16)) is None
    assert (out[1] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [None, [[9, 3], [0, 0]], [[0, 4], [1, 0]]])
@pytest.mark.parametrize("causal", [False, True])
def test_infinite_scores(causal, lengths, masked):
    """NaN for a query that sees a score of +inf, and for no other: zero where all that it sees is -inf."""
    q, k, v, mask, *_ = call(20, 18, 16, causal, False, masked)
    q[..., 1], k[..., 1] = torch.inf, -1.0
    k[:, :, 12:15, 1] = 1.0
    args = (
        q,
        k,
        v,
        mask,
        causal,
        0.25,
        None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        [],
    )
    at = torch.arange(18)
    sees = torch.ones(2, 1, 20, 18, dtype=torch.bool) if mask is None else mask.expand(2, 1, 20, 18)
    if lengths is not None:
        sees = sees & ((at < args[6][:, :1]) | (at >= 18 - args[6][:, 1:]))[:, None, None]
    if causal:
        sees = sees & (at <= torch.arange(20)[:, None])
    expected = torch.where(sees[..., 12:15].any(-1, keepdim=True), torch.nan, 0.0).expand(q.shape)
    for out in (run_with(16, 16)(*args), *truth(ATTENTION, args)):
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_values_in_padding_do_not_change_the_result():
    q, k, v, *_ = call(5, 40, 16, False, False, False)
    k[:, :, 7:35], v[:, :, 7:35] = torch.nan, torch.nan
    assert (
        run_flash(q, k, v, None, False, 0.25, torch.tensor([[7, 5], [3, 2]]), 16, 16, 4, 1).isfinite().all()
    )


@pytest.mark.parametrize(("step", "apart"), [(1, False), (16, False), (16, True), (64, True)])
@pytest.mark.parametrize(
    "lengths", [[44, 0, 50, 0], [10, 20, 30, 20], [50, 0, 50, 0], [50, 0, 3, 20], [5, 3, 5, 40], []]
)
def test_kernel_continues_from_partial_results(lengths, step, apart, monkeypatch):
    """common-keys, with torch in the place of a vendor's kernel and of streams."""

    def with_sums(q, k, v, scale, cudnn):
        seen.append(k.shape[2])
        scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3) * scale
        out = torch.softmax(scores, 3) @ v.float().repeat_interleave(2, 1)
        return like_queries(out.to(q.dtype), q), torch.logsumexp(scores, 3)

    seen = []
    monkeypatch.setattr(valid_keys, "with_sums", with_sums)
    monkeypatch.setattr(valid_keys, "take_turns", lambda jobs, device: [job() for job in jobs])
    q, k, v, *_ = call(33, 50, 24, False, False, False)
    run = functools.partial(
        valid_keys.common_keys, step=step, apart=apart, rows=16, keys=16, warps=4, stages=1
    )
    assert Verifier(ATTENTION, (q, k, v, None, False, 0.2, None, lengths)).mismatch("close", run) is None
    assert all(keys % step == 0 or keys < step for keys in seen)


def test_partial_results_are_combined():
    """Softmax over all keys out of softmaxes over parts; a part that saw nothing, and rows of which no part
    did.
    """
    parts, maxima, sums = torch.randn(3, 6, 5, 320), torch.randn(3, 6, 5), torch.rand(3, 6, 5) + 1
    maxima[1, 2], sums[1, 2], parts[1, 2] = -torch.inf, 0.0, 0.0
    maxima[:, 3], sums[:, 3], parts[:, 3] = -torch.inf, 0.0, 0.0
    out = torch.empty(2, 5, 3, 320).transpose(1, 2)
    start(combine_launch(parts, maxima, sums, out))
    weights = torch.exp2(maxima - maxima.amax(0).nan_to_num(neginf=0.0))
    expected = (weights[..., None] * parts).sum(0) / (weights * sums).sum(0).clamp(min=1e-30)[..., None]
    torch.testing.assert_close(out, expected.view(2, 3, 5, 320))
