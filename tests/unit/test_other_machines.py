"""A choice follows from problem, device and settings: what this machine is changes nothing of another's."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import turnout
from turnout.routing import device_files, machine
from turnout.routing.case import outline
from turnout.routing.choose import choose
from turnout.routing.device import Device, known_cards
from turnout.routing.op import OPS

HALVES = frozenset([torch.float16, torch.bfloat16])
A_CPU = replace(
    Device.of("cpu"),
    units=16,
    threads=8,
    vectors="AVX512",
    one_dnn=HALVES | {torch.float32},
    native_halves=HALVES,
    careful_loop=True,
    lacks=frozenset(),
)
AN_OLD_CPU = replace(
    A_CPU,
    units=4,
    threads=2,
    vectors="AVX2",
    one_dnn=frozenset([torch.float32]),
    native_halves=frozenset(),
    careful_loop=False,
)
DEVICES = [*known_cards(), A_CPU, AN_OLD_CPU]

# What says something of this machine: none of it may be asked once there is a device.
ASKED_OF_A_MACHINE = [
    "torch.get_num_threads",
    "torch.backends.cudnn.version",
    "torch.backends.cudnn.is_available",
    "torch.backends.mkldnn.is_available",
    "torch.backends.cpu.get_cpu_capability",
    "torch.cpu._is_avx512_bf16_supported",
    "torch.cpu._is_amx_fp16_supported",
    "torch.cuda.is_available",
    "torch.cuda.get_device_properties",
    "torch.convolution",
    "torch.conv3d",
    "os.cpu_count",
    "importlib.util.find_spec",
    "importlib.metadata.version",
    "turnout.routing.versions.triton",
    "turnout.routing.versions.installed",
    *(
        f"turnout.routing.machine.{name}"
        for name in dir(machine)
        if callable(getattr(machine, name)) and name[0].islower()
    ),
]


@pytest.fixture
def problems():
    """Those of all cases, made while the machine may still be asked."""
    return [(op, outline(op, case).problem) for op in OPS.values() for case in op.cases()]


def test_guards_costs_and_configurations_ask_nothing_of_the_machine(problems, monkeypatch):
    def asked(*args, **kwargs):
        raise AssertionError("a guard, a cost or a configuration asked this machine instead of its device")

    with monkeypatch.context() as patch:
        for name in ASKED_OF_A_MACHINE:
            patch.setattr(name, asked)
        for op, problem in problems:
            for device in DEVICES:
                choose(op, problem, device)
                for route in op.routes.values():
                    if not any(route.refuses(problem, device)):
                        route.configs(problem, device)


FAKED = """
import os, sys
threads, cpus, capability, halves, cudnn, triton, missing = sys.argv[1:]
import importlib.metadata, importlib.util
import torch
torch.set_num_threads(int(threads))
os.cpu_count = lambda: int(cpus)
torch.backends.cpu.get_cpu_capability = lambda: capability
torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_fp16_supported = lambda: halves == "halves"
torch.backends.cudnn.is_available = lambda: cudnn != "0"
torch.backends.cudnn.version = lambda: int(cudnn)
sys.modules.update({name: None for name in missing.split(",")})
from turnout.routing import machine, versions
versions.triton = lambda: None if "triton" in missing else triton
machine.one_dnn_dtypes = lambda: frozenset([torch.float32, *([torch.bfloat16] if halves == "halves" else [])])
machine.loop_adds_carefully = lambda: halves == "halves"
import turnout
from turnout.routing.case import outline
from turnout.routing.device import Device
from turnout.routing.op import OPS
from turnout.routing.route import Key
print(turnout.explain("dot", torch.ones(3), torch.ones(3)).device.threads, file=sys.stderr)
for name in ("h200", "a100", "5090", "mi300x"):
    device = Device.named(name)
    for op in OPS.values():
        for case in op.cases()[::3]:
            print(op.verdict(Key(outline(op, case).problem, False, ()), device))
"""


def test_explain_says_the_same_of_another_card_on_every_machine(tmp_path):
    """With other threads, instructions, cuDNN and Triton, and without packages that routes need."""
    fakes = [
        ("2", "64", "AVX512", "halves", "91900", "3.9.0", "nothing"),
        ("1", "2", "AVX2", "none", "0", "3.6.0", "numba"),
        ("1", "8", "DEFAULT", "none", "90100", "4.0.0", "triton"),
    ]
    messages = []
    for fake in fakes:
        environment = {**os.environ, "TURNOUT_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", FAKED, *fake], env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr.decode().split()[-1] == fake[0]
        messages.append(done.stdout)
    assert messages[0].count(b"NVIDIA H200") > 100
    assert messages[0] == messages[1] == messages[2]


def test_explain_answers_for_an_absent_cpu():
    """Its facts are data: another number of threads or other instructions give other times, whatever this CPU
    is.
    """
    x, weight = (
        torch.empty(1, 96, 4, 60, 104, dtype=torch.bfloat16),
        torch.empty(96, 96, 3, 3, 3, dtype=torch.bfloat16),
    )
    new, old = (
        turnout.explain("conv3d", x, weight, padding=1, device=device) for device in (A_CPU, AN_OLD_CPU)
    )
    assert new.microseconds["reference"] < old.microseconds["reference"]
    assert "no oneDNN kernel for bfloat16" in old.refused["channels-last"][0]
    assert A_CPU.machine == {"threads": 8, "vectors": "AVX512"}


def test_every_figure_of_a_device_has_a_source():
    """Peaks and every section of fitted constants; a section that nobody reads would be a mistake too."""
    read = set()

    class Watched(dict):
        def get(self, section, otherwise=None):
            read.add(section)
            return super().get(section, otherwise)

    for slug in [path.stem for path in device_files.FOLDER.glob("*.toml")]:
        file = device_files.load(slug)
        assert file["peaks"]["source"]
        for section, values in device_files.sections(slug).items() if "fitted" in file else ():
            assert values["source"], section
            numbers = {name: value for name, value in values.items() if name != "source"}
            assert numbers, section
            assert all(type(value) in (int, float) and value > 0 for value in numbers.values()), section
    for device in (Device.named("h200"), A_CPU):
        watched = replace(device, refitted=Watched(nothing={}))
        for op in OPS.values():
            for case in op.cases():
                choose(op, outline(op, case).problem, watched)
        assert read >= device_files.sections(device.fitted_on).keys()


def test_a_constant_that_was_not_fitted_is_named():
    with pytest.raises(
        AttributeError,
        match=r"dot.two-stage has no constant 'speed'; it has: .*host, start, share",
    ):
        _ = Device.named("h200").fitted("dot.two-stage").speed


def test_cards_share_the_constants_of_the_card_they_were_fitted_on():
    assert (
        Device.named("a100").fitted("dot.two-stage").share
        == Device.named("h200").fitted("dot.two-stage").share
    )
    assert Device(name="a new card", type="cuda").fitted("dot.two-stage").host > 0


def test_what_is_tried_on_this_machine_is_seen_by_no_mode_of_a_caller():
    class Rewriting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was seen")

    expected = machine.loop_adds_carefully()
    machine.loop_adds_carefully.cache_clear()
    with Rewriting():
        assert machine.loop_adds_carefully() is expected
