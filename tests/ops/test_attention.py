"""attention on a CPU: what it means, its layouts, padding, masks, memory and gradients, and what would be
chosen on other devices.
"""

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.ops.attention import _CHUNK_BYTES, ATTENTION, flash, padding
from turnout.routing.case import copy
from turnout.routing.device import Device

H200 = Device.named("h200")


def tensors(batch=2, heads=4, kv_heads=4, rows=9, keys=13, dim=16, dtype=torch.float32, inside=False):
    generator = torch.Generator().manual_seed(rows * keys + dim)

    def one(count, length):
        x = torch.randn(batch, length, count, dim, generator=generator).to(dtype)
        return x.transpose(1, 2) if inside else x.transpose(1, 2).contiguous()

    return one(heads, rows), one(kv_heads, keys), one(kv_heads, keys)


def by_hand(q, k, v, allowed=None, scale=None):
    """Scores, softmax and product in float64; queries that see nothing give zero."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.softmax(scores, 3).nan_to_num(0.0) @ v


def close(actual, true):
    torch.testing.assert_close(actual.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("rows", "keys"), [(9, 13), (13, 9), (1, 7), (5, 1), (1, 1)])
def test_attention_without_mask_causal_and_scaled(kv_heads, rows, keys):
    q, k, v = tensors(kv_heads=kv_heads, rows=rows, keys=keys)
    seen = torch.arange(keys) <= torch.arange(rows)[:, None]
    close(turnout.attention(q, k, v), by_hand(q, k, v))
    close(turnout.attention(q, k, v, causal=True), by_hand(q, k, v, seen))
    close(turnout.attention(q, k, v, scale=0.7), by_hand(q, k, v, scale=0.7))


def test_equals_torch_to_the_bit_where_torch_has_the_same_call():
    q, k, v = tensors(keys=20)
    mask = torch.randn(2, 1, 9, 20)
    assert torch.equal(turnout.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(
        turnout.attention(q, k, v, mask=mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    )


def test_kv_lengths_as_lists_and_tensors():
    q, k, v = tensors(batch=3)
    at = torch.arange(13)
    first = torch.tensor([13, 4, 0])
    allowed = (at < first[:, None])[:, None, None]
    for argument in ([13, 4, 0], (13, 4, 0), first, first.int(), [[13, 0], [4, 0], [0, 0]]):
        close(turnout.attention(q, k, v, kv_lengths=argument), by_hand(q, k, v, allowed))
    both = [[3, 10], [3, 5], [0, 2]]  # text, then image
    allowed = torch.stack([(at < head) | (at >= 13 - tail) for head, tail in both])[:, None, None]
    for argument in (both, torch.tensor(both)):
        close(turnout.attention(q, k, v, kv_lengths=argument), by_hand(q, k, v, allowed))
        seen = allowed & (at <= torch.arange(9)[:, None])
        close(turnout.attention(q, k, v, kv_lengths=argument, causal=True), by_hand(q, k, v, seen))


@pytest.mark.parametrize("route", ["reference", "narrow"])
def test_values_in_padding_do_not_change_the_result(route):
    q, k, v = tensors()
    expected = turnout.attention(q, k, v, kv_lengths=[[3, 4], [13, 0]])
    for x in (k, v):
        x[0, :, 3:9] = torch.nan
    with turnout.pin(attention=route):
        torch.testing.assert_close(turnout.attention(q, k, v, kv_lengths=[[3, 4], [13, 0]]), expected)


def test_lengths_and_a_mask_together():
    q, k, v = tensors()
    mask = torch.rand(9, 13) < 0.5
    allowed = mask & (torch.arange(13) < torch.tensor([13, 5])[:, None, None, None])
    close(turnout.attention(q, k, v, mask=mask, kv_lengths=[13, 5]), by_hand(q, k, v, allowed))
    bias = torch.where(mask, 0.0, -torch.inf)
    close(turnout.attention(q, k, v, mask=bias, kv_lengths=[13, 5]), by_hand(q, k, v, allowed))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_fully_masked_queries_give_zero(kind):
    q, k, v = tensors()
    mask = torch.rand(2, 1, 9, 13) < 0.5
    mask[0, 0, 3] = mask[1] = False
    arguments = mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf)
    out = turnout.attention(q, k, v, mask=arguments)
    assert (out[1] == 0).all()
    assert (out[0, :, 3] == 0).all()
    close(out, by_hand(q, k, v, mask))
    assert (turnout.attention(q, k, v, kv_lengths=[0, 0]) == 0).all()


@pytest.mark.parametrize("keys", [1, 3, 13, 20, 200])
def test_nan_reaches_the_output(keys):
    """torch's own kernel loses it with fewer than 16 keys."""
    q, k, v = tensors(keys=keys)
    q[0, 0, 3, 5] = k[1, 1, 0, 2] = torch.nan
    expected = torch.zeros_like(q, dtype=torch.bool)
    expected[0, 0, 3] = expected[1, 1] = True
    assert torch.equal(turnout.attention(q, k, v).isnan(), expected)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_infinite_scores_of_masked_keys_do_not_spread_in_float64(kv_heads, causal):
    """With infinite scores where nobody looks, which torch's own masks make NaN."""
    q, k, v = (x.double() for x in tensors(kv_heads=kv_heads))
    allowed = torch.rand(2, 1, 9, 13, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[..., 5], allowed[0, :, 3] = False, False
    seen = allowed & (torch.arange(13) <= torch.arange(9)[:, None]) if causal else allowed
    expected = by_hand(q, k, v, seen)
    k[:, :, 5] = torch.inf
    for mask in (allowed, torch.where(allowed, 0.0, -torch.inf).double()):
        torch.testing.assert_close(turnout.attention(q, k, v, mask=mask, causal=causal), expected)
    k[:, :, 5] = 0.0
    arguments = [x[..., :2].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: turnout.attention(*x, mask=allowed, causal=causal), arguments)


def test_large_scores_stay_finite():
    q, k, v = tensors()
    close(turnout.attention(100 * q, 100 * k, v), by_hand(100 * q, 100 * k, v))


@pytest.mark.parametrize("shape", [{"rows": 0}, {"keys": 0}, {"batch": 0}])
def test_empty_inputs_give_zeros(shape):
    q, k, v = tensors(**shape)
    out = turnout.attention(q, k, v)
    assert out.shape == q.shape
    assert (out == 0).all()


def test_the_output_is_dense_in_the_layout_of_q():
    for inside in (False, True):
        q, k, v = tensors(inside=inside)
        wider = torch.cat([q, q], 3)[..., :16]
        for argument in (q, wider):
            for kwargs in (
                {},
                {"causal": True},
                {"kv_lengths": [5, 3]},
                {"mask": torch.ones(9, 13, dtype=torch.bool).tril()},
            ):
                out = turnout.attention(argument, k, v, **kwargs)
                assert (
                    out.transpose(1, 2) if argument.stride(1) < argument.stride(2) else out
                ).is_contiguous()
    q, k, v = tensors(heads=1, kv_heads=1, inside=True)
    assert turnout.attention(q, k, v).stride() == torch.empty(2, 1, 9, 16).stride()


# Masks that are lengths


def problem(*args, **kwargs):
    return ATTENTION.problem(*ATTENTION.arguments(*args, **kwargs))


def test_a_mask_over_keys_is_recognised():
    q, k, v = tensors()
    at = torch.arange(13)
    prefix = (at < torch.tensor([13, 4])[:, None])[:, None, None]
    two = ((at < 3) | (at >= 8))[None, None, None].expand(2, 4, 9, 13)
    for mask, lengths in (
        (prefix, [13, 0, 4, 0]),
        (two, [3, 5, 3, 5]),
        ((at >= 13), [0, 0, 0, 0]),
        ((at >= 5), [0, 8, 0, 8]),
    ):
        *_, arguments, _, _, _, known = ATTENTION.arguments(q, k, v, mask)
        assert (arguments, known) == (None, lengths)
        close(turnout.attention(q, k, v, mask=mask), by_hand(q, k, v, mask))
    holes = (at % 2 == 0)[None, None, None]
    assert problem(q, k, v, holes).mask == "keys"
    assert problem(q, k, v, holes).padding is None
    assert problem(q, k, v, torch.ones(9, 13, dtype=torch.bool).tril()).mask == "bool"
    assert problem(q, k, v, torch.zeros(9, 13)).mask == "float"


def test_runs_of_lengths():
    assert padding.alike([7, 0, 7, 0, 3, 2]) == [(0, 2, 7, 0), (2, 1, 3, 2)]
    x = torch.arange(6.0).view(1, 1, 6, 1)
    for head, tail, expected in (
        (6, 0, [0, 1, 2, 3, 4, 5]),
        (2, 0, [0, 1]),
        (0, 2, [4, 5]),
        (2, 1, [0, 1, 5]),
    ):
        assert padding.valid_keys(x, head, tail).flatten().tolist() == expected
    assert padding.valid_keys(x, 2, 0).data_ptr() == x.data_ptr()
    assert padding.Common.of([9, 0, 12, 0, 9, 0, 10, 0, 9, 0], 12).some == (1, 3)


@pytest.mark.parametrize("step", [1, 16, 64])
@pytest.mark.parametrize(
    "lengths",
    [[44, 0, 50, 0], [10, 20, 30, 20], [10, 20, 50, 0], [50, 0, 3, 20], [5, 3, 5, 40], [0, 20, 0, 30]],
)
def test_keys_are_split_into_common_and_rest(lengths, step):
    run = padding.Common.of(lengths, 50, step)
    common, rest = run.split(torch.arange(50.0).view(1, 1, 50, 1))
    assert run.size > 0
    assert run.size % step == 0 or run.size < step
    for i, (head, tail) in enumerate(zip(run.rest[::2], run.rest[1::2], strict=True)):
        expected = (
            padding.valid_keys(torch.arange(50.0).view(1, 1, 50, 1), *lengths[2 * i : 2 * i + 2])
            .flatten()
            .tolist()
        )
        left = [] if head + tail == 0 else padding.valid_keys(rest, head, tail).flatten().tolist()
        assert sorted(common.flatten().tolist() + left) == expected


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"kv_lengths": [3]}, "one for each of 2 batch elements"),
        ({"kv_lengths": [3, 14]}, "from 0 to 13"),
        ({"kv_lengths": [[3, 11], [0, 0]]}, "from 0 to 13"),
        ({"kv_lengths": torch.tensor([1.0, 2.0])}, "int32 or int64"),
        ({"kv_lengths": torch.tensor([1, 2, 3])}, r"\[batch\] or \[batch, 2\]"),
        ({"mask": torch.ones(4, 13, dtype=torch.bool)}, "broadcast"),
        ({"mask": torch.ones(9, 13, dtype=torch.float64)}, "bool or q's dtype"),
    ],
)
def test_invalid_arguments_raise_with_what_is_needed(kwargs, says):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=says):
        turnout.attention(q, k, v, **kwargs)


