"""On a real GPU: every route x every case against float64, and what only a GPU shows: streams, graphs, big
tensors, memory.
"""

import functools
import threading
import time

import pytest
import torch

import turnout
from tests.walk import (
    contractions,
    copy,
    elsewhere,
    equal,
    gpu_routes,
    launching_routes,
    lets_pass,
    planned_routes,
    random_call,
)
from turnout.measure.tune import measure, peak_mib
from turnout.measure.verify import Verifier, outputs
from turnout.routing.device import Device
from turnout.routing.op import OPS

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")

CASES = [(op, case) for op in OPS.values() for case in op.cases()]
cases = pytest.mark.parametrize(
    ("op", "case"), CASES, ids=[f"{op.name}-{case}".replace(" ", "-") for op, case in CASES]
)


@cases
def test_every_route_takes_every_case_right(op, case):
    """In its first configuration; `tune` holds the others to the same before it times them, and nothing else
    takes them.
    """
    args = op.arguments(*case.make(GPU, 1))
    trial = Verifier(op, args)
    device, problem = Device.of(GPU), op.problem(*args)
    for route in op.routes.values():
        if any(route.refuses(problem, device)):
            continue
        for config in route.configs(problem, device)[:1]:
            run = route.prepared(args, config).call
            assert trial.mismatch(route.numerics, run) is None, (route.name, config)
            actual, repeated = outputs(op, run, args), outputs(op, run, args)
            assert all(torch.equal(x, y) for x, y in zip(actual, repeated, strict=True)), (
                "not the same from run to run"
            )


def test_the_fast_launch_is_active():
    """Kernels are launched by address: without that every call takes the host 10 to 20 us more."""
    from turnout.launch import support
    from turnout.launch.direct import DirectLauncher

    assert support.fast_launch() is None
    x = torch.randn(1, 16, 128, 128, dtype=torch.bfloat16, device=GPU).to(memory_format=torch.channels_last)
    weight = torch.randn(512, 16, 3, 3, dtype=torch.bfloat16, device=GPU).to(
        memory_format=torch.channels_last
    )
    op, device = OPS["conv2d"], Device.of(GPU)
    route = op.routes["implicit-gemm-hopper" if device.capability == (9, 0) else "implicit-gemm"]
    args = op.arguments(x, weight, padding=1)
    prepared = route.prepared(args, route.configs(op.problem(*args), device)[0])
    prepared.call(*args)
    launchers = [value for value in prepared.values.values() if isinstance(value, DirectLauncher)]
    assert launchers
    assert all(launcher.run is not None for launcher in launchers)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.mutates], ids=lambda op: op.name)
def test_measuring_leaves_the_arguments_as_they_are(op):
    """Of an op that writes into some: bench holds the routed call against them afterwards."""
    args = op.arguments(*op.cases()[0].make(GPU, 0))
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    measure(op, args, seconds=0.01)
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True) if isinstance(x, torch.Tensor))


@gpu_routes
def test_random_layouts_are_exact(op, route):
    """Every call may be a kernel of its own to compile, hence the limit."""
    count, end = 0, time.monotonic() + 3
    device = Device.of(GPU)
    for seed in range(2000):
        if count > 5 and (count == 80 or time.monotonic() > end):
            break
        args = random_call(op, seed, GPU)
        if any(route.refuses(op.problem(*args), device)):
            continue
        count += 1
        for config in route.configs(op.problem(*args), device)[:1]:
            assert equal(op, functools.partial(route.run, **config), args), seed
    assert count > 5


@launching_routes
def test_nan_and_inf_pass_through(op, route):
    """Through the kernels that are ours."""
    count, end = 0, time.monotonic() + 2
    device = Device.of(GPU)
    for seed in range(2000):
        if count > 2 and time.monotonic() > end:
            break
        args = random_call(op, seed, GPU)
        if (
            not args[0].is_floating_point()
            or not args[0].numel()
            or any(route.refuses(op.problem(*args), device))
        ):
            continue
        count += 1
        config = route.configs(op.problem(*args), device)[0]
        assert lets_pass(op, functools.partial(route.run, **config), args) is None, seed
    assert count > 2


def usable_call(op, route):
    """A floating-point call that the route takes, in layouts that a clone keeps; in others only where it
    takes no such.
    """
    result = None
    for seed in range(4000):
        args = random_call(op, seed, GPU)
        if (
            not args[0].is_floating_point()
            or args[0].numel() <= 8
            or any(route.refuses(op.problem(*args), Device.of(GPU)))
        ):
            continue
        if clones_keep(args):
            return args
        if all(copy(x).stride() == x.stride() for x in args if isinstance(x, torch.Tensor)):
            result = result or args
    assert result is not None, "no call found"
    return result


