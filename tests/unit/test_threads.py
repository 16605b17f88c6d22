"""Work in shares on torch's threads or on helpers: every part once, and all end before anything is raised."""

import dis
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch

from turnout.ops import threads

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(params=["torch's", "helpers"])
def thread_source(request, monkeypatch):
    if request.param == "helpers":
        monkeypatch.setattr(threads, "_runtime", lambda: None)
    elif threads._runtime() is None:
        assert sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def shares(parts):
    seen = []
    threads.in_shares(lambda first, last: seen.append((first, last)), parts)
    return sorted(seen)


@pytest.mark.usefixtures("thread_source")
def test_every_part_runs_once():
    assert shares(10) == [(0, 3), (3, 6), (6, 10)]
    assert shares(2) == [(0, 1), (1, 2)]
    assert shares(1) == [(0, 1)]
    assert shares(0) == [(0, 0)]


@pytest.mark.usefixtures("thread_source")
def test_exceptions_reach_the_caller():
    def work(first, last):
        if first:
            raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        threads.in_shares(work, 10)
    assert shares(3) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.usefixtures("thread_source")
def test_a_failure_waits_for_the_other_shares():
    ended = []

    def work(first, last):
        if first == 0:
            raise ValueError("at once")
        time.sleep(0.1)
        ended.append(first)

    with pytest.raises(ValueError, match="at once"):
        threads.in_shares(work, 3)
    assert sorted(ended) == [1, 2]


@pytest.mark.usefixtures("thread_source")
def test_an_interruption_goes_before_an_error():
    def work(first, last):
        raise KeyboardInterrupt if first == 2 else MemoryError

    with pytest.raises(KeyboardInterrupt):
        threads.in_shares(work, 3)


@pytest.mark.usefixtures("thread_source")
def test_a_failure_holds_no_memory():
    class Memory:
        pass

    def fail():
        memory = Memory()
        known = weakref.ref(memory)

        def work(first, last, memory=memory):
            raise ValueError

        with pytest.raises(ValueError):  # noqa: PT011
            threads.in_shares(work, 3)
        return known

    gc.collect()
    gc.disable()
    try:
        known = fail()
        end = time.monotonic() + 5  # a helper may still have its hands on it
        while known() is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("thread_source")
