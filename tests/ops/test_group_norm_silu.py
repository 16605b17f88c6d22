"""group_norm_silu on a CPU, where PyTorch's own kernels run: the promise, layouts, writing into a buffer,
gradients, what must raise.
"""

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.ops.group_norm_silu import GROUP_NORM_SILU, GROUP_NORM_SILU_INTO, GroupNormSilu, axes, layout
from turnout.ops.group_norm_silu.cases import inside_border
from turnout.ops.group_norm_silu.guards import MOST_POSITIONS
from turnout.ops.group_norm_silu.launches import (
    Norm,
    RowTile,
    block_of,
    gapped_plan,
    is_one_walk,
    parts_of,
    reciprocal,
)
from turnout.ops.group_norm_silu.padded import GROUP_NORM_SILU_PAD
from turnout.ops.rms_norm_silu.cases_into import behind_cache
from turnout.routing.device import Device

H200 = Device.named("h200")
FORMATS = {"rows": torch.channels_last, "planes": torch.contiguous_format}
formats = pytest.mark.parametrize("kind", FORMATS)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_torchs_group_norm_in_the_format_of_x(kind, dtype):
    x = torch.randn(2, 12, 5, 7).to(dtype).contiguous(memory_format=FORMATS[kind])
    weight, bias = torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    actual = turnout.group_norm_silu(x, 4, weight, bias, eps=1e-6)
    assert torch.equal(actual, F.silu(F.group_norm(x, 4, weight, bias, 1e-6)))
    assert actual.stride() == x.stride()
    plain = turnout.group_norm_silu(x, 4, weight.float(), bias.float(), eps=1e-6, silu=False)
    assert plain.dtype is dtype


