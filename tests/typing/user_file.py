"""What a user writes, with every public name of turnout: pyright accepts it in strict mode, and it runs."""

import torch
from torch import Tensor, nn

import turnout
from turnout.models import DecodeStream, Report
from turnout.parallel import Lockstep


def convolutions(x: Tensor, weight: Tensor, clip: Tensor, weight3d: Tensor) -> list[Tensor]:
    """x: `[N, C, H, W]`, weight: `[C, C, 3, 3]`, clip: `[N, C, T, H, W]`, weight3d: `[C, C, 3, 3, 3]`."""
    y = turnout.conv2d(x, weight, padding="same", stride=(1, 1))
    large = turnout.upsample_conv2d(x, weight, scale=2)
    video = turnout.conv3d(clip, weight3d, None, 1, 1)
    alone = turnout.causal_conv3d(clip, weight3d, padding=1, pad_mode="replicate")
    first, cache = turnout.causal_conv3d(clip, weight3d, padding=1, return_cache=True)
    second = turnout.causal_conv3d(clip, weight3d, cache=cache, padding=1, return_cache=False)
    return [y, large, video, alone, first, second]


def norms(x: Tensor, tokens: Tensor) -> list[Tensor]:
    """x: `[N, C, H, W]`, tokens: `[B, S, C]`."""
    channels = x.shape[1]
    ones, zeros = torch.ones(channels), torch.zeros(channels)
    border = turnout.group_norm_silu_pad(x, 2, ones, zeros, eps=1e-6, padding=(1, 1, 1, 1))
    spatial = turnout.spatial_norm_silu(x, 2, ones, zeros, torch.ones_like(x), torch.zeros_like(x))
    normed = turnout.layer_norm_modulate(tokens, eps=1e-6)
    both, summed = turnout.layer_norm_modulate(tokens, residual=tokens, gate=None)
    return [
        turnout.rms_norm_silu(x, ones, eps=1e-6),
        turnout.group_norm_silu(x, 2, ones, zeros, eps=1e-6, silu=False),
        border,
        spatial,
        normed,
        both,
        summed,
        turnout.gated_add(tokens, None, tokens),
        turnout.add_repeated(x.unsqueeze(2), x.unsqueeze(2), times=(1, 1, 1)),
    ]


def attends(x: Tensor) -> Tensor:
    """x: `[B, S, H, D]`."""
    angles = torch.randn(x.shape[1], x.shape[3] // 2)
    q, k = turnout.norm_rope_qk(x, x, angles.cos(), angles.sin())
    v: Tensor = turnout.norm_rope(x)
    return turnout.attention(q, k, v, kv_lengths=[x.shape[1]] * x.shape[0], scale=0.5)


def state_space(x: Tensor, weight: Tensor, states: Tensor) -> list[Tensor]:
    """x: `[B, D, L]`, weight: `[D, 4]`, states: `[D, N]`."""
    outputs = turnout.causal_conv1d(x, weight, activation="silu")
    outputs, state = turnout.causal_conv1d(x, weight, return_final_states=True)
    step = turnout.causal_conv1d_update(x[..., 0], state.clone(), weight)
    shared = torch.ones(x.shape[0], states.shape[1], x.shape[2])
    scanned = turnout.selective_scan(x, x, states, shared, shared)
    scanned, last = turnout.selective_scan(x, x, states, shared, shared, return_final_state=True)
    one = x[..., 0]
    updated = turnout.selective_scan_update(one, last, one, states, shared[..., 0], shared[..., 0])
    return [outputs, step, scanned, updated]


def sums(a: Tensor, b: Tensor) -> Tensor:
    """a, b: `[K]`."""
    return turnout.dot(a, b) + turnout.inner(a, b) + turnout.matmul(a, b)


def asked(a: Tensor, b: Tensor) -> str:
    """Ask, pin, limit, tune."""
    verdict: turnout.Verdict = turnout.explain(turnout.dot, a, b, device="h200")
    names: dict[str, list[str]] = turnout.routes()
    classes = [route.numerics for route in turnout.routes("dot")]
    try:
        with turnout.pin(dot="two-stage"), turnout.numerics("close"):
            turnout.dot(a, b)
    except turnout.Refused as refused:
        print(refused, names["dot"], classes)
    rows = turnout.tune("dot", a, b, budget=0.5, save=False, progress=False)
    fastest = min(rows[0].us, key=lambda route: rows[0].us[route])
    return f"{turnout.__version__} {verdict.chosen} {verdict.why} {fastest}"


def patched(model: nn.Module, x: Tensor) -> Report:
    """A model, accelerated and given back."""
    with turnout.accelerated(model, numerics="exact") as report:
        model(x)
    report = turnout.accelerate(model)
    print(report, report.details())
    count: int = turnout.restore(model)
    print(count, turnout.TurnoutWarning.__name__, DecodeStream.__name__)
    return report


def ahead(model: nn.Module, x: Tensor) -> bool:
    """Whether a call on another card would compile nothing."""
    warmed = turnout.warm(model, x, device="h200", check=True)
    return warmed.ready and not warmed.named("missing")


def on_ranks(vae: nn.Module) -> Report:
    """A video VAE that is split over two ranks."""
    report = turnout.distribute(vae, Lockstep(2), split="width", gather="all")
    turnout.restore(vae)
    return report


if __name__ == "__main__":
    x, weight = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    clip, weight3d = torch.randn(1, 4, 3, 8, 8), torch.randn(4, 4, 3, 3, 3)
    print([list(y.shape) for y in convolutions(x, weight, clip, weight3d)])
    print([list(y.shape) for y in norms(x, torch.randn(1, 5, 8))])
    print(attends(torch.randn(2, 5, 2, 8)).shape)
    print(len(state_space(torch.randn(2, 4, 6), torch.randn(4, 4), -torch.rand(4, 2))))
    print(sums(torch.ones(8), torch.ones(8)), asked(torch.ones(8), torch.ones(8)))
    print(patched(nn.Sequential(nn.Conv2d(4, 4, 3)), x))