def test_from_several_threads_at_once():
    wrong = []

    def many():
        for _ in range(50):
            result = shares(10)
            ends = [end for _, end in result]
            if [first for first, _ in result] != [0, *ends[:-1]] or ends[-1] != 10:
                wrong.append(result)

    callers = [threading.Thread(target=many) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.usefixtures("thread_source")
def test_nested_calls_run_every_part():
    seen = []

    def outer(first, last):
        def inner(low, high):
            seen.extend((i, j) for i in range(first, last) for j in range(low, high))

        threads.in_shares(inner, 7)

    threads.in_shares(outer, 5)
    assert sorted(seen) == [(i, j) for i in range(5) for j in range(7)]


def test_without_threads_to_be_had_the_caller_does_all(monkeypatch):
    def start(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_runtime", lambda: None)
    monkeypatch.setattr(threads, "_helpers", threads._Helpers())
    monkeypatch.setattr(threads._thread, "start_new_thread", start)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert shares(10) == [(0, 3), (3, 6), (6, 10)]
    finally:
        torch.set_num_threads(before)


class Interruption(BaseException):
    pass


class Interrupter:
    """Raises on this thread at event number `first` in `threads.py` (a bytecode, or the entry of a function
    or a generator), and `again` calls or returns after that once more: what signal handlers can do, and more.
    `is_real` says whether Python (since 3.11) runs handlers at that place."""

    CHECKED = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "RESUME")

    def __init__(self, first, again):
        self.first, self.again, self.count, self.raised = first, again, 0, 0
        self.last = self.is_real = self.place = None

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename != threads.__file__:
            return None
        frame.f_trace_opcodes = True
        if event in ("opcode", "call"):
            self.count += 1
            real = event == "call" or (self.last or "").startswith(self.CHECKED)
            self.last = dis.opname[frame.f_code.co_code[frame.f_lasti]] if event == "opcode" else None
            if self.count == self.first:
                self.place = frame.f_code.co_name, frame.f_lineno, event, self.last
                self.raised += 1
                self.is_real = real and sys.version_info >= (3, 11)
                if self.again:
                    sys.setprofile(self.profile)
                raise Interruption
        return self.trace

    def profile(self, frame, event, arg):
        if frame.f_code.co_filename == threads.__file__:
            self.again -= 1
            if self.again == 0:
                self.raised += 1
                raise Interruption

    def __enter__(self):
        self.before = sys.gettrace(), sys.getprofile()
        sys.settrace(self.trace)

    def __exit__(self, *failure):
        sys.settrace(self.before[0])
        sys.setprofile(self.before[1])


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 crashes when threads are traced")
@pytest.mark.usefixtures("thread_source")
@pytest.mark.parametrize("repeated", [0, 1, 2, 3, 5])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_any_bytecode(repeated):
    """A call is complete or raises, and nothing runs any more when it is over. Where Python runs signal
    handlers, a call that is interrupted once raises, and has done all of its work or none."""
    parts, events = 6, 0
    while True:
        events += 1
        begun, ended = [], []

        def work(first, last, begun=begun, ended=ended):
            begun.append(first)
            time.sleep(0.0005)
            ended.extend(range(first, last))

        interrupter, failure = Interrupter(events, repeated), None
        with interrupter:
            try:
                threads.in_shares(work, parts)
            except (Interruption, KeyboardInterrupt) as interruption:
                failure = interruption
        complete, so_far = sorted(ended) == list(range(parts)), len(ended)
        assert failure is not None or complete, interrupter.place
        if repeated == 0 and interrupter.is_real:
            assert failure is not None, interrupter.place
            assert complete or not begun, interrupter.place
        if failure is not None:
            time.sleep(0.002)
            assert len(ended) == so_far, interrupter.place
            assert len(begun) * 2 == so_far, interrupter.place
        if not interrupter.raised:
            break
    assert events > 100


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 crashes when threads are traced")
@pytest.mark.parametrize("repeated", [0, 1, 2, 3])
def test_uninterrupted_at_any_bytecode(repeated):
    """The function runs once or not at all, and has ended when the call is over."""
    events = 0
    while True:
        events += 1
        begun, ended = [], []

        def function(begun=begun, ended=ended):
            begun.append(1)
            time.sleep(0.0005)
            ended.append(1)
            return "result"

        interrupter, failure, result = Interrupter(events, repeated), None, None
        with interrupter:
            try:
                result = threads.uninterrupted(function)
            except (Interruption, KeyboardInterrupt) as interruption:
                failure = interruption
        assert failure is not None or result == "result", interrupter.place
        assert len(begun) <= 1, interrupter.place
        assert begun == ended, interrupter.place
        if not interrupter.raised:
            break
    assert events > 50


def test_uninterrupted_returns_and_raises_as_the_function_does():
    assert threads.uninterrupted(divmod, 7, 2) == (3, 1)
    assert threads.uninterrupted(dict, a=1) == {"a": 1}
    with pytest.raises(ZeroDivisionError):
        threads.uninterrupted(divmod, 7, 0)
    assert threads.uninterrupted(threading.get_ident) != threading.get_ident()


def test_uninterrupted_on_another_thread_is_a_plain_call():
    results = []
    other = threading.Thread(target=lambda: results.append(threads.uninterrupted(threading.get_ident)))
    other.start()
    other.join()
    assert results == [other.ident]


def test_uninterrupted_without_threads_to_be_had(monkeypatch):
    def start(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads._thread, "start_new_thread", start)
    assert threads.uninterrupted(divmod, 7, 2) == (3, 1)


def run(code, **environment):
    """Run a program in a process of its own, and return what it printed."""
    source = "import torch\ntorch.set_num_threads(2)\n" + textwrap.dedent(code)
    command, variables = [sys.executable, "-c", source], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@posix
def test_in_a_forked_process():
    """GNU OpenMP waits forever for threads that a fork has left behind."""
    code = """
        import os, signal
        from turnout.ops import threads
        def shares():
            seen = []
            threads.in_shares(lambda first, last: seen.append(last - first), 8)
            return seen
        for _ in range(3):
            shares()
        for runtime in (threads._runtime, lambda: None):
            threads._runtime = runtime
            shares()
            if os.fork() == 0:
                signal.alarm(30)
                for _ in range(3):
                    assert shares() == [4, 4]
                os._exit(0)
            assert os.wait()[1] == 0, runtime
            assert shares() == [4, 4]
        print("right")
    """
    assert run(code) == "right\n"


@pytest.mark.parametrize("helpers", [False, True])
def test_while_the_interpreter_ends(helpers):
    """At exit, and when modules are taken down, where no other thread gets the GIL any more."""
    code = f"""
        import atexit
        from turnout.ops import threads
        if {helpers}:
            threads._runtime = type(None)  # gives None, and holds nothing of this module
        def shares(in_shares=threads.in_shares):
            seen = []
            in_shares(lambda first, last: seen.append(last - first), 8)
            return sum(seen)
        class Late:
            def __del__(self, shares=shares, print=print):
                print("late", shares(), flush=True)
        late = Late()
        atexit.register(lambda: print("at exit", shares(), flush=True))
        shares()
    """
    assert run(code) == "at exit 8\nlate 8\n"


@pytest.mark.parametrize("helpers", [False, True])
def test_the_interpreter_ends_in_the_middle_of_a_call(helpers):
    code = f"""
        import threading, time
        from turnout.ops import threads
        if {helpers}:
            threads._runtime = lambda: None
        def forever():
            while True:
                threads.in_shares(lambda first, last: time.sleep(0.001), 8)
        threading.Thread(target=forever, daemon=True).start()
        time.sleep(0.1)
        print("ends")
    """
    assert run(code) == "ends\n"


@posix
@pytest.mark.parametrize("helpers", [False, True])
def test_a_storm_of_signals(helpers):
    """Two timers at 5 kHz whose handlers raise: calls raise or are complete, no share outlives its call."""
    code = f"""
        import signal, sys, time
        from turnout.ops import threads
        if {helpers}:
            threads._runtime = lambda: None
        class Alarm(Exception): pass
        inside = threads.in_shares.__code__
        def handle(number, frame):
            while frame is not None:
                if frame.f_code is inside:
                    raise Alarm
                frame = frame.f_back
        signal.signal(signal.SIGALRM, handle)
        signal.signal(signal.SIGVTALRM, handle)
        counts = dict(raised=0, finished=0, wrong=0, running=0)
        threads._runtime()
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 2e-4)
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 2e-4)
        begin = time.monotonic()
        while time.monotonic() < begin + 1 or counts["raised"] <= 100:
            assert time.monotonic() < begin + 50, counts
            ended, raised = [], False
            def work(first, last):
                end = time.perf_counter() + 0.0005
                while time.perf_counter() < end:
                    pass
                ended.append(last - first)
            try:
                threads.in_shares(work, 8)
            except (Alarm, KeyboardInterrupt):
                raised = True
            counts["raised" if raised else "finished"] += 1
            counts["wrong"] += not raised and sum(ended) != 8
            count = len(ended)
            time.sleep(0.0015)
            counts["running"] += len(ended) != count
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(counts)
        assert not counts["wrong"] and not counts["running"], counts
    """
    print(run(code))


@posix
def test_a_real_signal_reaches_the_caller():
    """The handler's own exception arrives, whichever share the signal meets."""

    class Alarm(Exception):
        pass

    def handle(number, frame):
        raise Alarm

    def work(first, last):
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.001)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for _ in range(20):
            with pytest.raises(Alarm):
                threads.in_shares(work, 8)
    finally:
        signal.signal(signal.SIGUSR1, before)