@pytest.mark.parametrize("shape", [(2, 6, 0), (2, 6, 3, 0), (0, 6, 4), (0, 6), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_elements_gradients_are_zero(shape, dtype):
    """torch 2.13 has NaN for the weight's gradient, torch 2.15 raises."""
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    weight, bias = (torch.ones(shape[1], requires_grad=True) for _ in range(2))
    y = turnout.group_norm_silu(x, 3, weight, bias)
    assert (y.shape, y.dtype, y.stride()) == (x.shape, dtype, x.stride())
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(weight.grad, torch.zeros(shape[1]))
    assert torch.equal(bias.grad, torch.zeros(shape[1]))
    out = torch.empty(shape, dtype=dtype)
    assert turnout.group_norm_silu(x.detach(), 3, out=out) is out


@formats
def test_routes_on_a_gpu_take_both_formats(kind):
    x = torch.randn(1, 64, 8, 8).bfloat16().contiguous(memory_format=FORMATS[kind])
    problem = GROUP_NORM_SILU.problem(x, 32, None, None, 1e-6, True)
    assert layout(problem) == kind
    verdict = GROUP_NORM_SILU.verdict(GROUP_NORM_SILU.key((x, 32, None, None, 1e-6, True)), H200)
    assert not verdict.refused.get(kind)
    assert verdict.refused.get({"rows": "planes", "planes": "rows"}[kind])


def test_layout_tells_planes_from_rows():
    def kind(x, out=None):
        return layout(GroupNormSilu.of(x, 2, None, None, 1e-6, True, out))

    x = torch.randn(2, 4, 3, 5, 6)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert kind(x) == "planes"
    assert kind(last) == "rows"
    assert kind(x, last) == "strided"
    assert kind(x, behind_cache(x)) == "planes"
    assert kind(last, behind_cache(last)) == "rows"
    assert kind(last[:, :, :, 1:]) == "gapped-rows"
    assert kind(last, inside_border(last)) == "gapped-rows"
    assert kind(last[:, :, 0], inside_border(last[:, :, 0])) == "gapped-rows"  # a picture
    assert kind(x, inside_border(last)) == "strided"
    deep = torch.randn(1, 3, 3, 3, 3, 4).movedim(-1, 1)
    assert kind(deep, inside_border(deep)) == "strided"  # four dimensions with gaps
    assert kind(x[..., :1, :1, :1]) == "planes"


def test_block_and_parts_fill_a_gpu():
    assert block_of(128, 32, 64) == (16, 4, 2)
    assert block_of(96, 32, 64) == (16, 4, 2)  # groups of 3 in columns of 4
    assert block_of(6, 1, 64) == (1, 8, 1)
    assert parts_of(1000, 132) == 128
    assert parts_of(3, 132) == 2
    assert parts_of(5, 0) == 1


def test_axes_fold_where_neither_tensor_has_gaps():
    def sizes(x, out, padding=()):
        result = axes(x.shape, x.stride(), out.stride(), padding)
        return None if result is None else [axis.size for axis in result]

    x = torch.randn(2, 3, 5, 6, 4).movedim(-1, 1)
    assert sizes(x, x) == [1, 1, 90]
    assert sizes(x, inside_border(x)) == [3, 5, 6]
    assert sizes(x, inside_border(x, edge=0)) == [1, 1, 90]  # frames in front of it only
    assert sizes(x[:, :, 1:], x[:, :, :2]) == [1, 1, 60]
    assert sizes(x[..., 1:, :], x[..., :4, :]) == [1, 3, 24]
    assert sizes(x[..., 1:], x[..., :5]) == [1, 15, 5]
    assert sizes(x.transpose(2, 3), x.transpose(2, 3)) == [1, 1, 90]
    deep = torch.randn(1, 3, 3, 3, 3, 4).movedim(-1, 1)
    assert sizes(deep, inside_border(deep)) is None
    assert sizes(deep[..., :2], deep[..., 1:]) == [1, 27, 2]


def test_is_one_walk_tells_rows_that_follow_each_other():
    assert is_one_walk([30, 6, 2], [4, 5, 3])
    assert is_one_walk([0, 0, 2], [1, 1, 3])
    assert not is_one_walk([40, 6, 2], [4, 5, 3])
    assert not is_one_walk([0, 8, 2], [1, 5, 3])


@pytest.mark.parametrize(
    "divisor", [1, 2, 3, 5, 7, 16, 120, 962, 46341, 2**16 + 1, 2**30 - 1, 2**30, 2**31 - 1]
)
def test_reciprocals_divide_all_numbers_of_31_bits(divisor):
    magic, shift = reciprocal(divisor)
    assert 2**31 <= magic < 2**32
    last = 2**31 - 1
    near = [k * divisor + i for k in (1, 2, 3, last // divisor // 2, last // divisor) for i in (-1, 0, 1)]
    for n in (0, 1, last - 1, last, *(n for n in near if 0 <= n <= last)):
        assert (2 * n * magic >> 32) >> shift == n // divisor


def test_a_plan_past_2_31_elements_has_steps_of_64_bits():
    """HunyuanVideo's widest norm: kernels get the steps as they are, and positions that 32 bits hold."""
    shape = (1, 256, 33, 544, 960)
    out_strides = (35 * 546 * 962 * 256, 1, 546 * 962 * 256, 962 * 256, 256)
    strides = (33 * 544 * 960 * 256, 1, 544 * 960 * 256, 960 * 256, 256)
    norm = Norm(shape, strides, out_strides, groups=32, itemsize=2, off=0, units=132)
    plan = gapped_plan(norm, RowTile(walks=24))
    _, programs, numbers, constants = plan.apply
    size, walked, _, _, blocks, each, *far = numbers
    assert size == walked == 33 * 544 * 960 < MOST_POSITIONS
    assert far[:8] == [strides[0], *strides[2:], out_strides[0], *out_strides[2:]]
    assert max(far) > 2**31
    assert programs == blocks * each
    assert constants["X_ROWS"]
    assert not constants["Y_ROWS"]


def test_more_positions_than_kernels_count_are_refused():
    shape = (1, 2, 2**15, 2**15)
    x = torch.empty(shape, device="meta").to(memory_format=torch.channels_last)
    out = torch.empty(1, 2**15, 2**15 + 1, 2, device="meta").movedim(-1, 1)[..., 1:]
    refused = turnout.explain(GROUP_NORM_SILU_INTO, x, 2, None, None, out, 1e-6, True, device="h200").refused
    assert refused["gapped-rows"] == [f"{2**30} positions, this route needs fewer than {2**30}"]


def test_into_the_inside_of_a_border():
    """HunyuanVideo's call: answered by the route on a card, and by the reference here, which leaves the
    border alone.
    """
    x, weight, bias = (
        torch.randn(1, 12, 2, 3, 4).contiguous(memory_format=torch.channels_last_3d),
        torch.randn(12),
        torch.randn(12),
    )
    out = inside_border(x)
    assert turnout.group_norm_silu(x, 4, weight, bias, out=out) is out
    torch.testing.assert_close(out, turnout.group_norm_silu(x, 4, weight, bias))
    whole = out._base
    out.zero_()
    assert not whole.any()
    frames = torch.empty(1, 128, 33, 544, 960, dtype=torch.bfloat16, device="meta")
    frames = frames.contiguous(memory_format=torch.channels_last_3d)
    weights = torch.empty(128, dtype=torch.bfloat16, device="meta")
    for argument in (frames, inside_border(frames)):
        verdict = turnout.explain(
            turnout.group_norm_silu, argument, 32, weights, weights, out=inside_border(frames), device="h200"
        )
        assert verdict.chosen == "gapped-rows"
    assert (
        turnout.explain(turnout.group_norm_silu, inside_border(frames), 32, device="h200").chosen
        == "gapped-rows"
    )


def test_out_is_filled_and_returned():
    x, weight = torch.randn(1, 8, 2, 3, 4), torch.randn(8)
    out = behind_cache(x)
    assert turnout.group_norm_silu(x, 2, weight, out=out) is out
    torch.testing.assert_close(out, turnout.group_norm_silu(x, 2, weight))
    assert torch.equal(out._base[:, :, :2], torch.zeros(1, 8, 2, 3, 4))


def test_gradients_pass_gradcheck():
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4, 3), (4,), (4,))
    )
    assert torch.autograd.gradcheck(
        lambda x, w, b: GROUP_NORM_SILU.opaque(x, 2, w, b, 1e-5, True), (x, weight, bias)
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_forward_derivatives(layout):
    x, direction = torch.randn(2, 1, 8, 3, 4, 5).unbind()
    weight, bias = torch.randn(2, 8).unbind()
    expected = torch.func.jvp(lambda x: F.silu(F.group_norm(x, 4, weight, bias)), (x,), (direction,))
    given = x.to(memory_format=layout), direction.to(memory_format=layout)
    found = torch.func.jvp(
        lambda x: turnout.group_norm_silu(x, 4, weight, bias, eps=1e-5), given[:1], given[1:]
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_call_with_out_under_fullgraph():
    x, weight = torch.randn(1, 8, 2, 3, 4), torch.randn(8)

    def step(x, buffer):
        turnout.group_norm_silu(x, 2, weight, out=buffer[:, :, 2:])
        return buffer * 2

    buffers = [torch.zeros(1, 8, 4, 3, 4) for _ in range(2)]
    actual = torch.compile(step, fullgraph=True, backend="aot_eager")(x, buffers[0])
    torch.testing.assert_close(actual, step(x, buffers[1]))


@pytest.mark.parametrize("mode", ["replicate", "reflect", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@formats
def test_with_a_border_is_torchs_pad_in_the_format_of_x(kind, dtype, mode):
    x = torch.randn(2, 12, 5, 7).to(dtype).contiguous(memory_format=FORMATS[kind])
    weight, bias = torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    for padding in ((1, 1, 2, 0), (3, 4), ()):
        full = (*padding, *[0] * (4 - len(padding)))
        expected = F.pad(F.silu(F.group_norm(x, 4, weight, bias, 1e-6)), full, mode)
        y = turnout.group_norm_silu_pad(x, 4, weight, bias, padding=padding, mode=mode, eps=1e-6)
        assert torch.equal(y, expected)
        assert y.is_contiguous(memory_format=FORMATS[kind])


def test_gradients_pass_the_border():
    x, weight = (
        torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True),
        torch.randn(4, dtype=torch.float64),
    )
    for mode in ("replicate", "reflect", "constant"):
        args = (2, weight, None, 1e-5, True, [1, 1, 2, 0], mode)
        assert torch.autograd.gradcheck(lambda x, args=args: GROUP_NORM_SILU_PAD.opaque(x, *args), (x,))


def test_hunyuans_border_is_written_by_the_route():
    """Also of an x that is the inside of a buffer itself, and where no batch or no channels are there to
    normalise.
    """
    x = torch.empty(1, 128, 33, 544, 960, dtype=torch.bfloat16, device="meta")
    x = x.contiguous(memory_format=torch.channels_last_3d)
    for argument in (x, inside_border(x)):
        verdict = turnout.explain(
            turnout.group_norm_silu_pad, argument, 32, padding=(1, 1, 1, 1, 2, 0), device="h200"
        )
        assert verdict.chosen == "gapped-rows"
    first = turnout.explain(
        turnout.group_norm_silu_pad, x.contiguous(), 32, padding=(1, 1, 1, 1, 2, 0), device="h200"
    )
    assert "side by side" in first.refused["gapped-rows"][0]


def test_empty_inputs_get_a_border():
    empty = torch.zeros(2, 4, 0)
    assert torch.equal(
        turnout.group_norm_silu_pad(empty, 2, padding=(1, 2), mode="constant"), torch.zeros(2, 4, 3)
    )
    assert turnout.group_norm_silu_pad(empty[:0], 2, padding=(1, 2), mode="constant").shape == (0, 4, 3)


def test_a_call_with_a_border_under_fullgraph():
    x, weight = torch.randn(1, 8, 2, 3, 4), torch.randn(8)

    def step(x):
        return turnout.group_norm_silu_pad(x, 2, weight, padding=(1, 1, 1, 1, 2, 0)) * 2

    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))


X = torch.zeros(2, 4, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turnout.group_norm_silu(X.int(), 2), "floating-point"),
        (lambda: turnout.group_norm_silu(X[0, 0], 2), "floating-point"),
        (lambda: turnout.group_norm_silu(X, 3), "4 channels in 3 groups"),
        (lambda: turnout.group_norm_silu(X, 2, torch.ones(5)), r"it needs to be \[4\]"),
        (lambda: turnout.group_norm_silu(X, 2, out=torch.zeros(2, 4, 6)), "out is"),
        (lambda: turnout.group_norm_silu_pad(X[..., 0], 2, padding=()), r"it needs to be \[B, C, W\]"),
        (
            lambda: turnout.group_norm_silu_pad(X, 2, padding=(1, 1), mode="circular"),
            "mode is 'circular', it needs to be one of",
        ),
        (
            lambda: turnout.group_norm_silu_pad(X, 2, padding=(1,)),
            r"padding is \[1\], it needs to be numbers from 0 on",
        ),
        (lambda: turnout.group_norm_silu_pad(X, 2, padding=(1, 1, 1, 1)), r"padding is \[1, 1, 1, 1\]"),
        (lambda: turnout.group_norm_silu_pad(X, 2, padding=(-1, 1)), r"padding is \[-1, 1\]"),
        (lambda: turnout.group_norm_silu_pad(X, 2, padding=(5, 1), mode="reflect"), "smaller than its size"),
    ],
)
def test_mismatched_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
