"""causal_conv1d on a GPU: what the interpreter cannot show. Every route x every case is walked elsewhere."""

import functools

import pytest
import torch

import turnout
import turnout.ops.causal_conv1d.routes
import turnout.ops.causal_conv1d_backward.routes
import turnout.ops.causal_conv1d_update.routes
from turnout.measure.verify import Verifier
from turnout.ops.causal_conv1d import CAUSAL_CONV1D, causal_conv1d
from turnout.ops.causal_conv1d_backward import CAUSAL_CONV1D_BACKWARD
from turnout.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE, causal_conv1d_update

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LAYOUTS = {"channel-first": False, "channel-last": True}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def make(batch, dim, length, layout="channel-first", dtype=torch.bfloat16, wider=0):
    if LAYOUTS[layout]:
        return torch.randn(batch, length, dim + wider, device=CUDA, dtype=dtype)[..., :dim].transpose(1, 2)
    return torch.randn(batch, dim + wider, length, device=CUDA, dtype=dtype)[:, :dim]


def filters(dim, width=4, dtype=torch.bfloat16):
    return torch.randn(dim, width, device=CUDA, dtype=dtype), torch.randn(dim, device=CUDA, dtype=dtype)


DIMS, DTYPES = (8, 13, 1536), (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (1, 2, 3, 4, 5, 8, 12)
# Length, elements between rows, and what tells sequences apart.
SEQUENCES = {
    "one": (1, 0, None),
    "rows": (1001, 8, None),
    "seq_idx": (2048, 24, "seq_idx"),
    "cu_seqlens": (777, 3, "cu_seqlens"),
}
# Each combination is kernels of its own to compile, so only width 4 has all of dim and sequences. Every pair
# of a width, a dim, a dtype, a kind of sequences and a configuration is here, not every triple.
COMBINATIONS = [
    pytest.param(width, dim, DTYPES[(i + k) % 3], sequences, (i + j) % 3, id=f"{width}-{dim}-{sequences}")
    for k, width in enumerate(WIDTHS)
    for i, dim in enumerate(DIMS)
    for j, sequences in enumerate(SEQUENCES)
    if width == 4 or i == (j + k) % 3
]


@layouts
@pytest.mark.parametrize(("width", "dim", "dtype", "sequences", "which"), COMBINATIONS)
def test_close_to_float64(layout, width, dim, dtype, sequences, which):
    """`which` of the configurations: a route with fewer than three wraps around."""
    length, wider, packing = SEQUENCES[sequences]
    batch = 1 if packing == "cu_seqlens" else 2
    x = make(batch, dim, length, layout, dtype, wider)
    weight, bias = filters(dim, width, torch.float32)
    marks = torch.randint(-1, 6, (batch, length), device=CUDA).sort(1)[0] if packing == "seq_idx" else None
    ends = torch.tensor([0, 1, 2, 400, length], device=CUDA) if packing == "cu_seqlens" else None
    initial = torch.randn(4 if packing == "cu_seqlens" else batch, dim, width - 1, device=CUDA, dtype=dtype)
    args = (x, weight, bias, "silu", marks, ends, initial, True)
    trial = Verifier(CAUSAL_CONV1D, args)
    for name in (layout, "strided"):
        route = CAUSAL_CONV1D.routes[name]
        configs = route.configs(CAUSAL_CONV1D.problem(*args), turnout.routing.device.Device.of(CUDA))
        config = configs[which % len(configs)]
        assert trial.mismatch("close", functools.partial(route.run, **config)) is None, (name, config)


def test_an_address_that_is_not_a_multiple_of_16_bytes():
    flat = torch.randn(2 * 16 * 64 + 8, device=CUDA, dtype=torch.bfloat16)
    weight, bias = filters(16)
    for offset in (0, 1, 2, 4):
        x = flat[offset : offset + 2 * 16 * 64].view(2, 16, 64)
        for argument, name in ((x, "channel-first"), (x.view(2, 64, 16).mT, "channel-last")):
            args = (argument, weight, bias, "silu", None, None, None, False)
            assert Verifier(CAUSAL_CONV1D, args).mismatch("close", CAUSAL_CONV1D.routes[name].run) is None


@layouts
def test_more_than_two_to_the_31_elements(layout):
    """Batch rows past 2^31 elements, and one row whose strides pass it."""
    for shape in ((5, 2048, 262144), (1, 8192, 300_000)):
        x = make(*shape, layout)
        weight, bias = filters(shape[1])
        with turnout.pin(causal_conv1d=layout):
            y, final = causal_conv1d(x, weight, bias, activation="silu", return_final_states=True)
        assert y.stride() == x.stride()
        for part in (slice(0, 64), slice(-64, None)):
            end = x[-1:, :, part].clone()
            inside = causal_conv1d(end.double(), weight.double(), bias.double(), activation="silu")[
                ..., 3 if part.start else 0 :
            ]
            actual = y[-1:, :, part][..., 3 if part.start else 0 :]
            torch.testing.assert_close(actual.double(), inside, rtol=2e-2, atol=2e-2)
        assert torch.equal(final[-1], x[-1, :, -3:])
        del x, y, final


@layouts
@dtypes
def test_seventy_thousand_channels(layout, dtype):
    x = make(1, 70000, 40, layout, dtype)
    weight, bias = filters(70000, 4, dtype)
    args = (x, weight, bias, "silu", None, None, None, True)
    assert Verifier(CAUSAL_CONV1D, args).mismatch("close", CAUSAL_CONV1D.routes[layout].run) is None
    args = (x[..., 0], torch.randn(1, 70000, 4, device=CUDA, dtype=dtype), weight, bias, "silu", None, None)
    assert (
        Verifier(CAUSAL_CONV1D_UPDATE, args).mismatch("close", CAUSAL_CONV1D_UPDATE.routes["one-launch"].run)
        is None
    )


@layouts
def test_graph_capture(layout):
    x, (weight, bias) = make(2, 256, 512, layout), filters(256)
    ends = torch.tensor([0, 100, 512], device=CUDA, dtype=torch.int32)
    state = torch.randn(2, 256, 4, device=CUDA, dtype=torch.bfloat16)

    def step():
        y = causal_conv1d(x, weight, bias, activation="silu")
        packed = causal_conv1d(x[:1], weight, bias, cu_seqlens=ends)
        return y, packed, causal_conv1d_update(x[..., 0], state, weight, bias, activation="silu")

    kept = state.clone()
    expected = [t.clone() for t in step()]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step()
    state.copy_(kept)
    graph.replay()
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@layouts
def test_side_stream(layout):
    x, (weight, bias) = make(4, 1024, 4096, layout), filters(1024)
    expected = causal_conv1d(x, weight, bias, activation="silu")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = x.clone(memory_format=torch.preserve_format)
        actual = causal_conv1d(late, weight, bias, activation="silu")
    side.synchronize()
    assert torch.equal(actual, expected)


@layouts
@dtypes
@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_gradients_against_float64(layout, dtype, packing):
    batch, dim, length = (1 if packing == "cu_seqlens" else 2), 72, 1000
    x, (weight, bias) = make(batch, dim, length, layout, dtype, 8), filters(dim, 4, torch.float32)
    marks = torch.randint(-1, 4, (batch, length), device=CUDA).sort(1)[0] if packing == "seq_idx" else None
    ends = torch.tensor([0, 2, 2, 600, length], device=CUDA) if packing == "cu_seqlens" else None
    initial = torch.randn(4 if packing == "cu_seqlens" else batch, dim, 3, device=CUDA, dtype=dtype)
    grad, final = torch.randn_like(x), torch.randn_like(initial)
    args = (grad, final, x, weight, bias, "silu", marks, ends, initial, True)
    route = CAUSAL_CONV1D_BACKWARD.routes[layout]
    for config in route.configs(
        CAUSAL_CONV1D_BACKWARD.problem(*args), turnout.routing.device.Device.of(CUDA)
    ):
        run = lambda *a, c=config: route.run(*a, **c)  # noqa: E731
        assert Verifier(CAUSAL_CONV1D_BACKWARD, args).mismatch("close", run) is None, config
        for a, b in zip(run(*args), run(*args), strict=True):
            assert torch.equal(a, b)  # no atomics: the same bits every time


@layouts
def test_autograd_takes_the_routes(layout):
    x, (weight, bias) = make(2, 64, 256, layout, torch.float32), filters(64, 4, torch.float32)
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    (causal_conv1d(*wide, activation="silu") ** 2).sum().backward()
    for compiled in (False, True):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        with turnout.pin(causal_conv1d=layout, causal_conv1d_backward=layout):
            run = torch.compile(causal_conv1d, fullgraph=True) if compiled else causal_conv1d
            (run(*leaves, activation="silu") ** 2).sum().backward()
        for leaf, true in zip(leaves, wide, strict=True):
            torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=1e-4, atol=1e-3)