def test_invalid_shapes_raise_with_what_is_needed():
    q, k, v = tensors()
    for args, says in (
        ((q[0], k, v), r"batch, heads, length, dim"),
        ((q, k[:, :3], v[:, :3]), "multiple"),
        ((q, k, v[:, :, :5]), "agree"),
    ):
        with pytest.raises(ValueError, match=says):
            turnout.attention(*args)
    with pytest.raises(ValueError, match="same floating-point dtype"):
        turnout.attention(q, k.double(), v)


# Memory


def largest_allocation(run):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        run()
    return max(event.self_cpu_memory_usage for event in seen.events())


@pytest.mark.parametrize("causal", [False, True])
def test_forward_never_holds_all_scores(causal, monkeypatch):
    """Of all calls on a CPU only those with another head dim for v have no fused kernel in torch."""
    monkeypatch.setitem(_CHUNK_BYTES, "cpu", 2**21)
    q, k, v = tensors(1, 1, 1, 1500, 1500, 8)
    seen = torch.ones(1500, 1500, dtype=torch.bool).tril() if causal else None
    assert largest_allocation(lambda: turnout.attention(q, k, v[..., :5], causal=causal)) < 2**22
    close(turnout.attention(q, k, v[..., :5], causal=causal), by_hand(q, k, v[..., :5], seen))
    assert largest_allocation(lambda: turnout.attention(q, k, v, causal=causal)) < 2**22
    assert largest_allocation(lambda: turnout.attention(q, k, v, kv_lengths=[700])) < 2**22


