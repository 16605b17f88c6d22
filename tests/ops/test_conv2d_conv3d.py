"""conv2d and conv3d on a Device.of("cpu"): every route against float64, torch's semantics to the letter,
strides, gradients, choices.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.walk import equal, random_call
from turnout.measure.verify import Verifier
from turnout.ops.conv2d import CONV2D
from turnout.ops.conv3d import CONV3D
from turnout.ops.convolution import problem as shared
from turnout.ops.convolution.layout import dense_strides, in_format, torch_format
from turnout.routing.device import Device, assumed
from turnout.routing.op import OPS

ONE_DNN = frozenset([torch.float32, torch.bfloat16])  # with AVX-512
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
TORCH = {"conv2d": F.conv2d, "conv3d": F.conv3d}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def routes_on_cpu(op, args):
    """Every route that takes these arguments here, in every configuration: (name, numerics, run)."""
    problem = op.problem(*args)
    for route in op.routes.values():
        if not any(route.refuses(problem, Device.of("cpu"))):
            for config in route.configs(problem, Device.of("cpu")):
                yield route.name, route.numerics, functools.partial(route.run, **config)


def made(shape, weight, dtype=torch.float32, layout="first", bias=True):
    x, w = torch.randn(shape), torch.randn(weight) / 8
    if layout == "last":
        x, w = (t.contiguous(memory_format=LAST[t.dim()]) for t in (x, w))
    return x.to(dtype), w.to(dtype), torch.randn(weight[0]).to(dtype) if bias else None


def keeps_promises(op, *args, least=("reference",), **kwargs):
    """All routes that take a call are right, and those in `least` are among them."""
    args = op.arguments(*args, **kwargs)
    trial, selected = Verifier(op, args), ["reference"]
    for name, numerics, run in routes_on_cpu(op, args):
        assert trial.mismatch(numerics, run) is None, name
        selected.append(name)
    assert set(least) <= set(selected), selected


# shape, weight, what else, and the routes that must take it in float32
CONV3D_CALLS = [
    *(
        ((1, 5, 11, 6, 7), (4, 5, depth, 3, 3), {"padding": (depth // 2, 1, 1)}, ["depth-taps"])
        for depth in (2, 3, 5, 7, 9)
    ),
    ((1, 6, 4, 7, 7), (5, 6, 1, 3, 3), {"padding": (0, 1, 1)}, ["channels-last", "winograd"]),
    ((3, 6, 4, 5, 6), (7, 6, 3, 1, 1), {"padding": (1, 0, 0)}, ["depth-taps", "depth-chunks"]),
    ((2, 4, 7, 5, 5), (6, 4, 3, 3, 3), {"stride": (2, 1, 1), "padding": 1}, ["depth-taps", "depth-chunks"]),
    (
        (2, 4, 8, 5, 5),
        (6, 4, 3, 3, 3),
        {"dilation": (2, 1, 1), "padding": (2, 1, 1)},
        ["depth-taps", "depth-chunks", "winograd"],
    ),
    (
        (2, 4, 9, 6, 6),
        (6, 4, 3, 3, 3),
        {"stride": (3, 2, 1), "padding": (2, 1, 0), "dilation": (2, 1, 2)},
        ["depth-taps", "depth-chunks"],
    ),
    ((3, 8, 4, 5, 5), (8, 2, 3, 3, 3), {"groups": 4, "padding": 1}, ["depth-taps", "channels-last"]),
    ((1, 6, 4, 5, 5), (12, 1, 3, 3, 3), {"groups": 6, "padding": 1}, ["depth-taps", "channels-last"]),
    ((1, 3, 3, 6, 6), (1, 3, 3, 3, 3), {"padding": 1}, ["depth-taps", "winograd"]),
    ((2, 7, 3, 4, 5), (9, 7, 1, 1, 1), {}, ["pointwise"]),
    ((2, 7, 4, 5, 5), (9, 7, 1, 1, 1), {"stride": (1, 2, 3)}, ["pointwise"]),
    ((2, 7, 3, 4, 5), (9, 7, 1, 1, 1), {"padding": (1, 2, 1)}, ["pointwise"]),
    ((2, 7, 3, 4, 5), (9, 7, 1, 1, 1), {"padding": (1, 2, 1), "stride": 2}, ["pointwise"]),
    ((1, 4, 2, 5, 5), (3, 4, 3, 3, 3), {"padding": (3, 1, 1)}, []),  # outputs that see nothing but padding
]
CONV2D_CALLS = [
    ((3, 5, 9, 8), (7, 5, 3, 3), {"padding": 1}, ["channels-last", "winograd"]),
    ((1, 5, 9, 8), (7, 5, 3, 3), {"padding": (0, 2)}, ["channels-last", "winograd"]),
    ((1, 4, 9, 9), (6, 4, 3, 3), {"stride": 2, "padding": 1}, ["channels-last"]),
    ((1, 4, 9, 9), (6, 4, 5, 3), {"dilation": (1, 2), "padding": 2}, ["channels-last"]),
    ((2, 6, 5, 5), (6, 1, 3, 3), {"groups": 6, "padding": 1}, ["channels-last"]),
    ((2, 6, 5, 5), (9, 2, 3, 3), {"groups": 3}, ["channels-last"]),
    ((1, 1, 7, 7), (5, 1, 3, 3), {"padding": 1}, ["channels-last", "winograd"]),
    ((2, 5, 6, 7), (3, 5, 1, 1), {}, ["pointwise"]),
    ((2, 5, 6, 7), (3, 5, 1, 1), {"stride": (3, 2), "padding": (2, 1)}, ["pointwise"]),
]
CALLS = [(CONV3D, *call) for call in CONV3D_CALLS] + [(CONV2D, *call) for call in CONV2D_CALLS]
calls = pytest.mark.parametrize(
    ("op", "shape", "weight", "arguments", "least"),
    CALLS,
    ids=[f"{op.name}-{s}-{w}-{g}".replace(" ", "") for op, s, w, g, _ in CALLS],
)


@calls
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_route_keeps_its_promise_in_float32(op, shape, weight, arguments, least, layout, bias):
    keeps_promises(
        op,
        *made(shape, weight, layout=layout, bias=bias),
        **arguments,
        least=least if layout == "first" else [],
    )


@calls
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_route_keeps_its_promise_in_half_types(op, shape, weight, arguments, least, dtype):
    seen_everywhere = "padding" not in arguments or least
    keeps_promises(
        op,
        *made(shape, weight, dtype),
        **arguments,
        least=["upcast"] if seen_everywhere and "pointwise" not in least else [],
    )


LONG_SUMS = [
    (CONV3D, (1, 32, 4, 12, 16), (16, 32, 3, 3, 3), ["winograd", "depth-taps"]),
    (CONV3D, (1, 96, 4, 12, 16), (16, 96, 3, 3, 3), ["winograd"]),
    (CONV3D, (1, 192, 2, 8, 9), (16, 192, 3, 3, 3), ["winograd", "one-dnn"]),
    (CONV3D, (1, 96, 6, 40, 16), (8, 96, 3, 3, 3), ["winograd", "depth-taps", "depth-chunks"]),
    (CONV3D, (2, 256, 3, 8, 8), (8, 256, 3, 3, 3), ["winograd", "depth-taps"]),
    (CONV2D, (1, 128, 24, 20), (16, 128, 3, 3), ["winograd"]),
    (CONV2D, (1, 512, 6, 6), (16, 512, 3, 3), ["winograd", "one-dnn"]),
    (CONV2D, (1, 144, 20, 20), (64, 144, 1, 1), ["pointwise"]),
    (CONV2D, (3, 32, 8, 8), (64, 32, 3, 3), ["channels-last"]),
]


@pytest.mark.parametrize(
    ("op", "shape", "weight", "least"),
    LONG_SUMS,
    ids=[f"{op.name}-{s}".replace(" ", "") for op, s, _, _ in LONG_SUMS],
)
@pytest.mark.parametrize("layout", ["first", "last"])
def test_long_sums_are_as_accurate_as_torch(op, shape, weight, least, layout):
    """oneDNN loses more channels last than channels first; routes must know where torch would do which."""
    here = [
        name for name in least if name != "one-dnn" or Device.of("cpu").has_avx512
    ]  # which adds up loosely without, and refuses
    keeps_promises(
        op,
        *made(shape, weight, layout=layout),
        padding=weight[-1] // 2,
        least=here if layout == "first" else [],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 3, 5, 16])
def test_nan_reaches_no_further_than_the_kernel(channels, dtype):
    """Through no route that changes the layout: oneDNN lets it with odd numbers of channels in bfloat16."""
    for op, rest in ((CONV2D, (6, 9)), (CONV3D, (3, 6, 9))):
        x, w, bias = made((2, channels, *rest), (8, channels, *[3] * len(rest)), dtype)
        x[..., 4] = float("nan")
        expected = TORCH[op.name](x.double(), w.double(), padding=1).isnan()
        args = op.arguments(x, w, bias, padding=1)
        for name, _, run in routes_on_cpu(op, args):
            if name != "depth-chunks":  # torch's own kernel, frame by frame
                assert torch.equal(run(*args).isnan(), expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_is_the_rounding_of_a_float32_result(dtype):
    x, w, bias = made((1, 96, 4, 12, 16), (96, 96, 3, 3, 3), dtype)
    with turnout.pin(conv3d="upcast"):
        y = turnout.conv3d(x, w, bias, padding=1)
    true = F.conv3d(x.double(), w.double(), bias.double(), padding=1)
    half_an_ulp = torch.finfo(dtype).eps / 2 * true.abs()
    assert ((y.double() - true).abs() <= half_an_ulp * 1.001 + 1e-4).all()


def views(shape):
    """Layouts that are not simply dense: name, tensor."""
    n, c, *rest = shape
    wider = torch.randn(n, c + 3, *(2 * size for size in rest))
    yield "sliced", wider[:, 1 : c + 1][(..., *(slice(1, size + 1) for size in rest))]
    yield "stepped", wider[:, :c][(..., *(slice(None, None, 2) for _ in rest))]
    yield (
        "sliced channels-last",
        wider.contiguous(memory_format=LAST[len(shape)])[:, 2 : c + 2][
            (..., *(slice(size) for size in rest))
        ],
    )
    yield "expanded batch", torch.randn(1, c, *rest).expand(shape)
    yield "expanded channels", torch.randn(n, 1, *rest).expand(shape)
    yield "permuted", torch.randn(*rest, c, n).permute(len(shape) - 1, len(shape) - 2, *range(len(rest)))


@pytest.mark.parametrize("op", [CONV2D, CONV3D], ids=["conv2d", "conv3d"])
def test_layouts_that_are_not_dense(op):
    rest = (5, 6) if op is CONV2D else (3, 5, 6)
    for (_, x), kernel in itertools.product(views((2, 6, *rest)), (1, 3)):
        weight = torch.randn(4, 6, *[kernel] * len(rest)) / 8
        keeps_promises(
            op,
            x,
            weight,
            torch.randn(4),
            padding=kernel // 2,
            least=["pointwise" if kernel == 1 else "channels-last"],
        )


@pytest.mark.parametrize("op", [CONV2D, CONV3D], ids=["conv2d", "conv3d"])
def test_outputs_have_torchs_strides(op):
    rest = (5, 6) if op is CONV2D else (3, 5, 6)
    for batch, into, out, kernel, large in itertools.product((1, 2), (1, 8), (1, 4), (1, 3), (1, 6)):
        size = [n * large for n in rest]
        for x_last, w_last in itertools.product((False, True), repeat=2):
            x, w = torch.randn(batch, into, *size), torch.randn(out, into, *[kernel] * len(rest))
            x = x.contiguous(memory_format=LAST[x.dim()]) if x_last else x
            w = w.contiguous(memory_format=LAST[w.dim()]) if w_last else w
            args = op.arguments(x, w, None, 1, kernel // 2)
            expected = op.reference(*args)
            assert in_format(expected, torch_format(*args[:7])).stride() == expected.stride()
            for name, _, run in routes_on_cpu(op, args):
                assert run(*args).stride() == expected.stride(), name


@pytest.mark.parametrize("op", [CONV2D, CONV3D], ids=["conv2d", "conv3d"])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["batch", "channels"])
def test_empty_inputs_give_what_torch_gives(op, shape):
    rest = [5] * (2 if op is CONV2D else 3)
    x, weight = torch.randn(*shape, *rest), torch.randn(3, shape[1], *[3] * len(rest))
    ours, theirs = OPS[op.name](*op.arguments(x, weight)), TORCH[op.name](x, weight)
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs)


# Semantics


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_in_words(kernel, dilation, padding):
    x, weight = torch.randn(2, 3, 9, 9, 9), torch.randn(4, 3, kernel, 3, kernel)
    torch.testing.assert_close(
        turnout.conv3d(x, weight, padding=padding, dilation=dilation),
        F.conv3d(x, weight, padding=padding, dilation=dilation),
    )
    torch.testing.assert_close(
        turnout.conv2d(x[:, :, 0], weight[:, :, 0], padding=padding, dilation=dilation),
        F.conv2d(x[:, :, 0], weight[:, :, 0], padding=padding, dilation=dilation),
    )


def test_unbatched_and_positional():
    x, weight, bias = torch.randn(3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    torch.testing.assert_close(
        turnout.conv2d(x, weight, bias, 2, 1, 1, 1), F.conv2d(x, weight, bias, 2, 1, 1, 1)
    )
    torch.testing.assert_close(turnout.conv2d(x, weight, padding="same"), F.conv2d(x, weight, padding="same"))
    assert turnout.conv2d(x, weight).stride() == F.conv2d(x, weight).stride()
    clip, taps = torch.randn(3, 4, 8, 8), torch.randn(6, 1, 3, 3, 3)
    torch.testing.assert_close(
        turnout.conv3d(clip, taps, None, (1, 2, 1), [1], 1, 3),
        F.conv3d(clip, taps, None, (1, 2, 1), [1], 1, 3),
    )
    with_residual = turnout.conv2d(x, weight, bias, padding=1, residual=torch.ones(4, 8, 8))
    torch.testing.assert_close(with_residual, F.conv2d(x, weight, bias, padding=1) + 1)


WRONG = [
    ((2, 3, 8, 8), (4, 5, 3, 3), {}),
    ((2, 3, 8, 8), (4, 3, 9, 9), {}),
    ((2, 3, 8, 8), (4, 3, 3, 3), {"stride": 0}),
    ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": -1}),
    ((2, 3, 8, 8), (4, 3, 3, 3), {"stride": (1, 2, 3)}),
    ((2, 3, 8, 8), (4, 3, 3, 3), {"groups": 2}),
    ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": "same", "stride": 2}),
    ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": "full"}),
    ((2, 3, 4, 8, 8), (4, 3, 3, 3, 3), {}),
    ((2, 3, 4, 8, 8), (4, 3, 3, 3, 3), {"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1)}),
    ((8, 8), (4, 3, 3, 3), {}),
]


@pytest.mark.parametrize(("shape", "weight", "arguments"), WRONG)
def test_invalid_arguments_raise_the_error_of_torch(shape, weight, arguments):
    x, w = torch.randn(shape), torch.randn(weight)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as theirs:
        F.conv2d(x, w, **arguments)
    with pytest.raises(type(theirs.value)) as ours:
        turnout.conv2d(x, w, **arguments)
    assert str(ours.value) == str(theirs.value)


def test_mixed_dtypes_raise_the_error_of_torch():
    x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as theirs:
        F.conv2d(x, w)
    with pytest.raises(RuntimeError) as ours:
        turnout.conv2d(x, w)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("layout", ["first", "last"])
def test_residual_on_every_route(layout):
    for op, shape, weight in (
        (CONV2D, (2, 8, 6, 6), (5, 8, 3, 3)),
        (CONV3D, (1, 4, 4, 6, 6), (5, 4, 3, 3, 3)),
        (CONV2D, (1, 8, 6, 6), (5, 8, 1, 1)),
    ):
        x, w, bias = made(shape, weight, layout=layout)
        padding = weight[-1] // 2
        example = TORCH[op.name](x, w, bias, padding=padding)
        for residual in (
            torch.randn_like(example),
            torch.randn(example.shape),
            torch.randn(example.shape).transpose(-1, -2).contiguous().mT,
        ):
            keeps_promises(
                op,
                x,
                w,
                bias,
                padding=padding,
                residual=residual,
                least=["channels-last"] if layout == "first" else [],
            )
        assert (
            turnout.conv2d(torch.ones(1, 1, 3, 3), torch.ones(2, 1, 1, 1), residual=torch.ones(2, 1, 1)).sum()
            == 36
        )  # broadcast


def test_float32_settings_are_part_of_the_problem():
    x, w = torch.empty(1, 8, 8, 8, device="meta"), torch.empty(4, 8, 3, 3, device="meta")
    args = CONV2D.arguments(x, w)
    before, flag = torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32
    try:
        results = []
        for precision in ("tf32", "ieee"):
            torch.backends.cudnn.conv.fp32_precision = precision
            results.append((CONV2D.problem(*args).float32.conv, shared.float32_settings()))
        assert [kind for kind, _ in results] == ["tf32", "ieee"]
        assert results[0][1] != results[1][1]
        assert CONV2D.problem(*args)._replace(float32=shared.Float32("", "")) == CONV2D.problem(
            *CONV2D.arguments(x, w)
        )._replace(float32=shared.Float32("", ""))
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert torch.backends.cudnn.allow_tf32 == flag
    assert CONV2D.problem(*CONV2D.arguments(x.half(), w.half())).float32 == shared.Float32("", "")


@pytest.mark.parametrize(
    "strides", [(128, 1, 32, 8), (128, 16, 4, 1), (999, 1, 100, 8), (8, 1, 8, 8), (128, 0, 4, 1)]
)
def test_channels_last_is_what_torch_takes_for_it(strides):
    x = torch.empty_strided((1, 8, 4, 4), strides)
    assert shared.channels_last((1, 8, 4, 4), strides) == (
        torch._prims_common.suggest_memory_format(x) == torch.channels_last
    )


def test_dense_strides_are_those_of_a_fresh_tensor():
    for shape in ((2, 3, 4, 5), (1, 1, 1, 1), (2, 1, 3, 1), (0, 3, 2, 2), (2, 3, 4, 5, 6), (1, 8, 1, 1, 1)):
        for format in (torch.contiguous_format, LAST[len(shape)]):
            assert dense_strides(shape, format) == torch.empty(shape, memory_format=format).stride()


# Gradients and modes


@pytest.mark.parametrize("name", ["reference", "channels-last", "depth-taps", "winograd", "depth-chunks"])
def test_gradients_match_torchs(name):
    x, w, bias = made((2, 8, 4, 6, 6), (6, 8, 3, 3, 3))
    residual = torch.randn(2, 6, 4, 6, 6)
    ours, theirs = ([t.clone().requires_grad_() for t in (x, w, bias, residual)] for _ in range(2))
    with turnout.pin(conv3d=name):
        y = turnout.conv3d(*ours[:3], padding=1, residual=ours[3])
    expected = F.conv3d(*theirs[:3], padding=1) + theirs[3]
    scale = torch.randn_like(expected)
    (y * scale).sum().backward()
    (expected * scale).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_only_the_gradients_that_are_wanted():
    x, w, bias = made((1, 8, 6, 6), (4, 8, 3, 3))
    x.requires_grad_()
    with turnout.pin(conv2d="channels-last"):
        turnout.conv2d(x, w, bias).sum().backward()
    expected = torch.autograd.grad(F.conv2d(x, w, bias).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert w.grad is None


def test_second_gradients():
    x, w, bias = (t.double().requires_grad_() for t in made((1, 2, 4, 4), (2, 2, 3, 3)))

    def opaque(x, w, bias):
        return CONV2D.opaque(x, w, bias, [1, 1], [1, 1], [1, 1], 1, None)

    assert torch.autograd.gradcheck(opaque, (x, w, bias))
    assert torch.autograd.gradgradcheck(opaque, (x, w, bias))


def test_autocast_casts_as_torch_does():
    x, w, bias = made((1, 8, 6, 6), (4, 8, 3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (
            turnout.conv2d(x, w, bias, residual=torch.ones(1, 4, 4, 4)),
            F.conv2d(x, w, bias) + torch.ones(1, 4, 4, 4).bfloat16(),
        )
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs)


def test_vmap_and_meta():
    x, w = torch.randn(3, 1, 2, 6, 6), torch.randn(4, 2, 3, 3)
    torch.testing.assert_close(
        torch.vmap(lambda one: turnout.conv2d(one, w))(x), torch.stack([F.conv2d(one, w) for one in x])
    )
    assert turnout.conv3d(
        torch.empty(1, 2, 4, 4, 4, device="meta"), torch.empty(3, 2, 3, 3, 3, device="meta")
    ).shape == (1, 3, 2, 2, 2)


# Choices


def on(device, op, shape, weight, dtype=torch.bfloat16, layout="last", **arguments):
    device = Device.named(device) if isinstance(device, str) else device
    place = (
        "cpu" if device.type == "cpu" else "meta"
    )  # torch's flags for float32 are those of the tensors' own device
    x, w = (torch.empty(s, dtype=dtype, device=place) for s in (shape, weight))
    if layout == "last":
        x, w = (t.contiguous(memory_format=LAST[t.dim()]) for t in (x, w))
    return turnout.explain(
        op, x, w, torch.empty(weight[0], dtype=dtype, device=place), **arguments, device=device
    ).chosen


@pytest.fixture
def no_tables(monkeypatch, tmp_path):
    monkeypatch.setattr("turnout.routing.store.SHIPPED", tmp_path)


@pytest.mark.usefixtures("no_tables")
def test_choices_for_an_absent_card():
    assert on("h200", "conv3d", (1, 96, 4, 480, 832), (96, 96, 3, 3, 3), padding=1) == "implicit-gemm-hopper"
    assert (
        on("h200", "conv3d", (1, 96, 4, 480, 832), (96, 96, 3, 3, 3), layout="first", padding=1)
        == "implicit-gemm-hopper"
    )
    assert (
        on("h200", "conv3d", (1, 96, 4, 480, 832), (96, 96, 3, 3, 3), torch.float32, padding=1)
        == "implicit-gemm-hopper"
    )
    assert on("h200", "conv2d", (1, 128, 1024, 1024), (3, 128, 3, 3), padding=1).startswith("narrow-out")
    assert on("h200", "conv2d", (1, 8, 8, 8), (8, 8, 3, 3), padding=1) == "reference"
    assert on("a100", "conv3d", (1, 512, 8, 64, 64), (512, 512, 3, 3, 3), padding=1) == "reference"
    assert on("a100", "conv3d", (1, 512, 8, 64, 64), (512, 512, 3, 3, 3), layout="first", padding=1) in (
        "channels-last",
        "reference",
    )


def a_cpu(**facts):
    """An Intel with AVX-512, without instructions for half types, or with other facts."""
    intel = {"one_dnn": ONE_DNN, "careful_loop": False, "native_halves": frozenset()}
    return replace(Device.of("cpu"), **{**intel, **facts})


def test_choices_on_a_cpu():
    cpu = a_cpu()
    assert on(cpu, "conv2d", (1, 8, 4, 4), (8, 8, 3, 3), torch.float32, "first") == "reference"
    for layout in ("first", "last"):
        assert (
            on(cpu, "conv3d", (1, 64, 4, 64, 64), (3, 64, 3, 3, 3), torch.float32, layout, padding=1)
            == "winograd"
        )
        assert (
            on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), torch.float32, layout, padding=1)
            == "winograd"
        )
        assert (
            on(cpu, "conv3d", (1, 384, 2, 8, 12), (384, 384, 3, 3, 3), torch.float32, layout, padding=1)
            == "one-dnn"
        )  # mostly weight
        assert (
            on(cpu, "conv2d", (1, 3, 256, 256), (96, 3, 3, 3), torch.float32, layout, padding=1)
            == "reference"
        )
    assert on(cpu, "conv2d", (1, 64, 64, 64), (64, 64, 3, 3), torch.float32, "first", padding=1) == "winograd"
    assert on(cpu, "conv2d", (1, 64, 64, 64), (64, 64, 3, 3), torch.float32, "last", padding=1) == "reference"
    assert on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), padding=1) == "winograd"


@pytest.mark.parametrize("layout", ["first", "last"])
def test_a_half_type_with_instructions_goes_to_one_dnn(layout):
    """23.6 ms on two cores of an AMD Zen 4, 25.5 by Winograd's transform."""
    cpu = a_cpu(native_halves=frozenset([torch.bfloat16]))
    assert (
        on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), torch.bfloat16, layout, padding=1)
        == "reference"
    )


