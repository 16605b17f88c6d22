"""What is chosen on the cards people own, by the names they type; and what is chosen for every case on an
H200.

The golden files say what was chosen when they were written. `TURNOUT_GOLDEN=write` writes them anew: look at
what has changed before you commit it.
"""

import os
from pathlib import Path

import pytest
import torch

import turnout
from turnout.launch import operands, support
from turnout.routing import failures, store, versions
from turnout.routing.case import outline
from turnout.routing.device import Device, known_cards
from turnout.routing.op import OPS
from turnout.routing.route import Key

HERE = Path(__file__).parent
BF16 = torch.bfloat16
NAMES = {
    "NVIDIA A100-SXM4-80GB": ("a100", "A100", "nvidia-a100"),
    "NVIDIA L40S": ("l40s", "L40S"),
    "NVIDIA GeForce RTX 4090": ("4090", "rtx4090", "rtx-4090", "RTX 4090"),
    "NVIDIA GeForce RTX 5090": ("5090", "rtx5090", "rtx-5090"),
    "NVIDIA H100 80GB HBM3": ("h100", "H100-SXM", "h100 sxm"),
    "NVIDIA H100 PCIe": ("h100-pcie", "h100pcie"),
    "NVIDIA H200": ("h200", "nvidia-h200"),
    "NVIDIA B200": ("b200",),
    "AMD Instinct MI300X": ("mi300x", "MI300X", "amd-mi300x"),
}


def empty(*shape, dtype=BF16, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


def last(*shape, dtype=BF16):
    return empty(*shape, dtype=dtype).to(
        memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    )


CALLS = {
    "conv2d 128->128": (
        "conv2d",
        (last(1, 128, 1024, 1024), last(128, 128, 3, 3), empty(128)),
        {"padding": 1},
    ),
    "conv2d 128->3": ("conv2d", (last(1, 128, 1024, 1024), last(3, 128, 3, 3), empty(3)), {"padding": 1}),
    "conv2d 3->128": ("conv2d", (last(1, 3, 1024, 1024), last(128, 3, 3, 3), empty(128)), {"padding": 1}),
    "conv3d 96->96": ("conv3d", (last(1, 96, 4, 480, 832), last(96, 96, 3, 3, 3), empty(96)), {"padding": 1}),
    "attention 512": ("attention", tuple(empty(1, 1, 4096, 512) for _ in range(3)), {}),
    "attention 128": ("attention", tuple(empty(1, 24, 4608, 128) for _ in range(3)), {}),
    "group_norm_silu": (
        "group_norm_silu",
        (last(1, 512, 256, 256), 32, empty(512), empty(512)),
        {"eps": 1e-6},
    ),
    "dot": ("dot", (empty(50_000_000), empty(50_000_000)), {}),
}


def golden(file, lines):
    """Compare lines with those that were kept. A row may be missing or of other kernels: that is `doctor`'s
    to say, and what was measured then is not compared with what is estimated now."""
    path = HERE / file
    if os.environ.get("TURNOUT_GOLDEN") == "write":
        path.write_text("\n".join(lines) + "\n")
    kept = path.read_text().splitlines()
    assert len(lines) == len(kept)
    for line, before in zip(lines, kept, strict=True):
        if " by measured" in line or " by measured" not in before:
            assert line == before


def in_a_line(verdict):
    """The route, by which authority, in whose words, and its configuration."""
    config = ", ".join(f"{key}={value}" for key, value in verdict.config.items())
    return f"{verdict.chosen} by {verdict.authority}: {verdict.why}" + (f" ({config})" if config else "")


@pytest.mark.parametrize("card", NAMES)
def test_common_spellings_of_device_names(card):
    assert {Device.named(name).name for name in NAMES[card]} == {card}


@pytest.mark.parametrize("card", NAMES)
def test_golden_answers(card):
    """Which route, by which authority, and in whose words."""
    device = Device.named(NAMES[card][0])
    lines = []
    for name, (op, args, options) in CALLS.items():
        verdict = turnout.explain(op, *args, device=device, **options)
        lines.append(f"{name}: {in_a_line(verdict)}")
    golden(f"golden/{device.slug}.txt", lines)


def test_the_routes_of_all_cases_on_an_h200_are_unchanged():
    """Host code may change as it likes; what the shipped rows choose does not."""
    h200, lines = Device.named("h200"), []
    for op in OPS.values():
        for case in op.cases():
            verdict = op.verdict(Key(outline(op, case).problem, False, ()), h200)
            lines.append(f"{op.name} {case}: {in_a_line(verdict)}")
    golden("golden/cases-on-an-h200.txt", lines)


def test_an_h100_takes_what_was_measured_on_its_sibling():
    op, args, options = CALLS["dot"]
    answer = turnout.explain(op, *args, device="h100", **options)
    assert answer.chosen == "two-stage"
    assert "measured on a sibling, NVIDIA H200" in str(answer)
    assert "sibling" not in str(turnout.explain(op, *args, device="h100-pcie", **options))


def test_unknown_cards_list_the_known():
    with pytest.raises(
        ValueError,
        match=r"device 'rtx-9090' is not known; did you mean nvidia-geforce-rtx-5090\? "
        r"One of: .*4090.*mi300x",
    ):
        Device.named("rtx-9090")
    assert all(device.flops and device.bandwidth.source for device in known_cards())


@pytest.mark.parametrize(("package", "version"), [("torch", "2.10.1"), ("triton", "3.5.0")])
def test_older_versions_are_refused_with_what_is_needed(package, version, monkeypatch):
    if package == "torch":
        monkeypatch.setattr(torch, "__version__", version)
    else:
        monkeypatch.setattr(versions, "triton", lambda: version)
    with pytest.raises(
        ImportError, match=rf"{package} {version} is installed, {package} \d\.\d+ or newer is needed"
    ):
        versions.refuse_unsupported()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path)
    failures.forget_problems()
    yield tmp_path
    failures.forget_problems()


