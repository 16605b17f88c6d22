"""causal_conv1d, its update and its backward, on a CPU: against a plain loop in float64, which knows nothing
of how they work.
"""

import functools
import itertools
import random
import subprocess
import sys

import pytest
import torch

import turnout
import turnout.ops.causal_conv1d.routes
import turnout.ops.causal_conv1d_backward.routes
import turnout.ops.causal_conv1d_update.routes
from turnout.measure.verify import Verifier, outputs
from turnout.ops.causal_conv1d import CAUSAL_CONV1D, causal_conv1d
from turnout.ops.causal_conv1d_backward import CAUSAL_CONV1D_BACKWARD
from turnout.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE, causal_conv1d_update
from turnout.routing.device import Device

CPU = Device.of("cpu")
HALF = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("first", "last", "pitch", "slice", "any")
CPU_ROUTES = [
    (op, route)
    for op in (CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE)
    for route in op.routes.values()
    if route.name.startswith("cpu")
]
cpu_routes = pytest.mark.parametrize(
    ("op", "route"), CPU_ROUTES, ids=[f"{op.name}-{route.name}" for op, route in CPU_ROUTES]
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def make(batch, dim, length, layout="first", dtype=torch.float32):
    if layout == "first":
        return torch.randn(batch, dim, length).to(dtype)
    if layout == "last":
        return torch.randn(batch, length, dim).to(dtype).transpose(1, 2)
    if layout == "pitch":  # channels cut out of a wider projection
        return torch.randn(batch, length, dim + 24).to(dtype)[..., 8 : 8 + dim].transpose(1, 2)
    if layout == "slice":
        return torch.randn(batch, dim + 3, length + 8).to(dtype)[:, 1 : 1 + dim, :length]
    return torch.randn(dim, batch, length * 2).to(dtype)[..., ::2].transpose(0, 1)


def plain_loop(x, weight, bias=None, silu=False, seq_idx=None, cu_seqlens=None, initial=None):
    """(y, final states), one position at a time."""
    x, weight = x.double(), weight.double()
    (batch, dim, length), width = x.shape, weight.shape[1]
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    sequences = (
        [(b, 0, length) for b in range(batch)]
        if ends is None
        else [(0, a, b) for a, b in itertools.pairwise(ends)]
    )
    y, final = (
        torch.full_like(x, float("nan")),
        torch.zeros(len(sequences), dim, width - 1, dtype=torch.float64),
    )
    for n, (b, start, end) in enumerate(sequences):
        line = (
            {p - (width - 1): initial[n, :, p].double() for p in range(width - 1)}
            if initial is not None
            else {}
        )
        line |= {p: x[b, :, start + p] for p in range(end - start)}

        def mark(p, b=b):
            return 0 if seq_idx is None or length == 0 else int(seq_idx[b, max(p, 0)])

        for p in range(end - start):
            total = torch.zeros(dim, dtype=torch.float64) if bias is None else bias.double().clone()
            for k in range(width):
                source = p - (width - 1) + k
                if source in line and mark(source) == mark(p):
                    total = total + line[source] * weight[:, k]
            total = total * torch.sigmoid(total) if silu else total
            y[b, :, start + p] = torch.zeros_like(total) if mark(p) < 0 else total
        for k in range(width - 1):
            source = end - start - (width - 1) + k
            if source in line and mark(source) == mark(end - start - 1):
                final[n, :, k] = line[source]
    return y, final


def close(actual, expected, dtype):
    size = expected.norm()
    return (
        float((actual.double() - expected).norm() / (size if size > 0 else 1)) <= 1.5 * torch.finfo(dtype).eps
    )


def packing_of(kind, batch, length):
    if kind == "seq_idx":
        return {"seq_idx": torch.randint(-1, 3, (batch, length)).sort(1)[0].int()}
    if kind == "cu_seqlens":
        cuts = sorted(random.Random(length).choices(range(length + 1), k=3))
        return {"cu_seqlens": torch.tensor([0, *cuts, length], dtype=torch.int32)}
    return {}


@pytest.mark.parametrize("packing", ["none", "seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_plain_loop(layout, dtype, packing):
    sizes = (
        (1, 3, 5, False),
        (2, 8, 1, True),
        (3, 13, 2, True),
        (4, 16, 40, True),
        (4, 5, 33, False),
        (8, 9, 20, True),
        (11, 4, 30, True),
    )
    for width, dim, length, states in sizes:
        batch = 1 if packing == "cu_seqlens" else 2
        packed = packing_of(packing, batch, length)
        x, bias = make(batch, dim, length, layout, dtype), torch.randn(dim)
        weight = torch.randn(dim, width).to(random.Random(width).choice(HALF))
        sequences = 4 if packing == "cu_seqlens" else batch
        initial = torch.randn(sequences, dim, width - 1).to(dtype) if states else None
        args = (x, weight, bias, "silu", packed.get("seq_idx"), packed.get("cu_seqlens"), initial, True)
        for name in ("reference", "cpu-rows", "cpu-cols"):
            if name != "reference" and any(
                CAUSAL_CONV1D.routes[name].refuses(CAUSAL_CONV1D.problem(*args), CPU)
            ):
                continue
            with turnout.pin(causal_conv1d=name):
                y, final = causal_conv1d(
                    x,
                    weight,
                    bias,
                    activation="silu",
                    initial_states=initial,
                    return_final_states=True,
                    **packed,
                )
            true, left = plain_loop(x, weight, bias, True, initial=initial, **packed)
            assert close(y, true, dtype), (name, width, dim, length)
            assert torch.equal(final.double(), left), (name, width, dim, length)
            assert y.dtype == dtype
            assert (
                y.stride()
                == (
                    torch.empty(batch, length, dim).mT
                    if x.stride(1) == 1 and dim > 1
                    else torch.empty(batch, dim, length)
                ).stride()
            )


@cpu_routes
def test_cpu_routes_are_exact_on_small_integers(op, route):
    seen = 0
    for seed in range(150):
        args = op.arguments(*op.declared_cases.random_call(random.Random(seed), torch.device("cpu")))
        if not any(route.refuses(op.problem(*args), CPU)):
            for actual, expected in zip(
                outputs(op, route.run, args), outputs(op, op.reference, args), strict=True
            ):
                assert (actual.dtype, actual.shape, actual.stride()) == (
                    expected.dtype,
                    expected.shape,
                    expected.stride(),
                )
                assert torch.equal(actual, expected), op.problem(*args)
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["first", "last", "any"])
def test_cpu_routes_with_silu_are_close(layout, dtype):
    x = 4 * make(2, 24, 1500, layout, dtype)
    args = (x, torch.randn(24, 4).to(dtype), torch.randn(24).to(dtype), "silu", None, None, None, False)
    route = CAUSAL_CONV1D.routes["cpu-cols" if layout == "last" else "cpu-rows"]
    assert Verifier(CAUSAL_CONV1D, args).mismatch(route.numerics, route.run) is None
    state = torch.randn(64, 24, 4).to(dtype)
    args = (x[:, :, :64].permute(2, 1, 0)[..., 0], state, args[1], args[2], "silu", None, None)
    route = CAUSAL_CONV1D_UPDATE.routes["cpu-channels"]
    assert Verifier(CAUSAL_CONV1D_UPDATE, args).mismatch(route.numerics, route.run) is None


def test_silu_of_extreme_values():
    """Its polynomial must be right where exp overflows, and keep NaN and Inf."""
    values = torch.tensor(
        [
            float("nan"),
            float("inf"),
            -float("inf"),
            0.0,
            -0.0,
            1e-30,
            -1e-30,
            88.0,
            -88.0,
            1e30,
            -1e30,
            -87.3,
            127.0,
            -103.0,
        ]
    )
    values = torch.cat([values, torch.linspace(-86, 90, 4000)])
    for dtype in HALF:
        x = values.to(dtype)[None, None]
        y, _ = CAUSAL_CONV1D.routes["cpu-rows"].run(
            x, torch.ones(1, 1), None, "silu", None, None, None, False
        )
        true = torch.nn.functional.silu(x.double())
        assert torch.equal(y.isnan(), true.isnan())
        inside = (
            true.isfinite()
            & (true.abs() > torch.finfo(dtype).tiny * 16)
            & (true.abs() < torch.finfo(dtype).max)
        )
        assert ((y.double() - true)[inside] / true[inside]).abs().max() < (
            3e-7 if dtype is torch.float32 else torch.finfo(dtype).eps / 2 + 3e-7
        )


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("packing", ["none", "seq_idx", "cu_seqlens"])
def test_empty_and_single(length, layout, packing):
    batch = 1 if packing == "cu_seqlens" else 2
    packed = packing_of(packing, batch, length)
    sequences = 4 if packing == "cu_seqlens" else batch
    x, weight, initial = make(batch, 5, length, layout), torch.randn(5, 4), torch.randn(sequences, 5, 3)
    y, final = causal_conv1d(x, weight, initial_states=initial, return_final_states=True, **packed)
    true, left = plain_loop(x, weight, initial=initial, **packed)
    assert y.shape == x.shape
    assert close(y, true, torch.float32)
    if length == 0:
        assert torch.equal(final, initial)
    else:
        assert torch.equal(final.double(), left)
    assert causal_conv1d(torch.randn(0, 5, 8), weight).shape == (0, 5, 8)


def test_chunks_carry_their_state():
    x, weight, bias = torch.randn(2, 6, 50), torch.randn(6, 5), torch.randn(6)
    whole = causal_conv1d(x, weight, bias, activation="silu")
    state, parts = None, []
    for part in x.split([1, 2, 30, 17], 2):
        y, state = causal_conv1d(
            part, weight, bias, activation="silu", initial_states=state, return_final_states=True
        )
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 2), whole)