def test_choices_on_a_cpu_without_numba():
    cpu = a_cpu(lacks=frozenset(["numba"]))
    assert on(cpu, "conv3d", (1, 64, 4, 64, 64), (3, 64, 3, 3, 3), torch.float32, "first", padding=1) in (
        "one-dnn",
        "depth-taps",
    )
    assert (
        on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), torch.float32, "first", padding=1)
        == "depth-taps"
    )
    assert (
        on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), torch.float32, "last", padding=1)
        == "reference"
    )
    assert on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), padding=1) in ("upcast", "reference")


def test_a_half_type_without_instructions_goes_through_float32():
    cpu = a_cpu()
    assert on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), padding=1) == "winograd"
    assert on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 1, 3), padding=(1, 0, 1)) == "upcast"
    x, weight = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((1, 96, 4, 60, 104), (96, 96, 3, 3, 3))
    )
    verdict = turnout.explain(
        "conv3d", x, weight, padding=1, device=a_cpu(one_dnn=frozenset([torch.float32]))
    )
    assert verdict.chosen == "winograd"
    assert (
        verdict.microseconds["reference"]
        > 100 * verdict.microseconds["upcast"]
        > 100 * verdict.microseconds["winograd"]
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_a_bias_as_large_as_the_sums_keeps_the_digits(layout):
    """oneDNN without AVX-512 would begin with it, and lose digits at every step."""
    x, weight = torch.randn(1, 8, 3, 6, 7).contiguous(memory_format=layout), torch.randn(5, 8, 3, 3, 3) / 15
    with assumed(a_cpu(one_dnn=frozenset([torch.float32]))):
        keeps_promises(CONV3D, x, weight, torch.randn(5), padding=1, least=["one-dnn"])


def test_one_dnn_without_avx512_refuses_long_sums():
    """It adds up channels first in one go there, and is no slower than with channels last."""
    cpu = a_cpu(one_dnn=frozenset([torch.float32]))
    small = turnout.explain(
        "conv3d", torch.empty(1, 64, 4, 64, 64), torch.empty(3, 64, 3, 3, 3), padding=1, device=cpu
    )
    assert any("sums of 1728 products" in reason for reason in small.refused["one-dnn"])
    assert small.chosen == "winograd"
    for layout in ("first", "last"):
        assert (
            on(cpu, "conv3d", (1, 96, 4, 60, 104), (96, 96, 3, 3, 3), torch.float32, layout, padding=1)
            == "winograd"
        )
        assert (
            on(
                cpu,
                "conv3d",
                (1, 96, 4, 60, 104),
                (96, 96, 3, 1, 1),
                torch.float32,
                layout,
                padding=(1, 0, 0),
            )
            == "reference"
        )


@pytest.mark.parametrize(
    ("op", "seed"),
    [(CONV3D, 49034), (OPS["causal_conv3d"], 75960), (CONV2D, 32974), (CONV2D, 72632), (CONV2D, 14548)],
)
def test_groups_and_axes_of_size_one(op, seed):
    """Random calls that once came out wrong, or in strides that are not torch's.

    Half a million others on a CPU did not.
    """
    args = random_call(op, seed, torch.device("cpu"))
    for threads in (1, torch.get_num_threads()):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for name, _, run in routes_on_cpu(op, args):
                assert equal(op, run, args), name
        finally:
            torch.set_num_threads(before)


def test_outputs_that_read_only_padding_are_left_to_torch():
    """oneDNN writes beside its memory where a dilated kernel steps over the only frame."""
    x, weight = (
        torch.empty(1, 8, 1, 7, 1, dtype=torch.bfloat16),
        torch.empty(5, 8, 2, 1, 1, dtype=torch.bfloat16),
    )
    verdict = turnout.explain("conv3d", x, weight, stride=(3, 1, 1), padding=(1, 0, 0), dilation=(2, 1, 1))
    assert verdict.chosen == "reference"
    assert any("see some input" in why for why in verdict.refused["channels-last"])


def test_axes_of_size_one_may_have_any_stride():
    """Half types through float32 in groups: torch 2.13 reads such a float32 weight wrong."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (3, 6, 3, 3)).bfloat16()
    weight = torch.randint(-2, 3, (10, 1, 3, 3)).bfloat16().permute(0, 3, 1, 2)
    odd = weight.as_strided(weight.shape, (9, 1, 1, 3))
    expected = F.conv2d(x.double(), weight.double().contiguous(), padding=(0, 1), groups=2)
    actual = OPS["conv2d"].routes["upcast"].run(x, odd, None, [1, 1], [0, 1], [1, 1], 2, None)
    assert torch.equal(actual.double(), expected)
