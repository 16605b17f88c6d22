"""Graphs come and go: memory, failures, interrupts, threads, copies, restore."""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

import turnout
from tests.replays.graphed import Graphed, flux_inputs
from turnout.models import graphs
from turnout.models import replays as replays_module

pytestmark = pytest.mark.filterwarnings("ignore:turnout.accelerate patched nothing")


@pytest.mark.parametrize("moment", ["copies of the inputs", "run beside", "capture", "outputs"])
def test_out_of_memory_costs_nothing_but_a_warning(moment, small, monkeypatch):
    model, replays, x = small(lambda model, x, scale: model.linear(x))
    expected = F.linear(x, model.linear.weight, model.linear.bias)
    engine = graphs.ENGINES[x.device.type]

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("planted")

    where = {
        "copies of the inputs": (graphs, "buffer_like"), "run beside": (engine, "run_beside"),
        "capture": (engine, "capture"), "outputs": (replays_module.Outputs, "allocated"),
    }[moment]  # fmt: skip
    torch.testing.assert_close(model(x), expected)
    if moment == "outputs":
        model(x)
        model(x)
    replayed = replays.replayed
    with monkeypatch.context() as patch:
        patch.setattr(*where, fails)
        with pytest.warns(turnout.TurnoutWarning, match="out of memory"):
            result = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = [model(x) for _ in range(3)]
    for each in (result, *again, model(x)):
        torch.testing.assert_close(each, expected)
    assert replays.replayed == replayed
    assert replays.graphs == 0


def test_graphs_go_where_another_call_has_no_memory(small):
    room = [True]

    def body(model, x, scale):
        if scale > 1 and not room[0]:
            room[0] = True
            raise torch.OutOfMemoryError("planted")
        return model.linear(x) * scale

    model, replays, x = small(body)
    for _ in range(3):
        model(x)
    room[0] = False
    with pytest.warns(turnout.TurnoutWarning, match="graphs of this model were freed"):
        torch.testing.assert_close(model(x, 2.0), model.linear(x) * 2)
    assert replays.graphs == 0
    room[0] = False
    with pytest.raises(torch.OutOfMemoryError):  # nothing of ours is in the way
        model(x, 3.0)


def test_failure_of_the_model_is_the_callers(small):
    def body(model, x, scale):
        if model.steps:
            raise ValueError("planted")
        return x * 2

    model, _, x = small(body)
    model(x)
    model.steps = 1
    for _ in range(3):
        with pytest.raises(ValueError, match="planted"):
            model(x)
    model.steps = 0
    for _ in range(4):
        assert torch.equal(model(x), x * 2)