def clones_keep(args):
    """Whether no tensor has gaps, which a clone would close."""
    return all(x.clone().stride() == x.stride() for x in args if isinstance(x, torch.Tensor))


def leaf(x):
    """A copy in the same layout that wants gradients."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return copy(x).requires_grad_()


def launching_first(op):
    """The first route of an op that launches kernels of ours; else the first of all."""
    return next((route for route in op.routes.values() if route.kernels), next(iter(op.routes.values())))


@gpu_routes
def test_pinned_under_opcheck_compile_and_gradients(op, route):
    args = usable_call(op, route)
    with turnout.pin(**{op.name: route.name}):
        if clones_keep(args):  # it calls the op with clones
            torch.library.opcheck(op.opaque, args)
        torch.compiler.reset()
        backend = (
            "inductor" if route is launching_first(op) else "aot_eager"
        )  # inductor: one route of each op, it takes long
        compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend=backend)
        assert equal(op, compiled, args)
        if op.mutates:
            return
        ours, theirs = ([leaf(x) for x in args] for _ in range(2))
        sum(y.float().sum() for y in outputs(op, op, tuple(ours))).backward()
        sum(y.float().sum() for y in outputs(op, op.reference, tuple(theirs))).backward()
    for x, y in zip(ours, theirs, strict=True):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            mine, their = (torch.zeros_like(t) if t.grad is None else t.grad for t in (x, y))
            torch.testing.assert_close(mine, their)


@gpu_routes
def test_graph_capture_side_stream_and_threads(op, route):
    args = usable_call(op, route)
    assert equal(op, route.run, args)

    def right(actual):
        return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))

    with turnout.pin(**{op.name: route.name}):
        expected = outputs(op, op, args)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            actual = outputs(op, op, args)
        stream.synchronize()
        assert right(actual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = outputs(op, op, args)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert right(actual)
    problems = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()), turnout.pin(**{op.name: route.name}):
            for _ in range(50):
                actual = outputs(op, op, args)
                torch.cuda.current_stream().synchronize()
                if not right(actual):
                    problems.append(actual)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not problems


@contractions
def test_unaligned_views(op):
    """A view that starts at an odd element has no 16-byte alignment; kept kernels must not be taken for
    another alignment.
    """
    for seed in range(40):
        args = random_call(op, seed, GPU)
        if args[0].dtype is not torch.bfloat16:
            continue
        shifted = tuple(
            torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape) if isinstance(x, torch.Tensor) else x
            for x in args
        )
        for arguments in (args, shifted, args):
            assert equal(op, op, arguments)


@pytest.mark.parametrize("name", ["single-launch", "two-stage"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_repeated_launches_take_what_is_new(name, dtype):
    """Other addresses, another alignment, another stream, a profiler that begins to listen."""
    from triton import knobs

    heard = []
    room = torch.arange(60007, device=GPU).remainder(7).to(dtype) * (1 if dtype is torch.bfloat16 else 1j)
    vectors = [room[first : first + 30000] for first in (0, 30000, 1, 16, 30007)]
    hook = knobs.runtime.launch_enter_hook
    with turnout.pin(dot=name):
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            for listening in (False, True, False):
                if listening:
                    hook.add(heard.append)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    actual = [turnout.dot(a, b) for a in vectors for b in vectors]
                if listening:
                    hook.remove(heard.append)
                torch.cuda.synchronize()
                wanted = [
                    torch.dot(a.to(torch.complex128), b.to(torch.complex128))
                    for a in vectors
                    for b in vectors
                ]
                assert all(
                    torch.equal(x, y.to(dtype) if dtype.is_complex else y.real.to(dtype))
                    for x, y in zip(actual, wanted, strict=True)
                )
    assert len(heard) == 2 * len(wanted)


def names_of_launches(heard):
    """What Triton has told a hook, as the names of kernels."""
    return [told.get()["name"] for told in heard]


@planned_routes
def test_a_prepared_call_takes_what_is_new(op, route):
    """Other addresses, another alignment, another stream, a profiler that begins to listen: it hears of the
    launches of the route's own function."""
    from triton import knobs

    heard, count = [], 0
    hook, device, stream = knobs.runtime.launch_enter_hook, Device.of(GPU), torch.cuda.Stream()
    for seed in range(2000):
        args = elsewhere(random_call(op, seed, GPU))
        if any(route.refuses(op.problem(*args), device)):
            continue
        config = route.configs(op.problem(*args), device)[0]
        prepared, plain = route.prepared(args, config), functools.partial(route.run, **config)
        if not prepared.is_direct:  # something is moved before the launch
            continue
        count += 1
        launched = {}
        for listening, off in (
            (False, 0),
            (False, 0),
            (True, 0),
            (False, 0),
            (False, 1),
            (True, 1),
            (False, 0),
        ):
            arguments = elsewhere(args, off)
            if listening:
                hook.add(heard.append)
            wanted = outputs(op, plain, arguments)
            if listening:
                launched[off], heard[:] = names_of_launches(heard), []
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                actual = outputs(op, prepared.call, arguments)
            if listening:
                hook.remove(heard.append)
                assert names_of_launches(heard) == launched[off] != [], (seed, off)
                heard.clear()
            stream.synchronize()
            assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True)), (seed, listening, off)
            assert [(x.dtype, x.stride()) for x in actual] == [(x.dtype, x.stride()) for x in wanted]
        if count == 4:
            break
    assert count == 4
    assert heard == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_sums_in_parts_at_the_same_time(dtype):
    """The last program to end adds up the parts: no two kernels that may run at once count in one place."""
    vectors = [torch.randint(-3, 4, (400_000 + 1000 * i,), device=GPU).to(dtype) for i in range(4)]
    batches = torch.randint(-3, 4, (24, 1, 40_000), device=GPU).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    wanted = [torch.dot(x.to(wide), x.to(wide)).to(dtype) for x in vectors]
    wanted_batches = (batches.to(wide) * batches.to(wide)).sum(2, keepdim=True).to(dtype)
    streams = [torch.cuda.Stream() for _ in vectors]
    torch.cuda.synchronize()
    with turnout.pin(dot="two-stage", matmul="two-stage"):
        graphs, results = [], []
        for x in vectors:
            with torch.cuda.stream(streams[0]):
                turnout.dot(x, x)
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=streams[0]):
                results.append(turnout.dot(x, x))
        eager = []
        for _ in range(50):
            for x, stream, graph in zip(vectors, streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
                    eager.append((turnout.dot(x, x), turnout.matmul(batches, batches.mT)))
        torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(results, wanted, strict=True))
    assert all(
        torch.equal(x, wanted[i % 4]) and torch.equal(y, wanted_batches) for i, (x, y) in enumerate(eager)
    )


