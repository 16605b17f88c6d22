"""What a `Prepared` holds launches the same for other addresses as the route itself would, and holds no
tensor.
"""

import gc
import inspect
import threading
import weakref

import pytest
import torch

import turnout
from tests.crosscompile.chosen import calls as calls_of_cases
from tests.walk import CPU, H200, LAUNCHING, calls, elsewhere, prepared_routes
from turnout.launch import Launch, LaunchPlan, launcher, prepare_from_plan, runs_plan
from turnout.launch.descriptors import described, encode, pattern
from turnout.launch.recording import recorded
from turnout.ops.convolution.gpu import launching
from turnout.ops.convolution.layout import LAST
from turnout.routing import dispatch_cache
from turnout.routing.op import OPS, forget_choices
from turnout.routing.prepared import Prepared, kept, worked_out_once

pytest.importorskip("triton")


@pytest.fixture
def launches():
    """What would be launched on an H200."""
    with recorded(H200) as launches:
        yield launches


def launched(launches, run, args):
    """The launches of a call: tensors by argument and offset, new ones by the order in which they come."""
    launches.clear()
    result = run(*args)
    storages = {x.untyped_storage()._cdata: i for i, x in enumerate(args) if isinstance(x, torch.Tensor)}

    def tensor(x):
        if x is None:
            return None
        base = x if isinstance(x, torch.Tensor) else x.base
        place = storages.setdefault(base.untyped_storage()._cdata, len(args) + len(storages))
        outline = (x.shape, x.stride()) if x is base else (x.shape, x.strides, x.block_shape, x.layout)
        return place, base.storage_offset() * base.element_size(), base.dtype, *outline

    new = (result,) if isinstance(result, torch.Tensor) else result or ()
    outputs = [(x.shape, x.stride(), x.dtype, storages.get(x.untyped_storage()._cdata)) for x in new]
    return [each._replace(tensors=[*map(tensor, each.tensors)]) for each in launches], type(result), outputs


def aliased(args):
    """The same arguments, those that lie alike in the same memory."""
    alike = {}
    return tuple(
        alike.setdefault((x.shape, x.stride(), x.dtype), x)
        if isinstance(x, torch.Tensor) and x.numel()
        else x
        for x in args
    )


@prepared_routes
def test_prepared_routes_launch_the_same(op, route, launches):
    """For the call they were prepared for and for others: other addresses, unaligned ones, arguments in one
    place.
    """
    direct = 0
    for args in calls(op, route, CPU, H200, 30):
        config = route.configs(op.problem(*args), H200)[0]
        args = elsewhere(args)
        for first in (args, aliased(args), elsewhere(args, off=1)):
            prepared = route.prepared(first, config)
            direct += prepared.is_direct
            for arguments in (args, args, elsewhere(args), elsewhere(args, off=1), aliased(args)):
                plain = launched(launches, lambda *a: route.run(*a, **config), arguments)  # noqa: B023
                assert launched(launches, prepared.call, arguments) == plain
    assert direct > 10 or route.prepare is not prepare_from_plan  # convolutions: see the cases below


CASES = [(op, route) for op, route in LAUNCHING if route.prepare is not None and op.cases()]


@pytest.mark.parametrize(("op", "route"), CASES, ids=[f"{op.name}-{route.name}" for op, route in CASES])
def test_calls_of_models_are_direct(op, route, launches, monkeypatch):
    """Prepared calls of all cases launch what the route launches; most of them without the route's own
    function.
    """
    monkeypatch.setattr(launching, "torch_format", lambda input, *rest: LAST[input.dim()])  # cuDNN's
    direct, requested = 0, 0
    for _, problem, args in calls_of_cases(op):
        if any(route.refuses(problem, H200)):
            continue
        for config in route.configs(problem, H200):
            prepared = route.prepared(args, config)
            plain = launched(launches, lambda *a: route.run(*a, **config), args)  # noqa: B023
            assert launched(launches, prepared.call, args) == plain
            direct, requested = direct + prepared.is_direct, requested + 1
    assert direct > 0.5 * requested or not requested


@prepared_routes
def test_prepared_holds_no_tensor(op, route, launches):
    """Neither arguments nor outputs outlive their owner because a call was prepared for them."""
    alive, every = [], []
    for args in calls(op, route, CPU, H200, 8):
        args = elsewhere(args)
        prepared = route.prepared(args, route.configs(op.problem(*args), H200)[0])
        results = prepared.call(*args)
        outputs = (results,) if isinstance(results, torch.Tensor) else results or ()
        every.append(prepared)
        alive += [weakref.ref(x) for x in (*args, *outputs) if isinstance(x, torch.Tensor) and x.numel()]
        launches.clear()
    del args, results, outputs
    gc.collect()
    assert [x() for x in alive] == [None] * len(alive)
    assert len(every) == 8


def norm_of(x, weight):
    route = OPS["rms_norm_silu"].routes["rows"]
    args = (x, weight, None, 1e-6, 1, "rms_norm", False)
    return route, args, route.configs(OPS["rms_norm_silu"].problem(*args), H200)[0]


def test_a_route_that_copies_an_argument_is_not_direct(launches):
    route, args, config = norm_of(torch.zeros(4, 64), torch.zeros(64, 2)[:, 0])
    prepared = route.prepared(args, config)
    assert not prepared.is_direct
    assert launched(launches, prepared.call, args)[0][0].tensors[1][3:] == (torch.Size([64]), (1,))


def test_arguments_in_one_storage_get_their_own_addresses(launches):
    """Rows of one tensor, as queries and keys of one projection are: each launch has its own."""
    both = torch.zeros(2, 4, 64)
    op = OPS["gated_add"]
    route, args = op.routes["rows"], op.arguments(both[:1], both[1:], None)
    prepared = route.prepared(args, route.configs(op.problem(*args), H200)[0])
    assert prepared.is_direct
    apart = (torch.zeros(1, 4, 64), torch.zeros(1, 4, 64), None)
    prepared.call(*apart)
    assert [x.data_ptr() for x in launches[0].tensors[:2]] == [x.data_ptr() for x in apart[:2]]


def test_outputs_are_new_at_each_call(launches):
    route, args, config = norm_of(torch.zeros(4, 64), torch.zeros(64))
    prepared = route.prepared(args, config)
    assert len({x.data_ptr() for x in [prepared.call(*args) for _ in range(5)]}) == 5


def test_writes_into_the_tensor_that_was_passed(launches):
    op = OPS["rms_norm_silu_into"]
    x, weight, out = torch.zeros(4, 64), torch.zeros(64), torch.zeros(4, 64)
    args = (x, weight, None, out, 1e-6, 1, "rms_norm", False)
    route = op.routes["rows"]
    prepared = route.prepared(args, route.configs(op.problem(*args), H200)[0])
    assert prepared.is_direct
    assert prepared.call(*args) is None
    assert launches[0].tensors[-1].data_ptr() == out.data_ptr()


def test_a_planned_route_has_the_signature_of_its_plan():
    route = OPS["norm_rope"].routes["one-pass"]
    assert {"tokens", "heads", "chunks", "warps", "by_head"} <= set(inspect.signature(route.run).parameters)


def test_memory_missing_while_a_call_is_prepared_leaves_it_to_the_route(launches):
    """Planning allocates outputs once more than a call does."""

    @runs_plan
    def route(x):
        raise torch.OutOfMemoryError("no memory for two outputs")

    prepared = Prepared(route, {})
    assert prepare_from_plan(prepared, (torch.zeros(4),)) is None


def test_memory_at_an_odd_place_of_a_new_tensor_is_not_direct(launches):
    """Compiled kernels count on addresses that 16 bytes divide."""

    @runs_plan
    def route(x):
        out = torch.empty(8)
        return LaunchPlan((Launch(launched, 1, (x, out[1:]), (), {}, 4),), out)

    assert prepare_from_plan(Prepared(route, {}), (torch.zeros(4),)) is None


# What is kept


def test_recording_ends_with_its_block():
    from turnout.routing.device import Device

    with recorded(H200):
        assert Device.of("cpu") is H200
    assert launcher.recording.get() is None
    assert Device.of("cpu").type == "cpu"


