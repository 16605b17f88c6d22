"""layer_norm_modulate and gated_add on a GPU: what the interpreter cannot show.

Every route x every case is walked elsewhere.
"""

import pytest
import torch

import turnout
from turnout.measure.verify import Verifier
from turnout.ops.layer_norm_modulate import GATED_ADD, LAYER_NORM_MODULATE
from turnout.routing.device import Device

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROWS = LAYER_NORM_MODULATE.routes["rows"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 7, 640, 1536, 3001, 3072, 5120, 8192])
@pytest.mark.parametrize("wide", [False, True])
def test_row_sizes(dtype, channels, wide):
    x, residual = torch.randn(2, 2, 37, channels + 8, device=CUDA, dtype=dtype)[..., :channels]
    for tokens in (1, 37):
        gate, scale, shift = torch.randn(
            2, tokens, 3, channels, device=CUDA, dtype=torch.float32 if wide else dtype
        ).unbind(2)
        args = (x, residual, gate, None, None, scale, shift, 1e-6)
        for config in ROWS.configs(LAYER_NORM_MODULATE.problem(*args), Device.of(CUDA)):
            assert (
                Verifier(LAYER_NORM_MODULATE, args).mismatch(
                    "close", lambda *arguments, c=config: ROWS.run(*arguments, **c)
                )
                is None
            )
        assert Verifier(GATED_ADD, args[:3]).mismatch("close", GATED_ADD.routes["rows"].run) is None


def test_unaligned_rows():
    """Rows that start at an odd element cannot be read in vectors; kernels kept for other alignments must not
    be taken.
    """
    for shift in (0, 1, 2, 4, 8):
        x = torch.randn(8 + 5 * 1024, device=CUDA, dtype=torch.bfloat16)[shift : shift + 5 * 1024].view(
            1, 5, 1024
        )
        scale = torch.randn(8 + 1024, device=CUDA, dtype=torch.bfloat16)[shift : shift + 1024].view(
            1, 1, 1024
        )
        assert (
            Verifier(LAYER_NORM_MODULATE, (x, None, None, None, None, scale, None, 1e-6)).mismatch(
                "close", ROWS.run
            )
            is None
        )


def test_tensors_of_more_than_2_31_elements():
    tokens = 2**31 // 4096 + 3
    x, gate = (
        torch.randn(1, tokens, 4096, device=CUDA, dtype=torch.bfloat16),
        torch.ones(1, 1, 4096, device=CUDA, dtype=torch.bfloat16),
    )
    with turnout.pin(layer_norm_modulate="rows", gated_add="rows"):
        normed, added = turnout.layer_norm_modulate(x), turnout.gated_add(x, gate, x)
    assert torch.equal(added[:, -5:], 2 * x[:, -5:])
    torch.testing.assert_close(normed[:, -5:].cpu(), turnout.layer_norm_modulate(x[:, -5:].cpu()))


def test_memory_is_the_output():
    from turnout.measure.tune import peak_mib

    x, gate = (
        torch.randn(1, 4608, 3072, device=CUDA, dtype=torch.bfloat16),
        torch.ones(1, 1, 3072, device=CUDA, dtype=torch.bfloat16),
    )
    args = (x, x, gate, None, None, gate, gate, 1e-6)
    ROWS.run(*args)
    assert peak_mib(ROWS.run, args) < 2 * x.numel() * 2 / 2**20 + 4  # the allocator's blocks are of 2 MiB


def test_gelu_is_in_the_epilogue_and_in_its_tanh_form():
    from turnout.models.blocks import linear_gelu

    layer = torch.nn.Linear(512, 1024, device=CUDA, dtype=torch.bfloat16)
    x = 3 * torch.randn(2, 300, 512, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        true = torch.nn.functional.gelu(layer.double()(x.double()), approximate="tanh")
        layer.bfloat16()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = linear_gelu(layer, x)
            torch.cuda.synchronize()
        stock = torch.nn.functional.gelu(layer(x), approximate="tanh")
    assert (result - true).norm() <= 1.1 * (stock - true).norm()
    assert not any(
        "gelu" in event.name.lower() and "elementwise" in event.name.lower() for event in profile.events()
    )