def test_a_triton_that_compiles_nothing_is_known_before_the_first_call(fresh, monkeypatch):
    """One small kernel is compiled as a probe; where that fails, routes refuse, and there is no warning."""
    from dataclasses import replace

    pytest.importorskip("triton")
    tried = []

    def fails():
        tried.append(1)
        raise AttributeError("module 'gl' has no attribute 'async_copy'")

    monkeypatch.setattr("turnout.launch.probe_kernels.probe_launch", fails)
    newer = replace(Device.named("h200"), triton=(3, 99))
    op, args, options = CALLS["conv3d 96->96"]
    for _ in range(2):
        answer = turnout.explain(op, *args, device=newer, **options)
        assert "does not compile Gluon kernels (AttributeError" in answer.refused["implicit-gemm-hopper"][0]
        failures.forget_problems()  # as a new process: it reads what was kept
    assert len(tried) == 1
    assert support.gluon_problem(replace(newer, triton=(3, 9))) is None


def test_kernels_that_did_not_compile_are_refused_from_then_on(fresh):
    op, args, options = CALLS["conv3d 96->96"]
    here = Device.named("h200")
    from dataclasses import replace

    here = replace(here, triton=(3, 9))
    route = OPS["conv3d"].routes["implicit-gemm-hopper"]
    failures.remember(route.code_hash, here, "its kernels do not compile: PTXASError: out of registers")
    failures.forget_problems()
    answer = turnout.explain(op, *args, device=here, **options)
    assert "PTXASError" in answer.refused["implicit-gemm-hopper"][0]
    other = turnout.explain(op, *args, device=replace(Device.named("h200"), name="NVIDIA H20"), **options)
    assert "implicit-gemm-hopper" not in other.refused


def test_copies_that_others_read_stay():
    ptx = "mov.b32 %r2, %r1;\nwgmma.mma_async {%r9}, {%r2};\nst.b32 [%rd1], %r2;"
    assert operands.without_copies(ptx) == ptx
    twice = "mov.b32 %r2, %r1;\nwgmma.mma_async {%r9}, {%r2};\nwgmma.mma_async {%r8}, {%r2};"
    assert "%r2" not in operands.without_copies(twice)
    assert operands.without_copies("mov.u64 %rd2, %rd1;") == "mov.u64 %rd2, %rd1;"
