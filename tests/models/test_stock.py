"""Adapters know what they replace: code that is not what they were written for is left alone, with the
reason.
"""

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import turnout
from turnout.models import stock
from turnout.models.accelerate import KNOWN


def test_every_adapter_knows_the_installed_releases():
    for key, adapter in KNOWN.items():
        module, _, name = key.rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        assert list(stock.unlike_stock(cls, key, adapter)) == [], "try it by benchmarks/fingerprints.py"


SOURCE = """
@decorated(1)
def forward(self, x: int = 3, *args, scale: "float" = 0.5, **kwargs) -> "Tensor":
    \'\'\'Left out.\'\'\'
    if (n := len(args)) > 1 and x is not None:
        x = [f"{each + 1:>{n}} {{}}" for each in args if each][::-1]
    with torch.no_grad(), torch.autocast("cuda"):
        return lambda y: (x @ y, b"1", 1j, ..., -1e-12, u"x")
"""


def test_a_fingerprint_is_the_same_in_every_python():
    """Found with 3.10, 3.11, 3.12 and 3.13."""
    code = stock.written_out(ast.parse(SOURCE).body[0])
    assert hashlib.sha256(code.encode()).hexdigest()[:16] == "c57ab0a7e32c2d9f"


@pytest.fixture
def altered(tmp_path, monkeypatch):
    """A copy of a module of diffusers with other code, under its own name."""

    def load(name, *changes):
        source = Path(importlib.util.find_spec(name).origin).read_text()
        for before, after in changes:
            assert source.count(before) > 0
            source = source.replace(before, after)
        path = tmp_path / f"{name.rpartition('.')[2]}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


RESNET = "diffusers.models.resnet"


def reasons(block):
    report = turnout.accelerate(torch.nn.ModuleList([block]))
    return [reason for entry in report.refused for reason in entry.reasons], report


def test_code_that_upstream_changed_is_left_alone(altered):
    module = altered(
        RESNET,
        (
            "output_tensor = (input_tensor + hidden_states) / self.output_scale_factor",
            "output_tensor = hidden_states",
        ),
    )
    block = module.ResnetBlock2D(in_channels=8, groups=2, temb_channels=None)
    x = torch.randn(1, 8, 6, 6)
    expected = block(x, None)
    message, report = reasons(block)
    assert len(message) == 1
    assert "is not that of the releases this adapter was written for (diffusers" in message[0]
    assert report.routed  # its layers are
    assert torch.allclose(block(x, None), expected, atol=1e-5)


def test_comments_and_layout_may_change(altered):
    module = altered(
        RESNET,
        (
            "hidden_states = self.conv1(hidden_states)",
            "hidden_states = self.conv1(\n            hidden_states  # first\n        )",
        ),
    )
    assert reasons(module.ResnetBlock2D(in_channels=8, groups=2, temb_channels=None))[0] == []


def test_a_part_that_is_read_past_may_not_change(altered):
    name = "diffusers.models.autoencoders.autoencoder_kl_wan"
    module = altered(
        name,
        (
            "return normalized * self.scale * self.gamma + self.bias",
            "return normalized * self.gamma + self.bias",
        ),
    )
    message, _ = reasons(module.WanResidualBlock(4, 4))
    assert any("is not that of the releases" in reason for reason in message)


def test_a_subclass_with_a_forward_of_its_own_is_left_alone():
    from diffusers.models.resnet import ResnetBlock2D

    class Doubled(ResnetBlock2D):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    class Named(ResnetBlock2D):
        pass

    arguments = {"in_channels": 8, "groups": 2, "temb_channels": None}
    block, x = Doubled(**arguments), torch.randn(1, 8, 6, 6)
    expected = block(x, None)
    message, _ = reasons(block)
    assert message == ["its class has code of its own where this adapter replaces that of ResnetBlock2D"]
    assert torch.allclose(block(x, None), expected, atol=1e-5)
    assert reasons(Named(**arguments))[0] == []


def test_code_without_source_is_left_alone():
    from diffusers.models.resnet import ResnetBlock2D

    made: dict = {"Base": ResnetBlock2D}
    exec("class Hidden(Base):\n    def forward(self, x, temb=None):\n        return x", made)
    message, _ = reasons(made["Hidden"](in_channels=8, groups=2, temb_channels=None))
    assert message == [
        "the source of Hidden cannot be read, so nobody knows whether it is what this adapter was written for"
    ]