def test_room_for_parts_is_no_graphs():
    """What is kept from call to call must not lie in memory that a graph takes back: torch.compile looks for
    that, and says so.
    """
    a, b = torch.randint(-3, 4, (2, 400_000), device=GPU).float()
    wanted = torch.dot(a.double(), b.double()).float()
    pool = torch.cuda.MemPool()
    with turnout.pin(dot="two-stage"):
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(pool):
            result = turnout.dot(a, b)
        torch.cuda.synchronize()
        assert result == wanted
        del result
        assert not [
            block
            for segment in pool.snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        step = torch.compile(lambda x, y: turnout.dot(x, y) + 1, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert step(a, b) == wanted + 1


@pytest.mark.parametrize("name", ["single-launch", "two-stage"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_of_more_than_2_31_elements(name, dtype):
    length = 2**31 + 12345
    a = torch.zeros(length, dtype=dtype, device=GPU)
    b = torch.zeros(length, dtype=dtype, device=GPU)
    for place, value in ((0, 1.0), (2**31 - 1, 2.0), (2**31, 3.0), (length - 1, 4.0)):
        a[place], b[place] = value, value
    with turnout.pin(dot=name, matmul=name):
        assert turnout.dot(a, b).item() == 30
        assert turnout.matmul(a[None], b[:, None]).item() == 30
    strided = torch.zeros(3, 2**30, dtype=dtype, device=GPU)  # places times strides pass 2^31
    strided[2] = 1
    column = strided[:, -1]
    with turnout.pin(dot=name):
        assert turnout.dot(column, column).item() == 1


@pytest.mark.parametrize("name", ["single-launch", "two-stage"])
def test_memory_is_a_constant(name):
    a, b = torch.randn(10_000_000, device=GPU), torch.randn(10_000_000, device=GPU)
    with turnout.pin(dot=name):
        turnout.dot(a, b)
        assert peak_mib(turnout.dot, (a, b)) < 0.1


def test_mixed_devices_raise_the_error_of_torch():
    with pytest.raises(RuntimeError) as theirs:
        torch.dot(torch.ones(3, device=GPU), torch.ones(3))
    with pytest.raises(RuntimeError) as ours:
        turnout.dot(torch.ones(3, device=GPU), torch.ones(3))
    assert str(ours.value) == str(theirs.value)


def test_launch_goes_to_the_device_of_the_tensors():
    """The launch goes to the tensors' device and its current stream, whatever the current device is."""
    with torch.cuda.device(torch.cuda.device_count() - 1):
        a = torch.ones(1000, device=torch.device("cuda", 0))
        with turnout.pin(dot="two-stage"):
            assert turnout.dot(a, a).item() == 1000
