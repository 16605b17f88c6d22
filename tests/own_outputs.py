"""What a call returns is a tensor of its own, as what torch's own ops return: checks for any route of any op.

Each takes an op, the name of a route and the reference's arguments, and raises where a call does not do so.
"""

import itertools

import torch
from torch.nn.functional import relu, relu_

import turnout
from tests.walk import copy, random_call
from turnout.measure.verify import outputs as outputs_of
from turnout.routing.choose import REFERENCE

DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}  # of gradients, by their dtype


def calls(op, route, device, target, count, seeds=300, gaps=True):
    """Up to `count` random calls of each dtype, of those that the route takes on the device `target`.

    gaps: also calls with tensors that have gaps in memory.
    """
    collected = {dtype: [] for dtype in DTYPES}
    for seed in range(seeds):
        if all(len(room) == count for room in collected.values()):
            break
        args = random_call(op, seed, device)
        room = collected.get(args[0].dtype)
        if room is None or len(room) == count or not args[0].numel():
            continue
        if not gaps and any(x.clone().stride() != x.stride() for x in tensors_of(args)):
            continue
        if not any(route.refuses(op.problem(*args), target)):
            room.append(tuple(copy(x) if isinstance(x, torch.Tensor) else x for x in args))
    assert any(collected.values()), f"no calls of {op.name} {route.name} in {DTYPES} among the random calls"
    return list(itertools.chain(*collected.values()))


def as_tuple(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


def call(op, name, args):
    with turnout.pin(**{op.name: name}):
        return as_tuple(op(*args))


def tensors_of(args):
    return [x for x in args if isinstance(x, torch.Tensor)]


class Storages:
    """Where tensors have their values: a call leaves each where it was, as large as it was, and resizable."""

    def __init__(self, args):
        self.tensors = tensors_of(args)
        self.before = [self.place(x) for x in self.tensors]

    @staticmethod
    def place(x):
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), x.data_ptr()

    def check(self, outputs):
        for x, before in zip(self.tensors, self.before, strict=True):
            assert self.place(x) == before
            assert x.untyped_storage().resizable()
        for y in outputs:
            assert y.untyped_storage().resizable()


def torch_gives_a_view(op, args):
    """Whether torch's own function, where the op is nothing else, returns a view: `torch.inner` does."""
    return op.builtin is not None and any(y._is_view() for y in as_tuple(op.builtin(*args)))


def check_written_later(op, name, args):
    """A call that records no gradients: what it returns is written in place, with and without gradients, and
    nothing else changes by that, neither an argument nor another output."""
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        arguments = tuple(copy(x) if isinstance(x, torch.Tensor) else x for x in args)
        storages = Storages(arguments)
        with mode():
            results = call(op, name, arguments)
            storages.check(results)
            if torch.is_inference_mode_enabled():
                assert_apart(results, arguments, lambda y: y.mul_(2))
                continue
        if name == REFERENCE and torch_gives_a_view(op, arguments):
            continue
        assert not any(y._is_view() for y in results), (op.name, name)
        assert_apart(results, arguments, mul_by_what_wants_gradients)
        storages.check(())
        for y in results:
            assert y.unsqueeze_(0).dim() > 0  # torch refuses that to what `detach` gives


def mul_by_what_wants_gradients(y):
    y.mul_(torch.full_like(y, 2, requires_grad=y.is_floating_point()))


def assert_apart(results, args, write):
    """Writing into one result changes no other one, and no argument."""
    for i, y in enumerate(results):
        others = [*results[:i], *results[i + 1 :], *tensors_of(args)]
        before = [x.detach().clone() for x in others]
        write(y)
        assert all(map(same, others, before))


IN_PLACE = {
    "mul_": (lambda y: y.mul_(2), lambda y: y * 2),
    "relu_": (relu_, relu),
    "+=": (lambda y: y.__iadd__(1), lambda y: y + 1),
}


def check_written_while_recording(op, name, args):
    """Each output is written in place while gradients are recorded: they are those of the call without that,
    and those of the reference, within rounding."""
    count = len([y for y in outputs_of(op, op.reference, args) if y.is_floating_point() and y.numel()])
    for which, (words, (in_place, apart)) in itertools.product(range(count), IN_PLACE.items()):
        actual, outputs = gradients(op, name, args, which, in_place)
        expected, expected_outputs = gradients(op, name, args, which, apart)
        assert all(map(same, outputs, expected_outputs)), (op.name, name, words)
        assert all(map(close, actual, expected)), (op.name, name, words)
    for which in range(count):
        actual, _ = gradients(op, name, args, which, IN_PLACE["mul_"][0])
        expected, _ = gradients(op, REFERENCE, args, which, IN_PLACE["mul_"][1])
        assert actual
        assert all(map(close, actual, expected)), (op.name, name)


def close(x, y):
    """Whether gradients are equal within the rounding of the first's dtype; None is a gradient of zeros."""
    tolerance = 0 if x is None else max(ROUNDING[x.dtype], 2e-3 if x.is_cuda else 0)  # where cuDNN takes TF32
    x, y = (torch.zeros(()).double() if t is None else t.double().cpu().nan_to_num() for t in (x, y))
    return float((x - y).norm()) <= tolerance * (float(y.norm()) + 1)


def same(x, y):
    """Whether values are equal bit for bit; NaN is equal to NaN."""
    x, y = x.detach(), y.detach()
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def wanting_gradients(args):
    """Copies of the arguments, floating-point ones with gradients wanted."""
    return tuple(copy(x).requires_grad_() if is_floating(x) else x for x in args)


def gradients(op, name, args, which, change):
    """Those of all floating-point arguments after `change` of one output, and the outputs after it."""
    arguments = wanting_gradients(args)
    storages = Storages(arguments)
    before = [x.detach().clone() for x in tensors_of(arguments)]
    results = [y for y in call(op, name, arguments) if y.is_floating_point() and y.numel()]
    storages.check(results)
    others = [y.detach().clone() for i, y in enumerate(results) if i != which]
    results[which] = change(results[which])
    assert all(map(same, results[:which] + results[which + 1 :], others))
    weights = [torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape) for y in results]
    recorded = [(y, weight) for y, weight in zip(results, weights, strict=True) if y.requires_grad]
    torch.autograd.backward(*zip(*recorded, strict=True))
    assert all(map(same, tensors_of(arguments), before))
    storages.check(())
    return [x.grad for x in arguments if is_floating(x)], [y.detach() for y in results]