@pytest.mark.parametrize("name", ["reference", "cpu-rows", "cpu-cols"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_own_sequence(name, value):
    x = make(1, 8, 24, "last" if name == "cpu-cols" else "first")
    x[0, 3, 10] = value
    marks, ends = torch.tensor([0] * 5 + [1] * 6 + [2] * 13)[None], torch.tensor([0, 5, 11, 24])
    for packed in ({"seq_idx": marks}, {"cu_seqlens": ends}):
        with turnout.pin(causal_conv1d=name):
            y = causal_conv1d(x, torch.randn(8, 4), **packed)
        odd = torch.zeros_like(y, dtype=torch.bool)
        odd[0, 3, 10] = True
        assert torch.equal(~y.isfinite(), odd)


def test_a_call_never_writes_x_and_never_gives_it_back():
    for width in (1, 4):
        x = torch.randn(1, 2, 8)
        kept = x.clone()
        y = causal_conv1d(x, torch.ones(2, width))
        assert y.data_ptr() != x.data_ptr()
        assert torch.equal(x, kept)


X, W, STATE = torch.randn(2, 4, 8), torch.randn(4, 3), torch.randn(2, 4, 2)
ONE, STEP = X[:1], X[..., 0]
BAD = {
    "x of two dimensions": (lambda: causal_conv1d(X[0], W), r"x is \[4, 8\], it needs"),
    "weight of three dimensions": (lambda: causal_conv1d(X, W[:, None]), r"weight is \[4, 1, 3\], it needs"),
    "weight of other channels": (
        lambda: causal_conv1d(X, W[:3]),
        r"weight is \[3, 3\], it needs .* 4 channels",
    ),
    "weight of no width": (lambda: causal_conv1d(X, W[:, :0]), "a width of at least 1"),
    "bias": (lambda: causal_conv1d(X, W, torch.randn(3)), r"bias is \[3\], it needs"),
    "integers": (lambda: causal_conv1d(X.int(), W), "x is int32, it needs a floating-point"),
    "activation": (lambda: causal_conv1d(X, W, activation="gelu"), "activation is 'gelu', it needs"),
    "states of the wrong width": (
        lambda: causal_conv1d(X, W, initial_states=STATE[..., :1]),
        r"states is \[2, 4, 1\], .*\[2, 4, 2\]",
    ),
    "states of the wrong dtype": (
        lambda: causal_conv1d(X, W, initial_states=STATE.half()),
        "initial_states are float16, they need",
    ),
    "states elsewhere": (
        lambda: causal_conv1d(X, W, initial_states=STATE.to("meta")),
        "initial_states is on meta, it needs",
    ),
    "weight elsewhere": (lambda: causal_conv1d(X, W.to("meta")), "weight is on meta, it needs"),
    "seq_idx shape": (
        lambda: causal_conv1d(X, W, seq_idx=torch.zeros(2, 7).int()),
        r"seq_idx is \[2, 7\], it needs .*\[2, 8\]",
    ),
    "seq_idx dtype": (lambda: causal_conv1d(X, W, seq_idx=torch.zeros(2, 8)), "seq_idx is float32, it needs"),
    "two packings": (
        lambda: causal_conv1d(ONE, W, seq_idx=torch.zeros(1, 8).int(), cu_seqlens=torch.tensor([0, 8])),
        "give one of them",
    ),
    "ends before the length": (
        lambda: causal_conv1d(ONE, W, cu_seqlens=torch.tensor([0, 7])),
        r"is \[0, 7\], it needs .* length 8",
    ),
    "ends after the length": (
        lambda: causal_conv1d(ONE, W, cu_seqlens=torch.tensor([0, 3, 9])),
        "it needs to rise from 0",
    ),
    "ends that fall": (
        lambda: causal_conv1d(ONE, W, cu_seqlens=torch.tensor([0, 5, 3, 8])),
        "it needs to rise from 0",
    ),
    "ends from one": (
        lambda: causal_conv1d(ONE, W, cu_seqlens=torch.tensor([1, 8])),
        "it needs to rise from 0",
    ),
    "packed batch": (
        lambda: causal_conv1d(X, W, cu_seqlens=torch.tensor([0, 8])),
        "x has batch 2 .* need batch 1",
    ),
    "ends of two dimensions": (
        lambda: causal_conv1d(ONE, W, cu_seqlens=torch.tensor([[0, 8]])),
        r"cu_seqlens is \[1, 2\], it needs",
    ),
    "update: x": (lambda: causal_conv1d_update(X[0, 0], STATE, W), r"x is \[8\], it needs"),
    "update: short state": (
        lambda: causal_conv1d_update(STEP, STATE[..., :1], W),
        "state length of at least width - 1 = 2",
    ),
    "update: slots": (lambda: causal_conv1d_update(STEP, STATE[:1], W), "1 slots for a batch of 2"),
    "update: indices": (
        lambda: causal_conv1d_update(STEP, STATE, W, conv_state_indices=torch.zeros(3).int()),
        "indices is int32",
    ),
    "update: weight": (lambda: causal_conv1d_update(STEP, STATE, W[:2]), r"weight is \[2, 3\], it needs"),
    "update: activation": (
        lambda: causal_conv1d_update(STEP, STATE, W, activation="relu"),
        "activation is 'relu'",
    ),
    "update: state elsewhere": (
        lambda: causal_conv1d_update(STEP, STATE.to("meta"), W),
        "conv_state is on meta",
    ),
}


@pytest.mark.parametrize("mistake", BAD)
def test_invalid_arguments_raise_with_what_is_needed(mistake):
    call, message = BAD[mistake]
    with pytest.raises(ValueError, match=message):
        call()


# Update


def plain_steps(x, state, weight, bias, silu, lengths, slots):
    """(y, state after), one position at a time."""
    x, state, weight = x.double().reshape(*x.shape[:2], -1), state.double().clone(), weight.double()
    (batch, _, length), width, size = x.shape, weight.shape[1], state.shape[2]
    y = torch.zeros_like(x)
    for b in range(batch):
        slot = b if slots is None else int(slots[b])
        if slot < 0:
            continue
        if lengths is None:
            past = [state[slot, :, size - (width - 1) + k] for k in range(width - 1)]
        else:
            past = [
                state[slot, :, (int(lengths[b]) - (width - 1) + k) % size].clone() for k in range(width - 1)
            ]
        line = torch.stack([*past, *x[b].unbind(1)], 1)
        for i in range(length):
            total = bias.double() + (line[:, i : i + width] * weight).sum(1)
            y[b, :, i] = total * torch.sigmoid(total) if silu else total
            if lengths is not None:
                state[slot, :, (int(lengths[b]) + i) % size] = x[b, :, i]
        if lengths is None:
            state[slot] = torch.cat([state[slot], x[b]], 1)[:, length:]
    return y, state


@pytest.mark.parametrize("name", ["reference", "cpu-channels"])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("slots", [None, [3, -1, 0], [-1, -1, -1]])
def test_update_equals_a_plain_loop(name, ring, slots):
    slots = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    single, half, brain = HALF
    for width, size, length, dtype in (
        (1, 1, 0, single),
        (2, 1, 1, single),
        (4, 4, 0, brain),
        (4, 3, 3, half),
        (4, 7, 10, single),
        (5, 8, 20, single),
    ):
        x = torch.randn(3, 5, length).to(dtype) if length else torch.randn(3, 5).to(dtype)
        state = torch.randn(3 if slots is None else 5, size, 5).to(dtype).transpose(1, 2)
        weight, bias = torch.randn(5, width), torch.randn(5)
        lengths = torch.tensor([0, 4, 13]) if ring else None
        true, after = plain_steps(x, state, weight, bias, True, lengths, slots)
        with turnout.pin(causal_conv1d_update=name):
            y = causal_conv1d_update(
                x, state, weight, bias, activation="silu", cache_seqlens=lengths, conv_state_indices=slots
            )
        assert y.shape == x.shape
        assert y.is_contiguous()
        assert close(y.reshape(true.shape), true, dtype)
        assert torch.equal(state.double(), after)


def test_update_continues_from_the_final_state():
    x, weight, bias = torch.randn(2, 6, 12), torch.randn(6, 4), torch.randn(6)
    whole = causal_conv1d(x, weight, bias, activation="silu")
    _, state = causal_conv1d(x[..., :7], weight, bias, return_final_states=True)
    steps = [causal_conv1d_update(x[..., i], state, weight, bias, activation="silu") for i in range(7, 12)]
    torch.testing.assert_close(torch.stack(steps, 2), whole[..., 7:])


def test_state_index_out_of_range_raises():
    for name in ("reference", "cpu-channels"):
        with turnout.pin(causal_conv1d_update=name), pytest.raises(IndexError):
            causal_conv1d_update(
                torch.randn(1, 2),
                torch.randn(2, 2, 3),
                torch.randn(2, 4),
                conv_state_indices=torch.tensor([2]),
            )


# Gradients, torch.compile


def gradient_calls():
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    marks, ends = torch.tensor([[0, 0, 1, 1, 1, -1]]), torch.tensor([0, 2, 2, 6])
    yield leaf(2, 3, 5), leaf(3, 4), leaf(3), "silu", None, None, None, False
    yield (
        leaf(2, 5, 3).transpose(1, 2).detach().requires_grad_(),
        leaf(3, 2),
        None,
        None,
        None,
        None,
        leaf(2, 3, 1),
        True,
    )
    yield leaf(1, 2, 6), leaf(2, 3), leaf(2), "silu", marks, None, leaf(1, 2, 2), True
    yield leaf(1, 2, 6), leaf(2, 4), leaf(2), "silu", None, ends, leaf(3, 2, 3), True
    yield leaf(1, 2, 4), leaf(2, 1), leaf(2), "silu", None, None, leaf(1, 2, 0), False


@pytest.mark.parametrize("number", range(5))
def test_gradcheck(number):
    args = list(gradient_calls())[number]

    def first(*floats):
        arguments = iter(floats)
        y, final = CAUSAL_CONV1D.opaque(
            *(next(arguments) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in args)
        )
        return (y, final) if args[-1] else y

    floats = tuple(x for x in args if isinstance(x, torch.Tensor) and x.requires_grad)
    assert torch.autograd.gradcheck(first, floats)
    assert torch.autograd.gradgradcheck(first, floats)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_of_the_public_call(backend):
    """With a CPU route ahead, plain and compiled, against float64."""
    x, weight, bias = torch.randn(2, 6, 300), torch.randn(6, 4), torch.randn(6)
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    (causal_conv1d(*wide, activation="silu") ** 2).sum().backward()
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    run = functools.partial(causal_conv1d, activation="silu")
    with turnout.pin(causal_conv1d="cpu-rows"):
        if backend != "eager":
            torch.compiler.reset()
            run = torch.compile(run, fullgraph=True, backend=backend)
        (run(*leaves) ** 2).sum().backward()
    for leaf, true in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=1e-4, atol=1e-4)


def test_final_states_alone_have_a_gradient():
    x = torch.randn(1, 2, 6, requires_grad=True)
    with turnout.pin(causal_conv1d="cpu-rows"):
        _, final = causal_conv1d(x, torch.randn(2, 4), return_final_states=True)
    final.sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 0, 0, 1, 1, 1]).expand(1, 2, 6))


