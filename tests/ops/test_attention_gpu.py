"""attention on a real GPU: every configuration of the kernels, wide heads, padding that nobody reads twice,
memory, big offsets.
"""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.measure.tune import peak_mib
from turnout.measure.verify import Verifier
from turnout.ops.attention import ATTENTION, padding
from turnout.ops.attention.launches import run_flash, run_wide_hopper
from turnout.routing.device import Device

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def tensors(batch, heads, kv_heads, rows, keys, dim, dtype=torch.bfloat16, inside=False):
    generator = torch.Generator(GPU).manual_seed(rows + keys + dim)

    def one(count, length):
        x = torch.randn(batch, length, count, dim, dtype=dtype, device=GPU, generator=generator).transpose(
            1, 2
        )
        return x if inside else x.contiguous()

    return one(heads, rows), one(kv_heads, keys), one(kv_heads, keys)


def mismatch(run, q, k, v, mask=None, causal=False, kv_lengths=None):
    args = (q, k, v, mask, causal, q.shape[3] ** -0.5, kv_lengths, [])
    return Verifier(ATTENTION, args).mismatch("close", run)


def hopper():
    return Device.of(GPU).capability == (9, 0)


@pytest.mark.parametrize(("warps", "stages"), [(4, 3), (8, 2)])
@pytest.mark.parametrize("keys", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_every_block_size_is_close(rows, keys, warps, stages):
    q, k, v = tensors(2, 4, 2, 150, 333, 64, inside=True)
    ends = torch.tensor([[100, 77], [0, 0]], dtype=torch.int32, device=GPU)

    def run(q, k, v, mask, causal, scale, kv_lengths, lengths):
        return run_flash(q, k, v, None, causal, scale, kv_lengths, rows, keys, warps, stages)

    assert mismatch(run, q, k, v, causal=True, kv_lengths=ends) is None


@pytest.mark.parametrize("dim", [16, 40, 72, 96, 128, 160, 256])
@pytest.mark.parametrize("masked", [False, True])
def test_usual_head_dims(dim, masked):
    q, k, v = tensors(2, 2, 2, 77, 200, dim)
    mask = (torch.rand(2, 1, 1, 200, device=GPU) < 0.5) if masked else None
    assert mismatch(ATTENTION.routes["flash-triton"].run, q, k, v, mask) is None


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(
    ("shape", "causal", "inside"),
    [
        ((1, 1, 1, 1000, 1000, 512), False, False),
        ((2, 4, 2, 200, 333, 512), False, True),
        ((1, 3, 3, 65, 777, 320), True, True),
        ((2, 2, 1, 300, 40, 384), True, False),
        ((1, 1, 1, 1, 129, 264), False, False),
        ((1, 1, 1, 64, 1, 448), False, False),
    ],
)
def test_wide_heads_on_hopper(shape, causal, inside, splits):
    if not hopper():
        assert refused_elsewhere(shape)
        return

    def run(q, k, v, mask, causal, scale, kv_lengths, lengths):
        return run_wide_hopper(q, k, v, causal, scale, splits)

    for dtype in (torch.bfloat16, torch.float16):
        assert mismatch(run, *tensors(*shape, dtype=dtype, inside=inside), causal=causal) is None


def refused_elsewhere(shape):
    problem = ATTENTION.problem(*ATTENTION.arguments(*tensors(*shape)))
    return any(
        "needs 9.0" in why for why in ATTENTION.routes["wide-head-hopper"].refuses(problem, Device.of(GPU))
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("splits", [0, 1, 2])
def test_infinite_scores(splits, causal):
    """NaN for a query that sees a score of +inf, zero where all that it sees is -inf.

    0 splits: the kernel in plain Triton.
    """
    shape = (1, 2, 1, 270, 300, 320)
    if splits and not hopper():
        assert refused_elsewhere(shape)
        return
    q, k, v = tensors(*shape)
    q[:, 1, ::2, 5], k[..., 5], k[:, :, 200, 5] = torch.inf, -1.0, 1.0
    actual = (
        run_wide_hopper(q, k, v, causal, 0.05, splits)
        if splits
        else run_flash(q, k, v, None, causal, 0.05, None, 64, 32, 8, 1)
    )
    infinite = torch.zeros(1, 2, 270, 1, dtype=torch.bool, device=GPU)
    infinite[:, 1, ::2] = True
    lost = infinite & (torch.arange(270, device=GPU) >= (200 if causal else 0))[:, None]
    assert torch.equal(actual.isnan(), lost.expand(actual.shape))
    assert torch.equal(actual == 0, (infinite & ~lost).expand(actual.shape))


def test_a_view_that_starts_anywhere():
    """TMA needs addresses that are multiples of 16 bytes.

    So does torch's own kernel, which raises, hence the comparison with a copy.
    """
    q, k, v = tensors(1, 1, 1, 200, 300, 512)
    shifted = torch.cat([k.new_zeros(3), k.flatten()])[3:].view(k.shape)
    with turnout.pin(attention="wide-head-hopper" if hopper() else "wide-head"):
        assert torch.equal(turnout.attention(q, shifted, v), turnout.attention(q, k, v))


def test_lengths_are_read_once():
    q, k, v = tensors(2, 4, 4, 100, 100, 64)
    lengths = torch.tensor([30, 100], device=GPU)
    mask = (torch.arange(100, device=GPU) < lengths[:, None])[:, None, None]
    expected = turnout.attention(q, k, v, kv_lengths=[30, 100])
    for kwargs in ({"kv_lengths": lengths}, {"mask": mask}):
        torch.testing.assert_close(turnout.attention(q, k, v, **kwargs), expected)
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = turnout.attention(q, k, v, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(actual, expected)
    lengths[0] = 50
    torch.testing.assert_close(
        turnout.attention(q, k, v, kv_lengths=lengths), turnout.attention(q, k, v, kv_lengths=[50, 100])
    )


def test_lengths_that_only_the_device_knows():
    """While a graph is captured nothing is read: the kernel does, and sees what is there at each replay."""
    q, k, v = tensors(2, 4, 4, 100, 100, 64)
    lengths = torch.tensor([30, 100], device=GPU)
    padding._kept.clear()
    with turnout.pin(attention="flash-triton"):
        ATTENTION(
            q, k, v, None, False, 0.125, torch.tensor([[30, 0], [100, 0]], device=GPU), []
        )  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = turnout.attention(q, k, v, kv_lengths=lengths)
    for argument in ([30, 100], [7, 64]):
        lengths.copy_(torch.tensor(argument))
        graph.replay()
        torch.testing.assert_close(
            actual, turnout.attention(q, k, v, kv_lengths=argument), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize("lengths", [[[20, 256], [64, 256]], [300, 320]])
def test_two_streams_leave_nothing_behind(lengths):
    """Calls on two streams with inputs freed and overwritten at once, NaN in the padding, and a graph."""
    q, k, v = tensors(2, 4, 4, 300, 320, 128)
    args = ATTENTION.arguments(q, k, v, kv_lengths=lengths)
    route = ATTENTION.routes["common-keys"]
    config = next(c for c in route.configs(ATTENTION.problem(*args), Device.of(GPU)) if c["apart"])
    assert Verifier(ATTENTION, args).mismatch("close", functools.partial(route.run, **config)) is None

    def run(*tensors):
        return route.run(*tensors, *args[3:], **config)

    expected = run(q, k, v)
    for _ in range(20):
        copies = [x.clone() for x in (q, k, v)]
        out = run(*copies)
        del copies
        for x in [torch.empty_like(q) for _ in range(6)]:
            x.fill_(torch.nan)
        assert torch.equal(out, expected)
    padded = ~padding.valid_key_mask(args[-1], None, 2, 320, GPU)[:, None, :, None]
    assert torch.equal(run(q, k.masked_fill(padded, torch.nan), v.masked_fill(padded, torch.nan)), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, k, v)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                actual = run(q, k, v)
                torch.cuda.current_stream().synchronize()
                wrong.extend([] if torch.equal(actual, expected) else [actual])

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("keys", [129, 200, 255, 333])
def test_uneven_key_counts(keys, inside):
    """Without lengths too: a vendor's kernel on a multiple of 128 keys, ours on the rest."""
    q, k, v = tensors(2, 4, 2, 150, keys, 128, inside=inside)
    args = ATTENTION.arguments(q, k, v)
    route, device = ATTENTION.routes["common-keys"], Device.of(GPU)
    assert not any(route.refuses(ATTENTION.problem(*args), device))
    for config in route.configs(ATTENTION.problem(*args), device):
        assert (
            Verifier(ATTENTION, args).mismatch(
                "close", functools.partial(route.run, **{**config, "step": 128})
            )
            is None
        )


def test_memory_is_the_output_and_a_constant():
    q, k, v = tensors(1, 1, 1, 16384, 16384, 512)
    output = q.numel() * q.element_size() / 2**20
    turnout.attention(q, k, v)
    assert peak_mib(turnout.attention, (q, k, v)) < output + 1
    q, k, v = tensors(2, 8, 8, 8192, 8192, 128)
    output = q.numel() * q.element_size() / 2**20
    assert peak_mib(lambda *x: turnout.attention(*x, kv_lengths=[8000, 8192]), (q, k, v)) < 2 * output + 32


def test_backward_of_a_wide_head_keeps_no_scores():
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 1, 16384, 16384, 512))
    theirs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    F.scaled_dot_product_attention(*theirs).square().sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    turnout.attention(q, k, v).square().sum().backward()
    assert (
        torch.cuda.max_memory_allocated() - before
    ) / 2**20 < 400  # all scores would be 512 MiB in bfloat16
    for x, y in zip((q, k, v), theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["flash-triton", "wide-head"])
def test_tensors_of_more_than_2_31_elements(name):
    """Keys behind 2^31 elements: only the last 64 count."""
    dim, keys = (256, 2**23 + 100) if name == "flash-triton" else (264, 2**23)
    q = torch.randn(1, 1, 32, dim, dtype=torch.bfloat16, device=GPU)
    k = torch.zeros(1, 1, keys, dim, dtype=torch.bfloat16, device=GPU)
    k[:, :, -64:] = torch.randn(64, dim, dtype=torch.bfloat16, device=GPU)
    with turnout.pin(attention=name):
        actual = turnout.attention(q, k, k, kv_lengths=[[0, 64]])
    last = k[:, :, -64:].clone(
        memory_format=torch.contiguous_format
    )  # torch's kernels do not take a stride beyond 2^31
    torch.testing.assert_close(actual, F.scaled_dot_product_attention(q, last, last), rtol=2e-2, atol=2e-2)
