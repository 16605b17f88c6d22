"""A signal whose handler raises, at a random moment of a call: the call raises, or is right bit for bit.

`TURNOUT_SIGNALS=500 pytest -s tests/faults/test_signals.py` (`make fault-test`) sends so many signals of each
kind to every CPU route and prints a line per route and kind: signals sent, calls that raised (among them:
while a kernel of ours was running), calls that finished, wrong results, handlers' exceptions that were lost.
"""

import functools
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest
import torch

from tests import walk
from tests.faults.calls import calls
from turnout.ops import threads

SIGNALS = int(os.environ.get("TURNOUT_SIGNALS", "12"))  # of each kind, to each route
MANY = 200  # from so many on, a good part has to arrive inside the calls

pytestmark = [
    pytest.mark.timeout(1200, method="thread"),  # the other method uses SIGALRM itself
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGALRM and os.kill"),
]


class Alarm(Exception):
    """What the handler of SIGALRM raises: an Exception, as a time limit of users would."""


class Signals:
    """A signal handler that raises while a call is running, and counts."""

    def __init__(self, number, exception):
        self.number, self.exception = number, exception
        self.inside = False
        self.arrived = self.raised = self.in_kernels = 0

    def handle(self, number, frame):
        self.arrived += 1
        if self.inside:
            self.inside = False  # one exception per call
            self.raised += 1
            while frame is not None and frame.f_code is not threads.in_shares.__code__:
                frame = frame.f_back
            self.in_kernels += frame is not None
            raise self.exception

    def __enter__(self):
        self.before = signal.signal(self.number, self.handle)
        return self

    def __exit__(self, *failure):
        signal.signal(self.number, self.before)


class ByTimer(Signals):
    """SIGALRM from this process's timer."""

    def __init__(self):
        super().__init__(signal.SIGALRM, Alarm)

    def send(self, delay):
        signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))


class ByProcess(Signals):
    """SIGINT from another process: the kernel may deliver it to any of our threads."""

    SENDER = """if True:
        import os, sys, time
        for delay in sys.stdin:
            time.sleep(float(delay))
            os.kill(os.getppid(), 2)
    """

    def __init__(self):
        super().__init__(signal.SIGINT, KeyboardInterrupt)

    def __enter__(self):
        command = [sys.executable, "-c", self.SENDER]
        self.sender = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        return super().__enter__()

    def __exit__(self, *failure):
        self.sender.stdin.close()
        self.sender.wait()
        super().__exit__(*failure)

    def send(self, delay):
        self.sender.stdin.write(f"{delay}\n")
        self.sender.stdin.flush()