@cpu_routes
def test_opcheck_with_the_route_pinned(op, route):
    torch.use_deterministic_algorithms(False)
    seen = 0
    for seed in range(200):
        args = op.arguments(*op.declared_cases.random_call(random.Random(seed), torch.device("cpu")))
        if not any(route.refuses(op.problem(*args), CPU)):
            with turnout.pin(**{op.name: route.name}):
                torch.library.opcheck(op.opaque, outputs_kept(op, args))
            seen += 1
        if seen == 4:
            break
    assert seen == 4


def outputs_kept(op, args):
    """Arguments of their own: opcheck runs an op that writes several times."""
    return tuple(
        x.clone() if isinstance(x, torch.Tensor) and name in op.mutates else x
        for name, x in zip(op.signature.parameters, args, strict=True)
    )


def test_opcheck_of_the_backward():
    torch.use_deterministic_algorithms(False)
    for seed in (0, 1, 5, 8):
        args = CAUSAL_CONV1D_BACKWARD.declared_cases.random_call(random.Random(seed), torch.device("cpu"))
        torch.library.opcheck(CAUSAL_CONV1D_BACKWARD.opaque, args)


def test_backward_is_the_vector_jacobian_product_of_the_forward():
    """Of random calls in float64, with and without the activation; the formulas are written out, torch.func
    derives its own.
    """
    for seed in range(120):
        args = CAUSAL_CONV1D_BACKWARD.declared_cases.random_call(random.Random(seed), torch.device("cpu"))
        grad, grad_final, *call = (
            torch.randn_like(t, dtype=torch.float64) if torch.is_tensor(t) and t.is_floating_point() else t
            for t in args
        )
        call[3] = "silu" if seed % 2 else None
        places = [i for i, t in enumerate(call) if torch.is_tensor(t) and t.is_floating_point()]

        def forward(*floats, call=tuple(call), places=tuple(places)):
            arguments = dict(zip(places, floats, strict=True))
            return CAUSAL_CONV1D.reference(*(arguments.get(i, t) for i, t in enumerate(call)))

        expected = dict(
            zip(
                places,
                torch.func.vjp(forward, *(call[i] for i in places))[1]((grad, grad_final)),
                strict=True,
            )
        )
        actual = dict(
            zip((0, 1, 2, 6), CAUSAL_CONV1D_BACKWARD.reference(grad, grad_final, *call), strict=True)
        )
        for i in (0, 1, 2, 6):
            torch.testing.assert_close(actual[i], expected[i]) if i in expected else None
            assert i in expected or actual[i].numel() == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic):
    torch.compiler.reset()
    run = torch.compile(
        lambda *a, **k: causal_conv1d(*a, **k), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    step = torch.compile(
        lambda *a, **k: causal_conv1d_update(*a, **k), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    weight, bias = torch.randn(6, 4), torch.randn(6)
    for length in (16, 24):
        x = torch.randn(1, 6, length)
        for options in (
            {"activation": "silu"},
            {"cu_seqlens": torch.tensor([0, 5, length]), "return_final_states": True},
        ):
            torch.testing.assert_close(
                run(x, weight, bias, **options), causal_conv1d(x, weight, bias, **options)
            )
        states = [torch.ones(1, 6, 4), torch.ones(1, 6, 4)]
        torch.testing.assert_close(
            step(x[..., 0], states[0], weight, bias), causal_conv1d_update(x[..., 0], states[1], weight, bias)
        )
        assert torch.equal(*states)


def test_explain_says_what_a_card_could_do():
    x = torch.empty(8, 4096, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, 4, dtype=torch.bfloat16, device="meta")
    for argument, selected in (
        (x, {"channel-first", "strided"}),
        (x.mT, {"channel-last", "strided"}),
        (x[..., ::2], {"strided"}),
    ):
        verdict = turnout.explain("causal_conv1d", argument, weight, activation="silu", device="h200")
        assert verdict.chosen in selected
        assert set(verdict.microseconds) - set(verdict.refused) - {"reference"} == selected
        for name in selected:
            with turnout.pin(causal_conv1d=name):
                assert (
                    turnout.explain(
                        "causal_conv1d", argument, weight, activation="silu", device="h200"
                    ).chosen
                    == name
                )
    step = turnout.explain(
        "causal_conv1d_update", x[:, :, 0], x[..., :4], weight, activation="silu", device="h200"
    )
    assert step.chosen == "one-launch"


# Processes of their own


def test_imports_neither_triton_nor_numba():
    code = (
        "import sys, turnout.ops.causal_conv1d.routes, turnout.ops.causal_conv1d_update.routes;"
        "import turnout.compat.causal_conv1d;"
        "import turnout.ops.causal_conv1d_backward.routes; assert not {'triton', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("silu", [False, True])
def test_cpu_routes_take_lengths_around_vector_width(dtype, silu):
    """What is left over behind the last whole vector is done again with what is before it, or one by one
    where nothing is.
    """
    for length in (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 1023, 1025, 1043):
        x, weight, state = (torch.randn(shape).to(dtype) for shape in ((2, 3, length), (3, 4), (2, 3, 3)))
        call = {"activation": "silu" if silu else None, "initial_states": state}
        with turnout.pin(causal_conv1d="cpu-rows"):
            actual = turnout.causal_conv1d(x, weight, **call)
        with turnout.pin(causal_conv1d="reference"):
            expected = turnout.causal_conv1d(
                x.double(), weight.double(), **call | {"initial_states": state.double()}
            )
        torch.testing.assert_close(
            actual.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
        )
