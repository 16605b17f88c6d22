"""Ops that write into tensors of their caller: overlap, versions, leaves, inference mode, failures after a
write.

`TURNOUT_PATTERNS=10000 pytest -s tests/faults/test_writing.py` (`make fault-test`) tries so many random
patterns of overlap with every op and every CPU route that writes, and prints what became of them.
"""

import contextlib
import gc
import os
import random
import signal
import sys
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

import turnout
from tests.faults.aliasing import WRITING, Pattern
from tests.walk import random_call, runs_on_numba
from turnout.routing import failures
from turnout.routing.choose import Refused
from turnout.routing.device import Device
from turnout.routing.mutation import WriteRefused
from turnout.routing.op import OPS
from turnout.routing.overlap import Layout, overlaps_itself, share_memory

PATTERNS = int(os.environ.get("TURNOUT_PATTERNS", "1500"))
CPU = Device.of("cpu")
MATMUL = OPS["matmul"]
ROW, COLUMN = torch.ones(1, 4096), torch.ones(4096, 1)

writing_ops = pytest.mark.parametrize("op", WRITING, ids=[op.name for op in WRITING])


def written_places(op):
    return [i for i, name in enumerate(op.signature.parameters) if name in op.mutates]


def scribbling(op):
    """A route that fills what it writes with NaN before it reads anything, behind autograd's back."""

    def route(*args):
        apart = list(args)
        for i in written_places(op):
            apart[i] = args[i].clone()
            args[i].data.fill_(torch.nan)
        returned = op.reference(*apart)
        for i in written_places(op):
            args[i].data.copy_(apart[i])
        return returned

    return route


def copied(args):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


