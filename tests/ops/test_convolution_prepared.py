"""Prepared calls of convolutions launch exactly what the routes themselves launch."""

import pytest
import torch

from turnout.launch.recording import recorded
from turnout.ops.convolution.gpu import launching
from turnout.ops.convolution.layout import LAST
from turnout.routing.device import Device
from turnout.routing.op import OPS

pytest.importorskip("triton")
H200 = Device.named("h200")


def clip(*shape, dtype=torch.bfloat16, spare=0):
    held = torch.zeros(torch.Size(shape).numel() + spare, dtype=dtype)[spare:]
    return held.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


@pytest.fixture
def launches(monkeypatch):
    """What would be launched on an H200."""
    monkeypatch.setattr(
        launching, "torch_format", lambda input, *rest: LAST[input.dim()]
    )  # cuDNN's; a CPU's depends on its kernels
    with recorded(H200) as launches:
        yield launches


def without_addresses(launch):
    kinds = [
        x.dtype if isinstance(x, torch.Tensor) else x and (x.shape, x.strides, x.block_shape)
        for x in launch.tensors
    ]
    return launch._replace(tensors=kinds, kernel=launch.kernel.fn.__name__)


IMAGE, BIAS = clip(1, 64, 20, 30), torch.zeros(96, dtype=torch.bfloat16)
FILM, TAPS, CACHE, RESIDUAL = (
    clip(1, 64, 3, 20, 30),
    clip(96, 64, 3, 3, 3),
    clip(1, 64, 2, 20, 30),
    clip(1, 96, 3, 20, 30),
)
CALLS = {
    "conv2d": ("conv2d", "implicit-gemm-hopper", (IMAGE, clip(96, 64, 3, 3), BIAS, 1, 1)),
    "conv2d, few filters": ("conv2d", "narrow-out-hopper", (IMAGE, clip(3, 64, 3, 3), None, 1, 1)),
    "conv3d, residual": ("conv3d", "implicit-gemm-hopper", (FILM, TAPS, None, 1, 1, 1, 1, RESIDUAL)),
    "causal": ("causal_conv3d", "implicit-gemm-hopper", (FILM, TAPS, None, None, 1, 1)),
    "causal, cache": ("causal_conv3d", "implicit-gemm-hopper", (FILM, TAPS, BIAS, CACHE, 1, 1)),
    "upsampled": ("upsample_conv2d", "implicit-gemm-hopper", (IMAGE, clip(96, 64, 3, 3), BIAS, 2, 1)),
}


def routed(name):
    op, route, call = CALLS[name]
    args = OPS[op].arguments(*call)
    route = OPS[op].routes[route]
    return route, args, route.configs(OPS[op].problem(*args), H200)[0]


@pytest.mark.parametrize("name", CALLS)
def test_prepared_calls_launch_the_same_kernels(name, launches):
    route, args, config = routed(name)
    prepared = route.prepared(args, config)
    assert prepared.is_direct
    mine, theirs = prepared.call(*args), route.run(*args, **config)
    assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    half = len(launches) // 2
    assert half == (5 if name == "upsampled" else 1)
    assert [*map(without_addresses, launches[:half])] == [*map(without_addresses, launches[half:])]


@pytest.mark.parametrize("name", CALLS)
def test_unaligned_input_is_launched_without_tma(name, launches):
    route, args, config = routed(name)
    prepared = route.prepared(args, config)
    odd = clip(*args[0].shape, spare=1)
    assert odd.stride() == args[0].stride()
    prepared.call(odd, *args[1:])
    assert {launch.kernel.fn.__name__ for launch in launches} <= {"implicit_gemm", "phase_filters"}
    assert {launch.tensors[0].dtype for launch in launches} == {
        torch.bfloat16
    }  # a tensor for the portable kernel, no descriptor


def test_a_route_without_a_configuration_takes_its_defaults(launches):
    """Pinned where nothing was measured, it has its defaults."""
    route, args, _ = routed("causal, cache")
    route.prepared(args, {}).call(*args)
    route.run(*args)
    assert without_addresses(launches[0]) == without_addresses(launches[1])


def test_a_cache_without_frames_is_none(launches):
    route, (x, weight, bias, cache, *rest), config = routed("causal, cache")
    for held in (cache[:, :, :0], None):
        route.prepared((x, weight, bias, held, *rest), config).call(x, weight, bias, held, *rest)
    assert without_addresses(launches[0]) == without_addresses(launches[1])


def test_calls_with_and_without_a_cache_share_a_kernel(launches):
    """The first part of a clip has no cache. Its kernel reads zeros before the first frame, of the input."""
    route, (x, weight, bias, cache, *rest), config = routed("causal, cache")
    assert config["share"] == "depth"
    for held in (cache, None):
        route.run(x, weight, bias, held, *rest, **config)
    behind, first = launches
    assert first.constants == behind.constants
    assert first.tensors[1].base is x
    assert [t and t.block_shape for t in first.tensors[:-1]] == [
        t and t.block_shape for t in behind.tensors[:-1]
    ]
    frames = 5  # among the numbers: see NUMBERS of the kernel
    assert (first.numbers[frames], behind.numbers[frames]) == (0, 2)


def test_copied_arguments_are_not_launched_directly(launches):
    route, (x, *rest), config = routed("conv2d")
    assert not route.prepared((x.contiguous(), *rest), config).is_direct
    route, (x, weight, bias, _, *rest), config = routed("causal")
    longer = clip(1, 64, 5, 20, 30)
    assert not route.prepared((x, weight, bias, longer, *rest), config).is_direct