def bits(x):
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def same(left, right):
    """Whether two tuples hold the same bits."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(bits(x), bits(y)) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def as_tuple(result):
    return () if result is None else tuple(result) if isinstance(result, (tuple, list)) else (result,)


class Undisturbed:
    """What a call gives, and what its arguments hold before and after."""

    def __init__(self, call, which):
        self.call, self.which = call, which
        args = call.fresh(which)
        self.before = [walk.copy(x) if isinstance(x, torch.Tensor) else x for x in args]
        self.outputs = as_tuple(call.run(*args))
        self.after = [walk.copy(x) if isinstance(x, torch.Tensor) else x for x in args]
        self.names = list(call.op.signature.parameters)

    def mismatch(self, args, outputs, raised):
        """What is wrong after a call, or None. A call that raised has written all or nothing in place."""
        if not raised and not same(outputs, self.outputs):
            return "outputs"
        for name, x, before, after in zip(self.names, args, self.before, self.after, strict=True):
            right = same([x], [after]) or (raised and same([x], [before]))
            undefined = raised and name == "out"  # a call that raised may leave anything in its output
            if not right and not undefined:
                return name
        return None


def spoil(outputs):
    """Fill memory before it is given back, so that the next call that leaves it unwritten shows."""
    for x in outputs:
        if isinstance(x, torch.Tensor) and x.numel():
            x.fill_(7)


@functools.lru_cache(maxsize=1)
def undisturbed(op, route):
    """The calls of a route, each with two sets of values, and the seconds that it takes; for all kinds."""
    return [(Undisturbed(call, which), seconds) for call, seconds in calls(op, route) for which in (0, 1)]


def attack(op, route, kind, count):
    """Send `count` signals to calls of a route, print and return what happened."""
    counts, wrong = Counter(sent=0, raised=0, in_kernel=0, finished=0, wrong=0, lost=0), []
    draw = random.Random(f"{op.name} {route.name} {kind.__name__}")
    chosen = undisturbed(op, route)
    gc.collect()
    with kind() as signals:
        for i in range(count):
            expected, seconds = draw.choice(chosen)
            args, outputs, raised = expected.call.fresh(expected.which), (), False
            arrived, raises = signals.arrived, signals.raised
            try:
                signals.send(draw.uniform(0, seconds))
                signals.inside = True
                outputs = as_tuple(expected.call.run(*args))
                signals.inside = False
            except signals.exception:
                raised = True
            finally:
                signals.inside = False
            end = time.monotonic() + 60
            while signals.arrived == arrived:
                assert time.monotonic() < end, "a signal never arrived"
                time.sleep(1e-4)
            counts["sent"] += 1
            counts["raised" if raised else "finished"] += 1
            counts["lost"] += signals.raised - raises - raised
            actual = expected.mismatch(args, outputs, raised)
            if actual is None and raised:  # the next one is right
                del args, outputs
                args = expected.call.fresh(expected.which)
                outputs = as_tuple(expected.call.run(*args))
                actual = expected.mismatch(args, outputs, raised=False)
            if actual is not None:
                counts["wrong"] += 1
                wrong.append(f"signal {i}: {actual} after a call that {'raised' if raised else 'finished'}")
            spoil(outputs)
        counts["in_kernel"] = signals.in_kernels
        label = f"{op.name:<20} {route.name:<13} {signals.number.name:<7}"
    print(f"\n{label} " + "  ".join(f"{name} {n:3}" for name, n in counts.items()), end="", flush=True)
    return counts, wrong


def check(counts, wrong):
    assert not wrong, wrong[:5]
    assert not counts["lost"]
    if counts["sent"] >= MANY:
        assert counts["raised"] > counts["sent"] / 5, "too few of the signals arrived inside a call"


@pytest.mark.parametrize("kind", [ByTimer, ByProcess], ids=["alarm", "interrupt"])  # one after the other
@walk.cpu_routes
def test_a_call_raises_or_is_right(op, route, kind):
    check(*attack(op, route, kind, SIGNALS))


@walk.numba_routes
def test_on_threads_of_our_own(op, route, monkeypatch):
    """Where torch's OpenMP cannot be had."""
    monkeypatch.setattr(threads, "_runtime", lambda: None)
    check(*attack(op, route, ByProcess, SIGNALS))


FIRST_CALLS = """
    import os, random, signal, sys, time
    import numpy as np
    import torch
    import turnout

    torch.set_num_threads(2)
    folder, count = sys.argv[1], int(sys.argv[2])
    x, weight = torch.randn(1, 32, 2, 8, 8).contiguous(memory_format=torch.channels_last_3d), torch.randn(32)

    def call(route):
        with turnout.pin(rms_norm_silu=route):
            return turnout.rms_norm_silu(x, weight, eps=1e-6).numpy()

    class Alarm(BaseException):
        pass

    def handle(number, frame):
        raise Alarm

    def child(i, delay):
        os.environ["TURNOUT_CACHE_DIR"] = f"{folder}/{i}"
        signal.signal(signal.SIGALRM, handle)
        raised = False
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            call("cpu-rows")
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            raised = True
        right = all(np.allclose(call("cpu-rows"), expected, atol=1e-5) for _ in range(2))
        return raised if right else 2

    expected = call("reference")
    assert "numba" not in sys.modules
    draw, counts = random.Random(0), dict(raised=0, finished=0, wrong=0)
    longest = 600.0  # the first one is not interrupted, and says how long it takes
    for i in range(count + 1):
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                code = int(child(i, draw.uniform(0, longest) if i else longest))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if i:
            counts[{0: "finished", 1: "raised"}.get(code, "wrong")] += 1
        else:
            assert code == 0
            longest = time.monotonic() - begin
        draw.random()
    print(f"first calls, {longest:.1f} s: {counts}", end="")
    assert not counts["wrong"] and counts["raised"]
"""


def test_a_first_call_can_be_repeated(tmp_path):
    """A signal while Numba is imported and compiles: the next call finds both as they should be."""
    count = max(4, SIGNALS // 10)
    command = [sys.executable, "-c", textwrap.dedent(FIRST_CALLS), str(tmp_path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    print(f"\n{done.stdout}", end="")
    left = [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".part")]
    assert not left