@pytest.fixture
def _one_thread():
    """torch's group_norm of a few elements takes milliseconds where two threads share a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def only_route(op, name, monkeypatch, **changes):
    """The op with one route, which is chosen wherever its guard allows; gives a counter of its runs."""
    ran = Counter()
    route = next(iter(op.routes.values())) if name is None else op.routes[name]
    route = replace(route, cost=lambda problem, device: 0.0, **changes)

    def counted(*args, **config):
        ran["route"] += 1
        return original(*args, **config)

    original = route.run
    with monkeypatch.context() as patch:
        patch.setattr(op, "routes", {route.name: replace(route, run=counted, prepare=None)})
        turnout.routing.op.forget_choices()
        yield ran
    turnout.routing.op.forget_choices()


def injected(op, run, monkeypatch, **changes):
    """The op with `run` as its only route, which takes everything."""
    return only_route(
        op,
        None,
        monkeypatch,
        run=run,
        refuses=lambda problem, device: (),
        kernels=(),
        configs=lambda p, d: ({},),
        **changes,
    )


# Overlap

CPU_ROUTES = [(op, name) for op in WRITING for name, route in op.routes.items() if runs_on_numba(route)]


def run_patterns(op, count, ran):
    """Run random patterns; what became of them."""
    counts = Counter()
    for seed in range(count):
        pattern = Pattern(op, random.Random(f"{op.name} {seed}"))
        memory, before = pattern.memory.clone(), ran["route"]
        try:
            with torch.no_grad():
                returned = op(*pattern.arguments(memory))
        except WriteRefused:
            assert torch.equal(memory, pattern.memory), f"seed {seed}: a refused call wrote: {pattern}"
            assert overlaps_itself(Layout.of(pattern.arguments(memory)[pattern.into])), (
                f"seed {seed}: {pattern}"
            )
            counts["refused"] += 1
            continue
        wrong = pattern.mismatch(memory, returned)
        assert wrong is None, f"seed {seed}: {wrong}: {pattern}"
        counts["by the route" if ran["route"] > before else "by the reference"] += 1
    return counts


@pytest.mark.parametrize(("op", "name"), CPU_ROUTES, ids=[f"{op.name}-{name}" for op, name in CPU_ROUTES])
def test_random_overlap_is_right_or_refused(op, name, monkeypatch):
    with only_route(op, name, monkeypatch) as ran:
        counts = run_patterns(op, PATTERNS, ran)
    print(f"\n{op.name} {name}: {dict(counts)}")
    assert min(counts["refused"], counts["by the route"], counts["by the reference"]) > PATTERNS // 200


@pytest.mark.usefixtures("_one_thread")
@writing_ops
def test_a_route_never_reads_what_it_has_written(op, monkeypatch):
    """Every op takes a route that is wrong where tensors overlap, also ops whose routes need a GPU."""
    with injected(op, scribbling(op), monkeypatch, in_place=()) as ran:
        counts = run_patterns(op, PATTERNS, ran)
    print(f"\n{op.name}: {dict(counts)}")
    assert min(counts["refused"], counts["by the route"], counts["by the reference"]) > PATTERNS // 200


def test_overlap_is_decided_exactly():
    draw = random.Random(0)

    def places(layout, start=0):
        offsets = [0]
        for size, stride in zip(layout.shape, layout.strides, strict=True):
            offsets = [offset + k * stride for offset in offsets for k in range(size)]
        return offsets, {
            start + offset * layout.itemsize + byte for offset in offsets for byte in range(layout.itemsize)
        }

    def layout():
        dims = draw.randint(0, 4)
        sizes, strides = (
            tuple(draw.randint(low, high) for _ in range(dims)) for low, high in ((1, 5), (0, 12))
        )
        return Layout(
            sizes if draw.random() < 0.95 else (*sizes[:-1], 0)[:dims], strides, draw.choice((1, 2, 4, 8))
        )

    shared = 0
    for _ in range(4000):
        a, b, distance = layout(), layout(), draw.randint(-60, 60)
        offsets, first = places(a)
        assert overlaps_itself(a) == (len(set(offsets)) < len(offsets)), a
        expected = bool(first & places(b, distance)[1])
        assert share_memory(a, b, distance) == expected, (a, b, distance)
        shared += expected
    assert 500 < shared < 3500


def test_layouts_that_nobody_can_search_count_as_overlapping():
    tangled = Layout((997,) * 6, (1009, 1013, 1019, 1021, 1031, 1033), 2)
    assert overlaps_itself(tangled)
    assert share_memory(tangled, tangled, 7)


@pytest.mark.parametrize("form", ["expanded", "unfolded"])
@writing_ops
def test_a_tensor_that_overlaps_itself_is_refused(op, form):
    """Whichever route it would be, also under torch.compile and on the meta device."""
    for device in ("cpu", "meta"):
        args = list(simple_call(op))
        [i] = written_places(op)
        shape = args[i].shape
        strides = (0, *args[i].stride()[1:]) if form == "expanded" else (1,) * len(shape)
        args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
        args[i] = torch.ones(64, 64, device=device).as_strided(shape, strides)
        with (
            torch.no_grad(),
            pytest.raises(WriteRefused, match=r"share memory; it is written to.*\.clone\(\)"),
        ):
            op(*args)
        if device == "cpu":
            assert torch.equal(args[i], torch.ones(shape))
            with torch.no_grad(), pytest.raises(Exception, match="share memory; it is written to"):
                torch.compile(op.call, fullgraph=True, backend="aot_eager")(*args)
            assert torch.equal(args[i], torch.ones(shape))


def test_two_tensors_that_are_written_must_not_overlap(monkeypatch):
    """No op writes two yet: one that says it writes x as well."""
    op = OPS["rms_norm_silu_into"]
    memory = torch.randn(2, 4, 8)
    x, out = memory[..., :6], memory[..., 2:]
    monkeypatch.setattr(op, "mutates", ("x", "out"))
    for name in ("reference", "cpu-rows"):
        before = memory.clone()
        turnout.routing.op.forget_choices()
        with (
            turnout.pin(rms_norm_silu_into=name),
            pytest.raises(WriteRefused, match="x and out overlap and both are written"),
        ):
            op(x, None, None, out, 1e-6, 2, "rms_norm", True)
        assert torch.equal(memory, before)


def test_other_elements_of_one_buffer_are_no_overlap(monkeypatch):
    """x and out in turns in one buffer: the ranges of their addresses meet, the elements do not."""
    op = OPS["rms_norm_silu_into"]
    with only_route(op, "cpu-rows", monkeypatch) as ran:
        buffer = torch.randn(6, 2, 32)
        x, out = buffer[:, 0], buffer[:, 1]
        expected = turnout.rms_norm_silu(x.clone(), eps=1e-6, dim=1)
        for _ in range(3):
            turnout.rms_norm_silu(x, eps=1e-6, dim=1, out=out)
        assert ran["route"] == 3
        torch.testing.assert_close(out, expected)
        in_place = x.clone()
        turnout.rms_norm_silu(in_place, eps=1e-6, dim=1, out=in_place)  # each element in its own place
        assert ran["route"] == 4
        torch.testing.assert_close(in_place, expected)
        turnout.rms_norm_silu(buffer.flatten()[:64], eps=1e-6, dim=0, out=buffer.flatten()[1:65])
        assert ran["route"] == 4


def test_shifted_overlap_of_input_and_out_is_right():
    buffer = torch.randn(1, 10, 32, 16, 16).transpose(1, 2)
    weight = torch.randn(32)
    expected = turnout.rms_norm_silu(buffer[:, :, :-1].clone(), weight, eps=1e-6)
    turnout.rms_norm_silu(buffer[:, :, :-1], weight, eps=1e-6, out=buffer[:, :, 1:])
    torch.testing.assert_close(buffer[:, :, 1:], expected)


def test_a_pinned_route_refuses_overlap():
    x = torch.randn(4, 33)
    before = x.clone()
    with (
        turnout.pin(rms_norm_silu_into="cpu-rows"),
        pytest.raises(Refused, match="x overlaps out, this route needs x and out apart"),
    ):
        turnout.rms_norm_silu(x[:, :-1], eps=1e-6, dim=1, out=x[:, 1:])
    assert torch.equal(x, before)


def test_final_states_out_is_refused_or_written():
    from turnout.compat.causal_conv1d import causal_conv1d_fn

    x, weight = torch.randn(2, 3, 8), torch.randn(3, 4)
    _, expected = causal_conv1d_fn(x, weight, return_final_states=True)
    memory = torch.zeros(2, 3, 5)
    _, out = causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=memory[..., 2:])
    assert torch.equal(memory[..., 2:], expected)
    assert out.data_ptr() == memory[..., 2:].data_ptr()
    for refused, message in (
        (torch.zeros(1, 3, 3).expand(2, 3, 3), "share memory"),
        (torch.zeros(40).as_strided((2, 3, 3), (6, 1, 1)), "share memory"),
        (torch.zeros(2, 3, 3, requires_grad=True), "is a leaf that requires grad"),
        (torch.zeros(4, 2, 3, 3), "it needs to be"),
    ):
        with pytest.raises(ValueError, match=message):
            causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=refused)
        assert not refused.any()


# Versions, leaves, gradients, inference mode


def simple_call(op):
    """A valid call in float32 with tensors that do not overlap, of two elements or more along each axis."""
    for seed in range(10_000):
        args = random_call(op, seed, torch.device("cpu"))
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        floats = [x for x in tensors if x.is_floating_point()]
        if len(floats) == len(tensors) and all(x.dtype is torch.float32 and min(x.shape) > 1 for x in floats):
            return tuple(torch.randn(x.shape) if isinstance(x, torch.Tensor) else x for x in args)
    raise AssertionError(f"no simple call of {op.name}")


@writing_ops
def test_autograd_notices_what_a_route_has_written(op, monkeypatch):
    with injected(op, scribbling(op), monkeypatch) as ran:
        for compiled in (False, True):
            args = list(simple_call(op))
            [i] = written_places(op)
            version, factor = args[i]._version, torch.ones_like(args[i], requires_grad=True)
            product = (factor * args[i]).sum()  # its backward needs the old values
            run = torch.compile(op.call, fullgraph=True, backend="aot_eager") if compiled else op
            with torch.no_grad():
                run(*args)
            assert args[i]._version > version
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
    assert ran["route"] == 2


@writing_ops
def test_a_view_that_is_written_counts_for_its_base(op, monkeypatch):
    with injected(op, scribbling(op), monkeypatch):
        args = list(simple_call(op))
        [i] = written_places(op)
        base = torch.zeros(2, *args[i].shape)
        args[i] = base[1]
        with torch.no_grad():
            op(*args)
        assert base._version > 0


@writing_ops
def test_leaves_that_require_grad_are_refused_as_torch_refuses_them(op, monkeypatch):
    with injected(op, scribbling(op), monkeypatch) as ran:
        args = list(simple_call(op))
        [i] = written_places(op)
        leaf = args[i] = args[i].requires_grad_()
        before = leaf.detach().clone()
        with pytest.raises(RuntimeError, match="is a leaf that requires grad, and gradients are enabled"):
            op(*args)
        args[i] = leaf[:]
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            op(*args)
        assert torch.equal(leaf, before)
        assert ran["route"] == 0
        with torch.no_grad():
            op(*args)
        assert ran["route"] == 1
        assert not torch.equal(leaf, before)


@writing_ops
def test_gradients_are_the_references(op, monkeypatch):
    """Where an input requires grad, what is written does so afterwards, and gradients are those of the
    reference.
    """
    grads = []
    with injected(op, scribbling(op), monkeypatch) as ran:
        torch.manual_seed(0)
        call = simple_call(op)
        for run in (op.reference, op):
            args = copied(call)
            [i] = written_places(op)
            leaf, args[0] = args[0].requires_grad_(), args[0] * 1
            run(*args)
            assert args[i].requires_grad
            args[i].square().sum().backward()
            grads.append(leaf.grad)
        assert ran["route"] == 0
        assert "gradients are wanted" in str(op.verdict(op.key(tuple(args))).refused)
    assert torch.equal(*grads)


@writing_ops
def test_inference_mode(op, monkeypatch):
    [i] = written_places(op)
    with injected(op, scribbling(op), monkeypatch) as ran:
        with torch.inference_mode():
            frozen = copied(simple_call(op))
            expected = copied(frozen)
            op.reference(*expected)
            op(*frozen)
            assert ran["route"] == 1
            torch.testing.assert_close(frozen[i], expected[i])
            plain = copied(frozen)
        before = frozen[i].clone()
        with pytest.raises(
            RuntimeError, match=r"is a tensor of inference mode, which is off.*torch.inference_mode\(\)"
        ):
            op(*frozen)
        assert torch.equal(frozen[i], before)
        assert ran["route"] == 1
        plain[i] = before.clone()  # an ordinary tensor, read ones of inference mode
        version = plain[i]._version
        with torch.inference_mode():
            op(*plain)
        assert plain[i]._version > version
        assert ran["route"] == 2


@pytest.mark.parametrize("name", [None, "cpu-rows"])
def test_overlap_under_fullgraph(name):
    def step(memory):
        turnout.rms_norm_silu(memory[:, :-1], eps=1e-6, dim=1, out=memory[:, 1:])
        return memory * 2

    def of_two(x, out):
        turnout.rms_norm_silu(x, eps=1e-6, dim=1, out=out)
        return out * 2

    memory = torch.randn(4, 33)
    expected = memory.clone()
    expected[:, 1:] = turnout.rms_norm_silu(memory[:, :-1].clone(), eps=1e-6, dim=1)
    with contextlib.ExitStack() as stack:
        if name is not None:
            stack.enter_context(turnout.pin(rms_norm_silu_into=name))
        for run in (step, lambda memory: of_two(memory[:, :-1], memory[:, 1:])):
            torch.compiler.reset()
            compiled = memory.clone()
            torch.compile(run, fullgraph=True, backend="aot_eager")(compiled)
            torch.testing.assert_close(compiled, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@writing_ops
def test_gradients_under_fullgraph(op, dynamic, monkeypatch):
    """As in plain torch, whatever route would be chosen without gradients, with known sizes and without."""
    with injected(op, scribbling(op), monkeypatch) as ran:
        [i] = written_places(op)
        call, grads = simple_call(op), []

        def step(*args):
            op.call(*args)
            return args[i] * 2

        for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
            args = copied(call)
            leaf = args[0].requires_grad_()
            run(*args).square().sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
        assert ran["route"] == 0


# Failures


def failing_after(op, error, written):
    """A route that writes `written` of what it is to write, and fails."""

    def route(*args):
        for i in written_places(op) if written else ():
            args[i].data.select(0, 0).fill_(77)
        raise error

    return route


LAUNCH_FAILURES = [
    MemoryError("no memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 8 bytes."
    ),
    type("OutOfResources", (Exception,), {})("out of resource: shared memory, Required: 300000"),
    type("CompilationError", (Exception,), {})("at 3:4: no such thing"),
]
MISTAKES = [
    RuntimeError("shapes do not fit"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("no"),
    IndexError("no"),
    AssertionError("no"),
    KeyError("no"),
    NotImplementedError("no"),
    TypeError("no"),
    OSError("no"),
    ZeroDivisionError("no"),
    StopIteration("no"),
    TimeoutError("no"),
]


@pytest.mark.parametrize("error", LAUNCH_FAILURES, ids=lambda error: f"{type(error).__name__} {error}"[:40])
@writing_ops
def test_no_route_follows_one_that_may_have_written(op, error, monkeypatch):
    args = simple_call(op)
    with (
        injected(op, failing_after(op, error, written=True), monkeypatch, fails_before_writing=False),
        torch.no_grad(),
    ):
        copies = copied(args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(type(error)) as raised:
                op(*copies)
        assert raised.value is error
        if sys.version_info >= (3, 11):
            assert "may have written parts of" in raised.value.__notes__.pop()
        [i] = written_places(op)
        assert (copies[i].select(0, 0) == 77).all()  # as the route has left it
        assert torch.equal(copies[i].select(0, 1), args[i].select(0, 1))
        fresh = copied(args)
        expected = copied(args)
        op(*fresh)  # another route takes it
        op.reference(*expected)
        assert torch.equal(fresh[i], expected[i])


@pytest.mark.parametrize("error", LAUNCH_FAILURES, ids=lambda error: f"{type(error).__name__} {error}"[:40])
@writing_ops
def test_a_failure_before_any_write_falls_through(op, error, monkeypatch):
    args = simple_call(op)
    [i] = written_places(op)
    with (
        injected(op, failing_after(op, error, written=False), monkeypatch, fails_before_writing=True),
        torch.no_grad(),
    ):
        copies, expected = copied(args), copied(args)
        with pytest.warns(turnout.TurnoutWarning, match="failed at launch"):
            op(*copies)
        op.reference(*expected)
        assert torch.equal(copies[i], expected[i])


@pytest.mark.parametrize("error", MISTAKES, ids=lambda error: f"{type(error).__name__} {error}"[:40])
def test_anything_but_a_launch_failure_is_raised(error, monkeypatch):
    assert failures.kind_of(error) is None

    def fail(*args):
        raise error

    with only_route(MATMUL, "cpu-chunks", monkeypatch, run=fail):
        for _ in range(2):
            with pytest.raises(type(error)) as raised:
                turnout.matmul(ROW, COLUMN)
            assert raised.value is error
        assert len(MATMUL.failed) == 0


def test_numba_that_does_not_compile_is_a_launch_failure(monkeypatch):
    from numba.core.errors import TypingError

    def fail(*args):
        raise TypingError("no such type")

    with only_route(MATMUL, "cpu-chunks", monkeypatch, run=fail) as ran:
        with pytest.warns(turnout.TurnoutWarning, match="failed at launch: TypingError"):
            assert turnout.matmul(ROW, COLUMN).item() == 4096
        assert turnout.matmul(ROW, COLUMN).item() == 4096
        assert ran["route"] == 1


class Memory:
    """A route that needs memory, and a clock."""

    def __init__(self):
        self.missing, self.seconds, self.tries = True, 100.0, []

    def run(self, a, b):
        self.tries.append(self.seconds)
        if self.missing:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.matmul(a, b)


def test_a_route_is_tried_again_when_there_may_be_memory(monkeypatch):
    memory = Memory()
    monkeypatch.setattr(MATMUL.failed, "now", lambda: memory.seconds)
    with (
        only_route(MATMUL, "cpu-chunks", monkeypatch, run=memory.run),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        for _ in range(1000):  # 100 s, a call every 0.1 s
            assert turnout.matmul(ROW, COLUMN).item() == 4096
            memory.seconds += 0.1
        waits = [
            round(later - earlier) for earlier, later in zip(memory.tries, memory.tries[1:], strict=False)
        ]
        assert waits == [1, 2, 4, 8, 16, 32]
        assert len(warned) == 1
        memory.missing = False
        for _ in range(1000):
            turnout.matmul(ROW, COLUMN)
            memory.seconds += 0.1
        before = len(memory.tries)
        for _ in range(5):
            turnout.matmul(ROW, COLUMN)
        assert len(memory.tries) == before + 5  # each call takes it again
        assert len(warned) == 1


def test_other_failures_are_not_tried_again(monkeypatch):
    seconds, tries = [100.0], []
    monkeypatch.setattr(MATMUL.failed, "now", lambda: seconds[0])

    def fail(*args):
        tries.append(1)
        raise type("OutOfResources", (Exception,), {})("shared memory")

    with only_route(MATMUL, "cpu-chunks", monkeypatch, run=fail):
        with pytest.warns(turnout.TurnoutWarning):
            turnout.matmul(ROW, COLUMN)
        for _ in range(100):
            seconds[0] += 1000.0
            turnout.matmul(ROW, COLUMN)
    assert len(tries) == 1


def test_failures_of_many_shapes_are_bounded_and_announced_once(monkeypatch):
    memory = Memory()
    monkeypatch.setattr(failures, "_MOST_CALLS", 64)
    with (
        only_route(MATMUL, "as-dot", monkeypatch, run=memory.run),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        for n in range(1, 500):
            turnout.matmul(torch.ones(1, n), torch.ones(n, 1))
    assert len(memory.tries) == 499
    assert len(MATMUL.failed) == 64
    assert len(warned) == 1


# Exceptions of signal handlers


class Alarm(Exception):
    """What a handler raises."""


OUTSIDE = [Alarm("late"), RuntimeError("late"), TypeError("late"), AttributeError("late")]
CALLS = {
    "right": (torch.ones(3), torch.ones(3)),
    "None": (torch.ones(3), None),
    "list": ([1.0], torch.ones(1)),
}


@pytest.mark.parametrize("error", OUTSIDE, ids=repr)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_from_outside_is_never_taken_for_a_mistake_in_the_arguments(
    error, at, call, monkeypatch
):
    """It arrives while the cache key is built, the first time or (with wrong arguments) the second time."""
    scope, looks = OPS["dot"].call.__globals__, []
    settings = scope["settings"]

    def interrupted():
        looks.append(1)
        if len(looks) == at:
            raise error
        return settings()

    monkeypatch.setitem(scope, "settings", interrupted)
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(turnout.dot(*CALLS[call]).item())
        except Exception as raised:
            outcomes.append(raised)
    assert outcomes.count(error) == 1
    own = [outcome for outcome in outcomes if outcome is not error]
    if call == "right":
        assert own == [3.0, 3.0]
    else:  # torch's own words
        assert all(isinstance(outcome, TypeError) and "dot()" in str(outcome) for outcome in own)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGALRM")
@pytest.mark.timeout(300, method="thread")
def test_no_handlers_exception_is_lost_in_calls_of_ops():
    raised = caught = 0
    inside = False

    def handle(number, frame):
        nonlocal raised
        if inside:
            raised += 1
            raise RuntimeError("from the handler")

    a, b = torch.ones(8), torch.ones(8)
    before = signal.signal(signal.SIGALRM, handle)
    draw = random.Random(0)
    gc.disable()  # Python itself loses what is raised in a callback of the collector, such as hypothesis's
    try:
        for _ in range(1500):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 6e-5))
                inside = True
                for _ in range(40):
                    turnout.dot(a, b)
                inside = False
            except RuntimeError:
                inside = False
                caught += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert caught == raised
    assert raised > 300
