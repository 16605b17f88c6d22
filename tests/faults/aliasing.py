"""Random calls of the ops that write, all of their tensors at random places of one piece of memory."""

from typing import NamedTuple

import torch

from turnout.routing.op import OPS

WRITING = [op for op in OPS.values() if op.mutates]
_DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 6e-2,
}  # float64 may mix with others


class Tensor(NamedTuple):
    """A tensor that is to be placed."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _norm(draw):
    dims = draw.randint(2, 4)
    shape = [draw.randint(1, 5) for _ in range(dims)]
    dtype, chance = draw.choice(_DTYPES), draw.random()
    return shape, dtype, dtype if chance < 0.7 else torch.float32


def rms_norm_silu_into(draw):
    shape, dtype, weight_dtype = _norm(draw)
    dim = draw.randrange(len(shape))
    shape[dim] = draw.choice((1, 3, 8, 20, 40))
    weight, bias = (Tensor((shape[dim],), weight_dtype) if draw.random() < 0.6 else None for _ in range(2))
    x = Tensor(tuple(shape), dtype)
    style = draw.choice(("rms_norm", "normalize"))
    return [x, weight, bias, x, 1e-6, dim, style, draw.random() < 0.7]


def group_norm_silu_into(draw):
    shape, dtype, weight_dtype = _norm(draw)
    groups = draw.choice((1, 2, 3))
    shape[1] = groups * draw.choice((1, 2, 5))
    weight, bias = (Tensor((shape[1],), weight_dtype) if draw.random() < 0.6 else None for _ in range(2))
    x = Tensor(tuple(shape), dtype)
    return [x, groups, weight, bias, x, 1e-2, draw.random() < 0.7]


def causal_conv1d_update(draw):
    dtype, batch, dim, width = (
        draw.choice(_DTYPES),
        draw.randint(1, 3),
        draw.choice((1, 4, 9, 33)),
        draw.randint(2, 4),
    )
    size, length = width - 1 + draw.randint(0, 3), draw.randint(0, 4)
    slots = batch + draw.randint(0, 2)
    chosen = None if draw.random() < 0.6 else torch.tensor(draw.sample(range(slots), batch))
    if chosen is not None and draw.random() < 0.3:
        chosen[draw.randrange(batch)] = -1
    lengths = None if draw.random() < 0.6 else torch.tensor([draw.randint(0, 9) for _ in range(batch)])
    x = Tensor((batch, dim, length) if length else (batch, dim), dtype)
    state = Tensor(
        (batch if chosen is None else slots, dim, size), dtype if draw.random() < 0.8 else torch.float32
    )
    bias = Tensor((dim,), dtype) if draw.random() < 0.6 else None
    return [x, state, Tensor((dim, width), dtype), bias, draw.choice((None, "silu")), lengths, chosen]


def selective_scan_update(draw):
    dtype, batch, dim, states = (
        draw.choice(_DTYPES),
        draw.randint(1, 3),
        draw.choice((1, 4, 9)),
        draw.randint(1, 4),
    )
    wide = dtype if draw.random() < 0.5 else torch.float32
    row, column, vector = Tensor((batch, dim), dtype), Tensor((batch, states), dtype), Tensor((dim,), wide)
    optional = [argument if draw.random() < 0.6 else None for argument in (vector, row, vector)]
    state, rates = Tensor((batch, dim, states), wide), Tensor((dim, states), wide)
    return [row, state, row, rates, column, column, *optional, draw.random() < 0.5, draw.random() < 0.5]


def strides_of(draw, shape, *, may_overlap):
    """Dense in a random order, with gaps, expanded, or anything."""
    kind = draw.random()
    if may_overlap and kind < 0.12:
        return tuple(draw.randint(0, 6) for _ in shape)
    order = sorted(range(len(shape)), key=lambda axis: draw.random() if kind < 0.5 else -axis)
    strides, step = [0] * len(shape), draw.choice((1, 1, 1, 2, 3))
    for axis in order:
        strides[axis] = step
        step = step * shape[axis] + draw.choice((0, 0, 0, 1, 4))
    if may_overlap and kind > 0.92:
        strides[draw.randrange(len(shape))] = 0
    return tuple(strides)


class Pattern:
    """A call of an op, its tensors in one piece of memory; int64 tensors are beside it."""

    def __init__(self, op, draw):
        self.op, args = op, globals()[op.name](draw)
        self.names = list(op.signature.parameters)
        into = next(i for i, name in enumerate(self.names) if name in op.mutates)
        layouts = {into: self._layout(draw, args[into], overlaps=0.1)}
        for i, argument in enumerate(args):
            if isinstance(argument, Tensor) and i != into:
                layouts[i] = self._layout(draw, argument, overlaps=0.3)
                same_kind = (argument.shape, argument.dtype) == (args[into].shape, args[into].dtype)
                if same_kind and draw.random() < 0.6:
                    layouts[i] = layouts[into]
        sizes = {i: self._bytes(args[i], strides) for i, strides in layouts.items()}
        first = draw.randrange(8) * args[into].dtype.itemsize
        self.offsets = {}
        for i in layouts:
            item = args[i].dtype.itemsize
            near = (
                first
                if draw.random() < 0.25
                else first + draw.choice((-2, -1, 1, 2, 5)) * args[into].dtype.itemsize
            )
            anywhere = draw.randrange(first + 2 * sizes[into] + 64)
            beside = first + sizes[into] + draw.randrange(64)
            at = first if i == into else draw.choice((near, anywhere, anywhere, beside))
            self.offsets[i] = max(0, at) // item * item if i != into else first
        total = max(at + sizes[i] for i, at in self.offsets.items()) + 64
        # Halves of float32 that are bfloat16: whatever is read as another dtype, the numbers stay within
        # bounds.
        values = torch.randn(total // 2 + 8, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
        self.memory = values.to(torch.bfloat16).view(torch.uint8)
        self.memory = self.memory[: len(self.memory) // 8 * 8]
        self.into, self.layouts, self.specs = into, layouts, args

    @staticmethod
    def _layout(draw, tensor, overlaps):
        return strides_of(draw, tensor.shape, may_overlap=draw.random() < overlaps)

    @staticmethod
    def _bytes(tensor, strides):
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        return (1 + reach) * tensor.dtype.itemsize

    def arguments(self, memory):
        """The call's arguments in a piece of memory."""

        def placed(i, argument):
            if not isinstance(argument, Tensor):
                return argument
            at = self.offsets[i] // argument.dtype.itemsize
            return memory.view(argument.dtype).as_strided(argument.shape, self.layouts[i], at)

        return tuple(placed(i, argument) for i, argument in enumerate(self.specs))

    def apart(self):
        """The same arguments, each in memory of its own."""
        return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in self.arguments(self.memory))

    def mismatch(self, memory, returned):
        """What is wrong after a call, held against the reference on arguments apart; None if nothing is."""
        apart = self.apart()
        expected = self.op.reference(*apart)
        after, right = self.memory.clone(), memory.clone()
        into = self.arguments(after)[self.into]
        into.copy_(apart[self.into])
        written = self.arguments(right)[self.into]
        if not _close(written, into):
            return f"{self.names[self.into]} is off by {(written - into).abs().max()}"
        written.copy_(into)
        if not torch.equal(right, after):
            return f"memory beside {self.names[self.into]} was written"
        if returned is not None and not _close(returned, expected):
            return f"the output is off by {(returned - expected).abs().max()}"
        return None

    def __str__(self):
        placed = {
            self.names[i]: (list(argument.shape), list(self.layouts[i]), self.offsets[i], str(argument.dtype))
            for i, argument in enumerate(self.specs)
            if isinstance(argument, Tensor)
        }
        return f"{self.op.name} {placed}"


def _close(x, y):
    tolerance = _TOLERANCE[y.dtype]
    return x.dtype == y.dtype and torch.allclose(
        x.double(), y.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )
