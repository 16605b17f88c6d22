"""selective_scan and selective_scan_update mean the recurrence as it is written in papers, and each other."""

import pytest
import torch
import torch.nn.functional as F

import turnout
from turnout.ops.selective_scan_update import selective_scan_update


def call(batch=2, dim=6, length=9, states=4, dtype=torch.float64, held=True):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = torch.promote_types(dtype, torch.float32)
    x, dt, z = (normal(batch, length, dim).transpose(1, 2) for _ in range(3))
    into, out = normal(batch, length, 2 * states).transpose(1, 2).chunk(2, 1)
    state = normal(batch, dim, states).to(wide) if held else None
    return x, dt, -normal(dim, states).exp().to(wide), into, out, normal(dim), z, normal(dim), state


def by_hand(x, dt, A, B, C, D, z, bias, state):
    step = F.softplus(dt + bias[:, None])
    parts = []
    for i in range(x.shape[2]):
        added = (step[:, :, i] * x[:, :, i])[..., None] * B[:, None, :, i]
        state = torch.exp(step[:, :, i, None] * A) * state + added
        parts.append((state * C[:, None, :, i]).sum(-1) + D * x[:, :, i])
    return torch.stack(parts, -1) * F.silu(z), state


def test_scan_equals_the_recurrence():
    x, dt, A, B, C, D, z, bias, state = call(length=150)  # more than two chunks of the reference
    y, final = turnout.selective_scan(
        x, dt, A, B, C, D=D, z=z, dt_bias=bias, dt_softplus=True, initial_state=state, return_final_state=True
    )
    expected, last = by_hand(x, dt, A, B, C, D, z, bias, state)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(final, last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_rates", [False, True])
def test_updates_step_by_step_equal_the_scan(dtype, log_rates):
    x, dt, A, B, C, D, z, bias, state = call(dtype=dtype)
    options = {"D": D, "dt_bias": bias, "dt_softplus": True}
    expected, last = turnout.selective_scan(
        x, dt, A, B, C, z=z, initial_state=state, return_final_state=True, **options
    )
    held = state.clone()
    rates = (-A).log() if log_rates else A
    steps = [
        selective_scan_update(
            x[..., i],
            held,
            dt[..., i],
            rates,
            B[..., i],
            C[..., i],
            z=z[..., i],
            log_rates=log_rates,
            **options,
        )
        for i in range(x.shape[2])
    ]
    loose = (
        {}
        if dtype is torch.float64
        else {"rtol": 1e-4, "atol": 1e-5}
        if dtype is torch.float32
        else {"rtol": 2e-2, "atol": 2e-2}
    )
    assert steps[0].dtype is dtype
    assert steps[0].is_contiguous()
    torch.testing.assert_close(torch.stack(steps, -1), expected, **loose)
    torch.testing.assert_close(held, last, **loose)


def test_a_state_of_a_half_type_is_written_as_it_is():
    x, dt, A, B, C, _, _, _, state = (
        t[..., 0] if i in (0, 1, 3, 4) else t for i, t in enumerate(call(dtype=torch.bfloat16))
    )
    small = state.bfloat16()
    selective_scan_update(x, small, dt.abs(), A, B, C)
    expected = (
        torch.exp(dt.abs().float()[..., None] * A) * state.bfloat16().float()
        + (dt.abs() * x.float())[..., None] * B.float()[:, None]
    )
    assert small.dtype is torch.bfloat16
    torch.testing.assert_close(small.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.ones(2, 6, 1)}, r"x is \[2, 6, 1\], it needs to be \[batch, channels\]"),
        ({"A": torch.ones(5, 4)}, r"A is \[5, 4\], it needs to be \[channels, states\] with 6 channels"),
        ({"B": torch.ones(2, 3)}, r"B is \[2, 3\], it needs to be \[2, 4\]"),
        (
            {"state": torch.ones(2, 6, 4, dtype=torch.int32)},
            "state is int32, it needs a floating-point dtype",
        ),
        ({"z": torch.ones(2, 6, device="meta")}, "z is on meta, it needs x's device cpu"),
    ],
)
def test_errors_name_the_mismatched_argument(changed, message):
    arguments = {
        "x": torch.ones(2, 6),
        "state": torch.ones(2, 6, 4),
        "dt": torch.ones(2, 6),
        "A": -torch.ones(6, 4),
        "B": torch.ones(2, 4),
        "C": torch.ones(2, 4),
    }
    with pytest.raises(ValueError, match=message):
        selective_scan_update(**(arguments | changed))
