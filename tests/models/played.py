"""CUDA graphs without a GPU: engines for a CPU that are like `turnout.models.graphs.CudaEngine`.

`Rerun` makes a run again, in Python, on the same buffers: bit for bit what an eager call gives. `Recorded` is
a graph in the ways that matter: what runs is frozen, op by op, with the memory it reads and writes. Whatever
was not noticed (weights that moved, another branch of Python's) shows as a wrong result.
"""

import contextlib
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from turnout.models import graphs
from turnout.routing.fallback import values_hidden


class Rerun:
    def __init__(self, device):
        self.device = device

    @staticmethod
    def is_capturing(device):
        return False

    def run_beside(self, run):
        with values_hidden():
            self.first = run()
        return self.first

    def capture(self, run):
        """Capturing runs nothing: what a replay returns lies where a copy of the run before it does."""
        outputs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.first)
        self.count.captures += 1

        def replay():
            for old, new in zip(tree_leaves(outputs), tree_leaves(run()), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)
            self.count.replays += 1

        return graphs.Captured(outputs, replay)

    @contextlib.contextmanager
    def ordered(self):
        yield

    def drain(self):
        pass


class Recorder(TorchDispatchMode):
    """Ops as they run, with all tensors by what they are in memory."""

    def __init__(self):
        super().__init__()
        self.ops, self.aliases, self.before = [], {}, []

    def alias(self, x):
        """The same memory, whatever becomes of the tensor: `x.data = y` moves the one, not the other."""
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self.aliases:
            self.aliases[id(x)] = x, x.detach()
        return self.aliases[id(x)][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        # before it runs: an op in place may change a tensor's shape
        given = tree_map(self.alias, (args, kwargs))
        arguments = [*zip(func._schema.arguments, given[0], strict=False)]
        arguments += [(each, given[1][each.name]) for each in func._schema.arguments if each.name in given[1]]
        for argument, value in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(x, x.clone()) for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        outputs = func(*args, **kwargs)
        self.ops.append((func, *given, tree_map(self.alias, outputs)))
        return outputs


class Recorded(Rerun):
    def capture(self, run):
        recorder = Recorder()
        with torch.no_grad(), values_hidden(), recorder:
            outputs = run()
        with torch.no_grad():
            for x, was in reversed(recorder.before):  # capturing runs nothing
                x.copy_(was)
        self.count.captures += 1

        @torch.no_grad()
        def replay():
            for func, args, kwargs, made in recorder.ops:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)
            self.count.replays += 1

        return graphs.Captured(outputs, replay)


def play_graphs(monkeypatch, engine=Rerun):
    """Let an engine play the graphs of a CPU, and count captures and replays."""
    count = types.SimpleNamespace(captures=0, replays=0)
    monkeypatch.setitem(graphs.ENGINES, "cpu", type(engine.__name__, (engine,), {"count": count}))
    return count
