"""Sharded training: FSDP frees and resizes the storages of parameters between layers, those of routed layers too."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import turnout

ROUTES = {"conv2d": "winograd", "rms_norm_silu": "cpu-planes", "norm_rope": "cpu-rows", "attention": "narrow"}


class Block(nn.Module):
    """A convolution, a norm and an attention, each with parameters of its own, and in-place work behind them."""

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
        heads = turnout.norm_rope(y.flatten(2).mT.contiguous().view(n, h * w, 2, c // 2), weight=self.head_scale)
        y = turnout.attention(heads, heads, heads, kv_lengths=[h * w - 3] * n)
        y += heads
        return x + y.transpose(1, 2).reshape(n, h, w, c).movedim(-1, 1)


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, blocks, x):
    """Two steps: the losses, and what the parameters have become."""
    optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("version", [1, 2])
def test_training_with_sharded_parameters_of_routed_layers(version):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6)
    blocks = nn.Sequential(Block(8), Block(8))
    stock = copy.deepcopy(blocks)
    with turnout.pin(**dict.fromkeys(ROUTES, "reference")):
        expected = train(stock, stock, x)
    with turnout.pin(**ROUTES):
        with torch.no_grad():
            blocks(x)  # as a user who looks at a sample before training
        assert all(p.untyped_storage().resizable() for p in blocks.parameters())
        if version == 1:
            cpu = torch.device("cpu")
            blocks = nn.Sequential(*[FullyShardedDataParallel(b, device_id=cpu, use_orig_params=True) for b in blocks])
            model = FullyShardedDataParallel(blocks, device_id=cpu, use_orig_params=True)
        else:
            mesh = init_device_mesh("cpu", (1,))
            for block in blocks:
                fully_shard(block, mesh=mesh)
            model = fully_shard(blocks, mesh=mesh)
        found = train(model, model, x)
    torch.testing.assert_close(found, expected)
    assert expected[1] < expected[0]
