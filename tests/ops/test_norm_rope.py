"""norm_rope: every convention against diffusers' own functions, gradients, layouts, what must raise."""

import importlib

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.measure.verify import Verifier
from turnout.ops.norm_rope import NORM_ROPE, arguments
from turnout.routing.case import copy

B, S, H, D = 2, 7, 6, 16
ROUTES = ["reference", "cpu-rows"]
pinned = pytest.mark.parametrize("route", ROUTES)
halves = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def diffusers(module):
    """A module of diffusers, where it is installed."""
    pytest.importorskip("diffusers")
    return importlib.import_module(f"diffusers.models.{module}")


def projection(dtype, tokens=S, heads=H, dim=D):
    """q, k, v as slices of one packed projection: rows of one head are dense, nothing else is."""
    return torch.randn(B, tokens, 3 * heads, dim, dtype=dtype).chunk(3, 2)


def same(actual, expected, route):
    """Bit for bit where the reference is asked for: its roundings are those of the models."""
    assert actual.dtype == expected.dtype
    if route == "reference":
        assert torch.equal(actual, expected)
    else:
        bound = 2e-6 if actual.dtype is torch.float32 else 2e-3  # a last bit here and there
        assert torch.linalg.vector_norm((actual - expected).double()) <= bound * torch.linalg.vector_norm(
            expected.double()
        )


# Conventions


@pinned
@halves
def test_flux_rotates_as_diffusers_does(route, dtype):
    """Text, then image, each with its norm; tables of width D with each value twice, one for all batches and
    heads.
    """
    embeddings, flux = diffusers("embeddings"), diffusers("transformers.transformer_flux")
    ids = torch.cat([torch.zeros(3, 3), torch.rand(S, 3) * 20])
    cos, sin = flux.FluxPosEmbed(10000, [4, 6, 6])(ids)
    text, picture = projection(dtype, 3)[0], projection(dtype)[1]
    norm_text, norm_picture = (torch.nn.RMSNorm(D, eps=1e-6).to(dtype) for _ in range(2))
    with torch.no_grad():
        norm_text.weight.normal_()
        norm_picture.weight.normal_()
        joined = torch.cat([norm_text(text), norm_picture(picture)], 1)
        expected = embeddings.apply_rotary_emb(joined, (cos, sin), sequence_dim=1).transpose(1, 2)
        with turnout.pin(norm_rope=route):
            actual = turnout.norm_rope(
                (text, picture), cos, sin, weight=(norm_text.weight, norm_picture.weight)
            )
    same(actual, expected, route)


@pinned
@halves
def test_wan_rotates_as_diffusers_does(route, dtype):
    """A norm across heads; tables [1, S, 1, D] of three axes."""
    wan = diffusers("transformers.transformer_wan")
    attention = wan.WanAttention(H * D, heads=H, dim_head=D, eps=1e-6, processor=wan.WanAttnProcessor()).to(
        dtype
    )
    cos, sin = wan.WanRotaryPosEmbed(D, (1, 2, 2), 64)(torch.zeros(1, 1, 2, 4, 6))
    tokens = cos.shape[1]
    seen = {}

    def keep(query, key, value, **rest):
        seen["q"], seen["k"] = query, key
        return value

    hidden = torch.randn(B, tokens, H * D, dtype=dtype)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        attention.norm_q.weight.normal_()
        attention.norm_k.weight.normal_()
        patch.setattr(wan, "dispatch_attention_fn", keep)
        attention(hidden, rotary_emb=(cos, sin))
        q, k = (projected(hidden).unflatten(2, (H, D)) for projected in (attention.to_q, attention.to_k))
        with turnout.pin(norm_rope=route):
            result = turnout.norm_rope_qk(
                q,
                k,
                cos,
                sin,
                q_weight=attention.norm_q.weight,
                k_weight=attention.norm_k.weight,
                across_heads=True,
                out_layout="bshd",
            )
    same(result[0], seen["q"], route)
    same(result[1], seen["k"], route)