def test_backward_never_holds_all_scores():
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 1, 1500, 1500, 8))
    with turnout.pin(attention="narrow"):
        out = turnout.attention(q, k, v, kv_lengths=[700])
        assert (
            largest_allocation(lambda: out.sum().backward()) < 2**22
        )  # a boolean mask is there, float32 scores would be 9 MB


# Gradients


@pytest.mark.parametrize("route", ["reference", "narrow"])
def test_gradients_match_attention_by_hand(route):
    q, k, v = tensors(heads=2, kv_heads=1, rows=2, keys=5, dim=2, dtype=torch.float64)
    lengths = [[2, 1], [5, 0]]
    allowed = torch.tensor([[True, True, False, False, True], [True] * 5])[:, None, None]
    ours, theirs = ([copy(x).requires_grad_() for x in (q, k, v)] for _ in range(2))
    with turnout.pin(attention=route):
        turnout.attention(*ours, kv_lengths=lengths).square().sum().backward()
        assert torch.autograd.gradcheck(lambda *x: turnout.attention(*x, kv_lengths=lengths), ours)
    by_hand(*theirs, allowed).square().sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_a_mask_gets_its_gradient():
    q, k, v = tensors(heads=1, kv_heads=1, rows=3, keys=5, dim=2, dtype=torch.float64)
    mask = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: turnout.attention(q, k, v, mask=m), mask)