def test_worked_out_once_keeps_results_in_one_prepared():
    requested = []

    @worked_out_once
    def double(n):
        requested.append(n)
        return None if n == 7 else 2 * n

    first, second = (Prepared(lambda: [double(3), double(3), double(7), double(7)], {}) for _ in range(2))
    assert first.call() == second.call() == first.call() == [6, 6, None, None]
    assert requested == [3, 7, 3, 7]
    assert [double(3), double(3)] == [6, 6]  # outside of all routes nothing is kept
    assert requested == [3, 7, 3, 7, 3, 3]


def test_a_route_inside_of_another_keeps_its_own():
    inner = Prepared(lambda: kept("key", object), {})
    outer = Prepared(lambda: (kept("key", object), inner.call(), kept("key", object)), {})
    mine, theirs, repeated = outer.call()
    assert mine is repeated
    assert theirs is not mine
    assert inner.call() is theirs


def test_what_one_prepared_keeps_is_bounded():
    prepared = Prepared(lambda n: kept(n, lambda: n), {})
    for n in range(10_000):
        assert prepared.call(n) == n
    assert len(prepared.values) <= 256


def test_descriptors_are_encoded_for_their_address_alone(monkeypatch):
    """As many as an allocator hands out in turn are kept; none holds the memory."""
    import turnout.launch.descriptors as tma

    encoded = []

    def make(descriptor, metadata):
        encoded.append(descriptor.base.data_ptr())
        return [f"map of {descriptor.base.data_ptr()}", *descriptor.shape, *descriptor.strides]

    class Kernel:
        class metadata:
            tensordesc_meta = (None,)

    monkeypatch.setattr(tma, "_encoder", lambda: (make, ()))
    block = pattern((64, 64), (64, 1), torch.bfloat16, (64, 64))
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    for address in (16, 32, 16, x.data_ptr()):
        assert encode(described(x, block), address, Kernel, 0)[0] == f"map of {address}"
    assert encoded == [16, 32, x.data_ptr()]
    for address in range(0, 16 * 5000, 16):
        encode(block, address, Kernel, 0)
    assert len(block.encoded) <= 256
    alive = weakref.ref(x)
    del x
    assert alive() is None


# What owns it


def prepared_objects():
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is Prepared]


def test_prepared_calls_go_with_the_dispatch_cache(monkeypatch, launches):
    """They are as many as its entries, and none is left when it is cleared."""
    forget_choices()
    monkeypatch.setattr(dispatch_cache, "MOST_CALLS", 16)
    before = len(prepared_objects())
    with torch.no_grad(), turnout.pin(dot="two-stage"):
        for n in range(1, 300):
            turnout.dot(torch.ones(n), torch.ones(n))
            launches.clear()
        assert len(OPS["dot"].dispatch_cache) <= 16
        assert before < len(prepared_objects()) <= before + 16
    forget_choices()
    assert len(prepared_objects()) <= before


def test_threads_share_what_is_prepared_first(launches):
    """Eight threads make the first call at once: all are right, and one of their choices is kept."""
    op = OPS["rms_norm_silu"]
    for round in range(20):
        forget_choices()
        x, weight = torch.zeros(4 + round, 64), torch.zeros(64)
        barrier, results = threading.Barrier(8), []

        def call(x=x, weight=weight, barrier=barrier, results=results):
            barrier.wait()
            results.extend(turnout.rms_norm_silu(x, weight, eps=1e-6, dim=1).shape for _ in range(5))

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [x.shape] * 40
        assert len(op.dispatch_cache) == 1


def test_a_choice_from_before_a_table_changed_is_not_cached_after(monkeypatch):
    op = OPS["dot"]
    forget_choices()
    chosen = op._chosen

    def forgetting(args):
        run = chosen(args)
        forget_choices()  # as another thread may, in the middle of this one's choice
        return run

    monkeypatch.setattr(op, "_chosen", forgetting)
    assert turnout.dot(torch.ones(3), torch.ones(3)) == 3
    assert op.dispatch_cache == {}
    monkeypatch.undo()
    assert turnout.dot(torch.ones(3), torch.ones(3)) == 3
    assert len(op.dispatch_cache) == 1