@pinned
@halves
def test_qwen_image_rotates_as_diffusers_does(route, dtype):
    """Complex tables, and diffusers' own norm, which rounds before it multiplies with the weight."""
    qwen, normalization = diffusers("transformers.transformer_qwenimage"), diffusers("normalization")
    x = projection(dtype)[1]
    norm = normalization.RMSNorm(D, eps=1e-6).to(dtype)
    turns = torch.randn(S, D // 2)
    freqs = torch.polar(torch.ones_like(turns), turns)
    with torch.no_grad():
        norm.weight.normal_()
        expected = qwen.apply_rotary_emb_qwen(norm(x), freqs, use_real=False).transpose(1, 2)
        with turnout.pin(norm_rope=route):
            actual = turnout.norm_rope(x, freqs, weight=norm.weight, round_before_weight=True)
    same(actual, expected, route)


@pinned
@halves
def test_ltx_rotates_as_diffusers_does(route, dtype):
    """A norm across heads, tables [B, S, H * D] that differ from head to head."""
    ltx = diffusers("transformers.transformer_ltx")
    x = projection(dtype)[0]
    turns = torch.randn(B, S, H * D // 2).repeat_interleave(2, -1)
    weight = torch.randn(H * D, dtype=dtype)
    rows = F.rms_norm(x.flatten(2), (H * D,), weight, 1e-5)
    expected = ltx.apply_rotary_emb(rows, (turns.cos(), turns.sin())).unflatten(2, (H, D)).transpose(1, 2)
    tables = (t.unflatten(2, (H, D)) for t in (turns.cos(), turns.sin()))
    with turnout.pin(norm_rope=route):
        same(turnout.norm_rope(x, *tables, weight=weight, eps=1e-5, across_heads=True), expected, route)


@pinned
@halves
def test_ltx2_rotates_as_diffusers_does(route, dtype):
    """Pairs half a head apart, tables [B, H, S, D / 2].

    Its addcmul rounds as PyTorch's build has it, so this is close, not exact.
    """
    ltx2 = diffusers("transformers.transformer_ltx2")
    x = projection(dtype)[2]
    turns = torch.randn(B, H, S, D // 2)
    expected = (
        ltx2.apply_split_rotary_emb(x.flatten(2), (turns.cos(), turns.sin()))
        .unflatten(2, (H, D))
        .transpose(1, 2)
    )
    with turnout.pin(norm_rope=route):
        actual = turnout.norm_rope(
            x, turns.cos().transpose(1, 2), turns.sin().transpose(1, 2), pairing="half"
        )
    same(actual, expected, "close")


@pinned
@halves
def test_cosmos_rotates_as_diffusers_does(route, dtype):
    """Pairs half a head apart, each value twice, diffusers' own norm on [B, H, S, D]."""
    embeddings, normalization = diffusers("embeddings"), diffusers("normalization")
    x = projection(dtype)[0]
    norm = normalization.RMSNorm(D, eps=1e-6).to(dtype)
    turns = torch.randn(S, D // 2)
    cos, sin = (torch.cat([t, t], -1) for t in (turns.cos(), turns.sin()))
    with torch.no_grad():
        norm.weight.normal_()
        expected = embeddings.apply_rotary_emb(norm(x.transpose(1, 2)), (cos, sin), use_real_unbind_dim=-2)
        with turnout.pin(norm_rope=route):
            actual = turnout.norm_rope(
                x, cos, sin, weight=norm.weight, pairing="half", round_before_weight=True
            )
    same(actual, expected, route)


# What else it promises


def test_v_is_only_permuted_and_joined():
    text, picture = projection(torch.bfloat16, 3)[2], projection(torch.bfloat16)[2]
    actual = turnout.norm_rope((text, picture))
    assert torch.equal(actual, torch.cat([text, picture], 1).transpose(1, 2))
    assert actual.is_contiguous()
    same = turnout.norm_rope(picture.contiguous(), out_layout="bshd")
    assert torch.equal(same, picture)
    assert same.data_ptr() != picture.data_ptr()  # never the input itself


@pinned
def test_partial_rotation_leaves_the_rest(route):
    q, k, _ = projection(torch.float32)
    turns = torch.randn(S, 4)
    with turnout.pin(norm_rope=route):
        a, b = turnout.norm_rope_qk(
            q, k[:, :, :2], turns.cos(), turns.sin(), rotary_dim=8, pairing="half", out_layout="bshd"
        )
        wide = torch.cat([turns, turns], -1)
        c = turnout.norm_rope(q, wide.cos(), wide.sin(), rotary_dim=8, pairing="half", out_layout="bshd")
    torch.testing.assert_close(a[..., 8:], q[..., 8:], rtol=0, atol=0)
    torch.testing.assert_close(a, c)
    first, second = k[:, :, :2, :4], k[:, :, :2, 4:8]
    cos, sin = turns.cos()[None, :, None], turns.sin()[None, :, None]
    torch.testing.assert_close(
        b[..., :8], torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    )


@pinned
def test_one_token_and_a_norm_without_weight(route):
    x = torch.randn(1, 1, 1, 32)
    with turnout.pin(norm_rope=route):
        torch.testing.assert_close(
            turnout.norm_rope(x, norm=True), F.rms_norm(x, (32,), None, 1e-6).transpose(1, 2)
        )


def test_narrow_tables_rotate_their_own_width():
    x, turns = torch.randn(1, 3, 2, 16), torch.randn(3, 4)
    narrow = turnout.norm_rope(x, turns.cos(), turns.sin())
    assert arguments(x, None, turns.cos(), turns.sin())[12] == 4
    torch.testing.assert_close(narrow[..., 4:], x[..., 4:].transpose(1, 2), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["head", "all"])
def test_gradients_are_those_of_the_reference(kind):
    """In float64 against differences, and a route's against the reference's."""
    size = 2 * 4 if kind == "all" else 4
    turns = torch.randn(3, 2, dtype=torch.float64)
    rest = (turns.cos(), turns.sin(), 1e-6, kind, 4, "interleaved", "bhsd", False)
    passed = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = [torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def run(q, k, q_weight, k_weight):
        return NORM_ROPE.opaque(q, None, k, None, q_weight, None, k_weight, None, *rest)

    assert torch.autograd.gradcheck(run, (*passed, *weights))
    q, turns = torch.randn(2, 5, 4, 8), torch.randn(5, 4)
    weight, grad = torch.randn(32 if kind == "all" else 8), torch.randn(2, 4, 5, 8)
    results = []
    for route in ROUTES:
        x, w = q.clone().requires_grad_(), weight.clone().requires_grad_()
        with turnout.pin(norm_rope=route):
            turnout.norm_rope(x, turns.cos(), turns.sin(), weight=w, across_heads=kind == "all").backward(
                grad
            )
        results.append((x.grad, w.grad))
    torch.testing.assert_close(*results)


@halves
def test_the_cpu_route_is_close_on_real_layouts(dtype):
    """Rows of 128 and head counts of the models, more than one thread's share, a ragged end."""
    q, k, _ = projection(dtype, 33, 5, 128)
    turns = torch.randn(33, 64)
    for norm in ("head", "all"):
        weights = [torch.randn(5 * 128 if norm == "all" else 128, dtype=dtype) for _ in range(2)]
        args = (
            q,
            None,
            k,
            None,
            weights[0],
            None,
            weights[1],
            None,
            turns.cos(),
            turns.sin(),
            1e-6,
            norm,
            128,
            "interleaved",
            "bhsd",
            False,
        )
        assert Verifier(NORM_ROPE, args).mismatch("close", NORM_ROPE.routes["cpu-rows"].run) is None


def test_cost_model_chooses_a_route_where_it_is_faster():
    q, turns = torch.randn(1, 256, 24, 128), torch.randn(256, 64)
    weight = torch.ones(128)
    verdict = turnout.explain("norm_rope", q, turns.cos(), turns.sin(), weight=weight)
    assert verdict.chosen == "cpu-rows"
    with turnout.numerics("exact"):
        assert turnout.explain("norm_rope", q, turns.cos(), turns.sin(), weight=weight).chosen == "reference"


def test_fullgraph_with_two_streams_and_dynamic_tokens():
    weight, turns = torch.randn(D), torch.randn(64, D // 2)

    def attention_input(text, picture):
        size = text.shape[1] + picture.shape[1]
        return (
            turnout.norm_rope(
                (text, picture), turns.cos()[:size], turns.sin()[:size], weight=(weight, weight)
            )
            + 1
        )

    compiled = torch.compile(attention_input, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 9, 17):
        text, picture = torch.randn(1, 3, H, D), torch.randn(1, tokens, H, D)
        torch.testing.assert_close(compiled(text, picture), attention_input(text, picture))


X = torch.zeros(2, 5, 4, 8)
TABLE = torch.zeros(5, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turnout.norm_rope(X[0]), "it needs to be floating-point"),
        (lambda: turnout.norm_rope((X, X, X)), "3 streams"),
        (lambda: turnout.norm_rope((X, X[..., :6])), "the second stream is"),
        (lambda: turnout.norm_rope_qk(X, X[:, :3]), "k is"),
        (lambda: turnout.norm_rope_qk((X, X), X), "same number of streams"),
        (lambda: turnout.norm_rope_qk(X, X.half()), "k is torch.float16"),
        (lambda: turnout.norm_rope(X, TABLE[:4], TABLE[:4]), "for 5 tokens"),
        (lambda: turnout.norm_rope(X, TABLE.expand(3, 5, 8), TABLE.expand(3, 5, 8)), "a batch of 2"),
        (
            lambda: turnout.norm_rope(
                X, TABLE.expand(2, 3, 5, 8).transpose(1, 2), TABLE.expand(2, 3, 5, 8).transpose(1, 2)
            ),
            "4 heads",
        ),
        (lambda: turnout.norm_rope(X, TABLE), "both are real"),
        (lambda: turnout.norm_rope(X, TABLE, TABLE[:, :4]), "sin is"),
        (lambda: turnout.norm_rope(X, TABLE[:, :3], TABLE[:, :3]), "3 wide"),
        (lambda: turnout.norm_rope(X, TABLE, TABLE, rotary_dim=6), "8 wide and 6"),
        (lambda: turnout.norm_rope(X, weight=torch.ones(7)), "it needs to be [8]"),
        (lambda: turnout.norm_rope(X, weight=torch.ones(8), across_heads=True), "it needs to be [32]"),
        (lambda: turnout.norm_rope((X, X), weight=torch.ones(8)), "1 of 2"),
        (lambda: turnout.norm_rope(X, weight=torch.ones(8), norm=False), "a weight without a norm"),
        (lambda: turnout.norm_rope(X, pairing="neox"), "pairing 'neox'"),
        (lambda: turnout.norm_rope(X, out_layout="sbhd"), "out_layout 'sbhd'"),
    ],
)
def test_mismatched_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("(", r"\(")):
        call()


def test_inputs_are_unchanged():
    q, k, _ = projection(torch.bfloat16)
    before = copy(q), copy(k)
    turns = torch.randn(S, D // 2)
    turnout.norm_rope_qk(
        q, k, turns.cos(), turns.sin(), q_weight=torch.ones(D).bfloat16(), k_weight=torch.ones(D).bfloat16()
    )
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