# Under torch.compile and autocast


def test_compiled_with_lengths_and_masks():
    q, k, v = tensors()
    compiled = torch.compile(turnout.attention, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([[3, 4], [13, 0]])
    torch.testing.assert_close(
        compiled(q, k, v, kv_lengths=lengths), turnout.attention(q, k, v, kv_lengths=lengths)
    )
    torch.testing.assert_close(
        compiled(q, k, v, kv_lengths=[13, 2]), turnout.attention(q, k, v, kv_lengths=[13, 2])
    )
    mask = (torch.arange(13) < 4)[None, None, None]
    torch.testing.assert_close(compiled(q, k, v, mask=mask), turnout.attention(q, k, v, mask=mask))


def test_autocast_casts_as_torch_does():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        assert turnout.attention(q, k, v).dtype is torch.bfloat16
        assert turnout.attention(q, k, v, kv_lengths=[3, 5]).dtype is torch.bfloat16


# What would be chosen


def on_h200(batch, heads, rows, dim, **kwargs):
    q = torch.empty(batch, heads, rows, dim, dtype=torch.bfloat16, device="meta")
    args = ATTENTION.arguments(q, q, q, **kwargs)
    return ATTENTION.verdict(ATTENTION.key(args), H200)


def test_h200_takes_the_measured_route():
    assert on_h200(1, 1, 4096, 512).chosen == "wide-head-hopper"
    assert on_h200(1, 1, 16384, 384).chosen == "wide-head-hopper"
    assert on_h200(1, 24, 4608, 128).chosen == "reference"  # which asks cuDNN
    for lengths in ([4400, 4608], [[300, 4096], [512, 4096]]):
        verdict = on_h200(2, 20, 4608, 128, kv_lengths=lengths)
        assert verdict.chosen == "common-keys"
        assert verdict.config["apart"]
    assert not on_h200(2, 20, 4608, 128, kv_lengths=[4400, 4400]).config["apart"]
    assert on_h200(2, 24, 4608, 128, kv_lengths=[64, 4608]).chosen == "narrow"  # little in common


def test_choice_for_uneven_key_counts_on_an_h200():
    """cuDNN is slower there, and common-keys takes calls without lengths; the host's time is too long for
    short ones.
    """
    assert on_h200(1, 40, 32640, 128).refused["common-keys"]
    verdict = on_h200(1, 30, 32760, 128)
    assert "common-keys" not in verdict.refused
    assert verdict.microseconds["common-keys"] < 0.92 * verdict.microseconds["reference"]
    short = on_h200(1, 24, 300, 128)
    assert short.microseconds["common-keys"] > short.microseconds["reference"]


@pytest.mark.parametrize("card", ["a100", "rtx-4090", "b200"])
def test_torch_chooses_where_nothing_was_measured(card):
    device = Device.named(card)
    for shape, route in (((1, 1, 4096, 512), "wide-head"), ((1, 24, 4608, 128), "flash-triton")):
        q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        key = ATTENTION.key(ATTENTION.arguments(q, q, q))
        verdict = ATTENTION.verdict(key, device)
        assert verdict.chosen == "reference"
        assert route not in verdict.refused
        (config,) = ATTENTION.routes[route].configs(key.problem, device)
        assert config["rows"] >= 32
        assert (
            flash.tile_bytes(key.problem, config["rows"], config["keys"], config["stages"]) <= device.shared
        )


def test_keys_are_split_where_queries_are_few():
    def splits(heads, rows, keys):
        q, k = (
            torch.empty(1, heads, rows, 512, device="meta"),
            torch.empty(1, heads, keys, 512, device="meta"),
        )
        return flash.splits_of(ATTENTION.problem(q, k, k, None, False, 1.0, None, []), H200)

    assert splits(1, 4096, 4096) == 2
    assert splits(1, 16384, 16384) == 1
    assert splits(1, 64, 65536) == 8
    assert splits(1, 64, 128) == 1
