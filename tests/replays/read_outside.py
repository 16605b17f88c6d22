"""What the code of a model may read besides its own attributes; tests replace it."""

import types
from types import FunctionType  # noqa: F401  a class with a __closure__

import torch.nn.functional as F
from torch import nn

NUMBER = 2.0
TABLE = {"inner": {"by": 2.0}}
SPACE = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0))
_call = nn.Module.__call__


def called_twice(self, *args, **kwargs):
    result = _call(self, *args, **kwargs)
    return result * 2 if type(self) is nn.Linear else result


def times(x, by):
    return x * by


def helper(x):
    return x * NUMBER * TABLE["inner"]["by"] * SPACE.inner.scale


class Parent:
    inherited = 2.0


class Scaled(Parent):
    scale = 2.0

    @property
    def twice(self):
        return 2.0

    def help(self, x):
        return x * self.scale * self.twice * self.inherited

    def call(self, x):
        return x * self.scale

    __call__ = call


class Negated(Scaled):
    def __call__(self, x):
        return -x


class Helper:
    scale = 2.0

    @classmethod
    def scaled(cls, x):
        return x * cls.scale


class Reader(nn.Module):
    """Reads all of it."""

    def __init__(self):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), Scaled()

    def forward(self, x):
        x = F.relu(Helper.scaled(self.held.help(helper(x))) - 3) * max(1.0, 2.0)
        return self.linear(x)
