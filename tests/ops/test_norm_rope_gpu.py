"""norm_rope on a GPU: what the interpreter cannot show. Every route x every case is walked elsewhere."""

import pytest
import torch

import turnout
from turnout.measure.verify import Verifier
from turnout.ops.norm_rope import NORM_ROPE, arguments

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def tables(tokens, width):
    turns = 50 * torch.rand(tokens, width, device=CUDA)
    return turns.cos(), turns.sin()


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIMS = (32, 64, 72, 96, 128, 160, 256)
# Norms over one head and across heads take turns from one dtype, size and pairing to the next.
HEADS = [
    pytest.param(dtype, dim, pairing, (i + j + k) % 2 == 1, id=f"{pairing}-{dim}-{str(dtype)[6:]}")
    for i, pairing in enumerate(("interleaved", "half"))
    for j, dim in enumerate(DIMS)
    for k, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("dtype", "dim", "pairing", "across"), HEADS)
def test_head_sizes(dtype, dim, pairing, across):
    q, k = (torch.randn(2, 37, 3 * 6, dim, device=CUDA, dtype=dtype)[:, :, 6:12] for _ in range(2))
    weights = [torch.randn(6 * dim if across else dim, device=CUDA, dtype=dtype) for _ in range(2)]
    args = arguments(
        q,
        k,
        *tables(37, dim // 2),
        q_weight=weights[0],
        k_weight=weights[1],
        across_heads=across,
        pairing=pairing,
    )
    assert Verifier(NORM_ROPE, args).mismatch("close", NORM_ROPE.routes["one-pass"].run) is None


def test_half_types_are_the_reference_bit_for_bit_nearly_always():
    """The kernel rounds where eager PyTorch does; only the order of a norm's sum differs, and that is seen
    one time in ten thousand.
    """
    q = torch.randn(1, 1024, 24, 128, device=CUDA, dtype=torch.bfloat16)
    args = arguments(
        q, None, *tables(1024, 128), q_weight=torch.randn(128, device=CUDA, dtype=torch.bfloat16)
    )
    actual, expected = NORM_ROPE.routes["one-pass"].run(*args)[0], NORM_ROPE.reference(*args)[0]
    assert (actual != expected).float().mean() < 1e-4


def test_unaligned_and_odd_strides():
    """Rows that start at an odd element cannot be read in vectors; kernels kept for other alignments must not
    be taken.
    """
    for shift in (0, 1, 2, 4, 8):
        q = torch.randn(8 + 5 * 4 * 64, device=CUDA, dtype=torch.bfloat16)[shift : shift + 5 * 4 * 64].view(
            1, 5, 4, 64
        )
        args = arguments(q, None, *tables(5, 32), q_weight=torch.randn(64, device=CUDA, dtype=torch.bfloat16))
        assert Verifier(NORM_ROPE, args).mismatch("close", NORM_ROPE.routes["one-pass"].run) is None


def test_tensors_of_more_than_2_31_elements():
    tokens = 2**31 // (8 * 128) + 3
    q = torch.randn(1, tokens, 8, 128, device=CUDA, dtype=torch.bfloat16)
    with turnout.pin(norm_rope="rotate"):
        actual = turnout.norm_rope(q)
    for head in (0, 7):
        assert torch.equal(actual[0, head, -5:], q[0, -5:, head])
    weight = torch.ones(128, device=CUDA, dtype=torch.bfloat16)
    with turnout.pin(norm_rope="one-pass"):
        actual = turnout.norm_rope(q, weight=weight)
    torch.testing.assert_close(
        actual[0, :, -5:], turnout.norm_rope(q[:, -5:].cpu(), weight=weight.cpu())[0].to(CUDA)
    )


def test_memory_is_the_output():
    from turnout.measure.tune import peak_mib

    q = torch.randn(1, 4608, 24, 128, device=CUDA, dtype=torch.bfloat16)
    args = arguments(q, None, *tables(4608, 64), q_weight=torch.ones(128, device=CUDA, dtype=torch.bfloat16))
    NORM_ROPE.routes["one-pass"].run(*args)
    assert (
        peak_mib(NORM_ROPE.routes["one-pass"].run, args) < q.numel() * 2 / 2**20 + 2
    )  # the allocator's blocks are of 2 MiB


def test_under_torch_compile_the_op_stays_and_is_right():
    q, k = (torch.randn(1, 512, 24, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    weight, (cos, sin) = torch.ones(128, device=CUDA, dtype=torch.bfloat16), tables(512, 128)

    def chain(q, k):
        return turnout.norm_rope_qk(q * 2, k, cos, sin, q_weight=weight, k_weight=weight)

    for actual, expected in zip(torch.compile(chain, fullgraph=True)(q, k), chain(q, k), strict=True):
        assert torch.equal(actual, expected)