@dtypes
def test_update_step_by_step(dtype):
    for size, length in ((3, 1), (4, 1), (4, 3), (7, 9)):
        for ring, chosen in ((False, False), (True, False), (False, True), (True, True)):
            x = torch.randn(5, 72, length, device=CUDA, dtype=dtype)
            weight, bias = filters(72, 4, torch.float32)
            state = torch.randn(9, 72, size, device=CUDA, dtype=dtype)
            lengths = torch.tensor([0, 1, 5, 8, 100], device=CUDA) if ring else None
            slots = torch.tensor([8, 0, -1, 3, 5], device=CUDA, dtype=torch.int32) if chosen else None
            args = (x, state if chosen else state[:5], weight, bias, "silu", lengths, slots)
            assert (
                Verifier(CAUSAL_CONV1D_UPDATE, args).mismatch(
                    "close", CAUSAL_CONV1D_UPDATE.routes["one-launch"].run
                )
                is None
            )


def test_ends_are_checked_once_and_never_during_capture():
    x, (weight, bias) = make(1, 16, 64), filters(16)
    with pytest.raises(ValueError, match="it needs to rise from 0 to x's length 64"):
        causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor([0, 63], device=CUDA))
    ends = torch.tensor([0, 10, 64], device=CUDA)
    causal_conv1d(x, weight, bias, cu_seqlens=ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        causal_conv1d(x, weight, bias, cu_seqlens=ends)  # the same tensor is not read again
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ends[-1] = 65
    with pytest.raises(ValueError, match="it needs to rise"):
        causal_conv1d(x, weight, bias, cu_seqlens=ends)


def test_states_on_another_device():
    with pytest.raises(ValueError, match="initial_states is on cpu, it needs x's device cuda"):
        causal_conv1d(make(1, 8, 8), *filters(8), initial_states=torch.zeros(1, 8, 3, dtype=torch.bfloat16))