@pytest.mark.parametrize("moment", ["run beside", "capture"])
def test_interrupt_leaves_nothing_half_done(moment, small, monkeypatch):
    model, replays, x = small(lambda model, x, scale: model.linear(x))
    expected = model(x)
    engine = graphs.ENGINES[x.device.type]
    with monkeypatch.context() as patch:

        def interrupted(*args):
            raise KeyboardInterrupt

        patch.setattr(engine, moment.replace(" ", "_"), interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    for _ in range(4):
        torch.testing.assert_close(model(x), expected)
    assert replays.captured == 1


def test_graphs_are_bounded_and_the_least_recently_used_goes(small):
    model, replays, x = small(lambda model, x, scale: x * scale)
    for scale in range(replays_module.MOST_GRAPHS + 2):
        for _ in range(3):
            assert torch.equal(model(x, scale), x * scale)
        model(x, 0)
    assert replays.graphs == replays_module.MOST_GRAPHS
    before = replays.replayed
    model(x, 0)
    assert replays.replayed == before + 1, "what was used between is still there"
    assert torch.equal(model(x, 1), x)
    assert replays.replayed == before + 1


def test_number_that_differs_in_every_call_costs_few_captures(small):
    model, replays, x = small(lambda model, x, scale: x * scale)
    for _ in range(4):
        for scale in range(50):  # a timestep that is no tensor
            assert torch.equal(model(x, scale), x * scale)
    assert replays.captured == 2 * replays_module.MOST_GRAPHS
    assert any("is a number, or a tensor on the host, another one" in line for line in replays.lines())


def test_restore_frees_graphs_and_gives_the_class_back(graphed):
    graphed.warm()
    engine = weakref.ref(graphed.replays._engine)
    turnout.restore(graphed.model)
    gc.collect()
    assert engine() is None
    assert type(graphed.model) is type(graphed.stock)
    assert vars(graphed.model).keys() == vars(graphed.stock).keys()
    assert type(graphed.model).__mro__ == type(graphed.stock).__mro__


def test_model_is_collected_with_its_graphs(device):
    graphed = Graphed(device)
    graphed.warm()
    model = weakref.ref(graphed.model)
    del graphed
    gc.collect()
    assert model() is None


def test_copies_begin_without_graphs(graphed):
    graphed.warm()
    for other in (copy.deepcopy(graphed.model), pickle.loads(pickle.dumps(graphed.model))):
        other.proj_out.weight.mul_(2)
        torch.testing.assert_close(graphed(other).sample, graphed(other).sample)
        assert other._turnout_replays is not graphed.replays
    shallow = copy.copy(graphed.model)
    before = graphed.replays.replayed
    torch.testing.assert_close(graphed(shallow).sample, graphed(graphed.stock).sample, rtol=1e-4, atol=1e-4)
    assert graphed.replays.replayed == before
    assert graphed.check()


def test_accelerated_again_begins_anew(graphed):
    graphed.warm()
    turnout.accelerate(graphed.model)
    assert "_turnout_replays" not in vars(graphed.model)
    graphed(graphed.model)
    graphed.report = turnout.accelerate(graphed.model, graph=True)
    (graphed.replays,) = graphed.report.graphs.values()
    graphed.warm()


def test_threads_take_turns(graphed):
    graphed.warm()
    inputs = [flux_inputs(graphed.device, seed=seed) for seed in range(4)]
    expected = [graphed(graphed.stock, **given).sample for given in inputs]
    result = [None] * 4

    def run(i):
        with torch.no_grad():
            result[i] = [graphed(**inputs[i]).sample for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, wanted in zip(result, expected, strict=True):
        for one in each:
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_streams_wait_for_each_other():
    graphed = Graphed(torch.device("cuda", 0))
    graphed.warm()
    inputs = [flux_inputs(graphed.device, seed=seed) for seed in range(8)]
    expected = [graphed(graphed.stock, **given).sample for given in inputs]
    streams, result = [torch.cuda.Stream() for _ in inputs], []
    torch.cuda.synchronize()
    for stream, given in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            result.append(graphed(**given).sample)
    torch.cuda.synchronize()
    for each, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)
    assert graphed.replays.replayed == 1 + len(inputs)


@pytest.mark.gpu
def test_memory_of_graphs_is_given_back():
    graphed = Graphed(torch.device("cuda", 0))
    graphed.warm()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    turnout.restore(graphed.model)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_random_numbers_go_on_after_a_capture_that_failed(small):
    model, _, x = small(lambda model, x, scale: x * (2 if x.sum().item() > 0 else 3))
    model(x)
    with pytest.warns(turnout.TurnoutWarning, match="could not be captured"):
        model(x)
    assert not torch.equal(torch.rand(8, device="cuda"), torch.rand(8, device="cuda"))
    other, replays, x = small(lambda model, x, scale: model.linear(x))
    for _ in range(3):
        torch.testing.assert_close(other(x), other.linear(x))
    assert replays.replayed == 1


@pytest.mark.gpu
def test_capture_of_the_caller_takes_the_call_as_it_is():
    graphed = Graphed(torch.device("cuda", 0))
    graphed.warm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = graphed().sample
    graph.replay()
    torch.testing.assert_close(result, graphed(graphed.stock).sample, rtol=1e-4, atol=1e-4)
    assert "a capture of the caller's is under way" in graphed.report.details()
