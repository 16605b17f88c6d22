"""Sharded training: FSDP frees and resizes the storages of parameters between layers, also of routed ones."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import turnout
from turnout.ops import numba_cache

ROUTES = {"conv2d": "winograd", "rms_norm_silu": "cpu-planes", "norm_rope": "cpu-rows", "attention": "narrow"}


class Block(nn.Module):
    """A convolution, norms and attention, with parameters of their own and in-place work behind them."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3) / channels)
        self.bias = nn.Parameter(torch.randn(channels))
        self.scale = nn.Parameter(torch.ones(channels))
        self.head_scale = nn.Parameter(torch.ones(channels // 2))

    def forward(self, x):
        n, c, h, w = x.shape
        y = turnout.rms_norm_silu(x, self.scale, eps=1e-6)
        y = F.relu_(turnout.conv2d(y, self.weight, self.bias, padding=1))
        pixels = y.flatten(2).mT.contiguous()
        heads = turnout.norm_rope(pixels.view(n, h * w, 2, c // 2), weight=self.head_scale)
        y = turnout.attention(heads, heads, heads, kv_lengths=[h * w - 3] * n)
        y += heads
        return x + y.transpose(1, 2).reshape(n, h, w, c).movedim(-1, 1)


def losses(model, x):
    """Those of two steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    actual = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        actual.append(loss.item())
    return actual


def sharded(blocks, version):
    cpu = torch.device("cpu")
    if version == 1:
        whole = {"device_id": cpu, "use_orig_params": True}
        parts = [FullyShardedDataParallel(block, **whole) for block in blocks]
        return FullyShardedDataParallel(nn.Sequential(*parts), **whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(blocks, mesh=mesh)


def train(rank, processes, store, expected):
    """One process of several, all with the same data: what they learn is what one would."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
    try:
        for version in (1, 2):
            blocks, x = made()
            with turnout.pin(**ROUTES):
                with torch.no_grad():
                    blocks(x)  # as a user who looks at a sample before training
                assert all(p.untyped_storage().resizable() for p in blocks.parameters())
                actual = losses(sharded(blocks, version), x)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    finally:
        dist.destroy_process_group()


def made():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6)
    return nn.Sequential(Block(8), Block(8)), x


@pytest.mark.parametrize("processes", [1, 2])
def test_training_with_sharded_parameters_of_routed_layers(processes, tmp_path, monkeypatch):
    """FSDP 1 and 2. One process shards nothing; two do, and free what they have gathered after each layer."""
    with turnout.pin(**dict.fromkeys(ROUTES, "reference")):
        expected = losses(*made())
    assert expected[1] < expected[0]
    # Compiled CPU kernels are those that the tests share.
    monkeypatch.setenv("TURNOUT_CACHE_DIR", str(numba_cache.folder().parent))
    given = (processes, str(tmp_path / "store"), expected)
    if processes == 1:
        train(0, *given)
    else:
        torch.multiprocessing.spawn(train, given, nprocs=processes)
