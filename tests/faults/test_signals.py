"""A signal whose handler raises, at a random moment of a call: the call raises, or its result is right, bit for bit.

`TURNOUT_SIGNALS=500 pytest -s tests/faults/test_signals.py` (`make fault-test`) sends so many signals of each kind to every
CPU route and prints a line per route: signals that were sent, calls that raised, calls that finished, wrong results.
"""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from tests import walk
from tests.faults.calls import calls

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
        self.arrived = self.raised = 0

    def handle(self, number, frame):
        self.arrived += 1
        if self.inside:
            self.inside = False  # one exception per call
            self.raised += 1
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

    SENDER = "import os, sys, time\nfor delay in sys.stdin:\n    time.sleep(float(delay))\n    os.kill(os.getppid(), 2)"

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


def written(call, args):
    """Those of the arguments that the op writes into."""
    return [x for name, x in zip(call.op.signature.parameters, args, strict=True) if name in call.op.mutates]


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
        """What is wrong after a call, or None. A call that raised has written all or nothing into what it writes into."""
        if not raised and not same(outputs, self.outputs):
            return "outputs"
        for name, x, before, after in zip(self.names, args, self.before, self.after, strict=True):
            right = same([x], [after]) or (raised and same([x], [before]))
            if not right and not (raised and name == "out"):  # a call that raised may leave anything in its output
                return name
        return None


def spoil(outputs):
    """Fill memory before it is given back, so that the next call that leaves it unwritten shows."""
    for x in outputs:
        if isinstance(x, torch.Tensor) and x.numel():
            x.fill_(7)


def attack(op, route, kind, count):
    """Send `count` signals to calls of a route. Returns counts: sent, raised, finished, wrong, lost."""
    counts, wrong = Counter(sent=0, raised=0, finished=0, wrong=0, lost=0), []
    draw = random.Random(f"{op.name} {route.name} {kind.__name__}")
    chosen = [(Undisturbed(call, which), seconds) for call, seconds in calls(op, route) for which in (0, 1)]
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
            found = expected.mismatch(args, outputs, raised)
            if found is None and raised:  # the next one is right
                del args, outputs
                args = expected.call.fresh(expected.which)
                outputs = as_tuple(expected.call.run(*args))
                found = expected.mismatch(args, outputs, raised=False)
            if found is not None:
                counts["wrong"] += 1
                wrong.append(f"signal {i}: {found} after a call that {'raised' if raised else 'finished'}")
            spoil(outputs)
    return counts, wrong


@walk.cpu_routes
@pytest.mark.parametrize("kind", [ByTimer, ByProcess], ids=["alarm", "interrupt"])
def test_a_call_raises_or_is_right(op, route, kind):
    counts, wrong = attack(op, route, kind, SIGNALS)
    print(f"{op.name:<22} {route.name:<14} {kind().number.name:<8} " + "  ".join(f"{name} {n}" for name, n in counts.items()))
    assert not wrong, wrong[:5]
    assert not counts["lost"]
    if SIGNALS >= MANY:
        assert counts["raised"] > counts["sent"] / 5, "too few of the signals arrived inside a call"
