"""The profile of a race: kernels by kind, the routes that launched them, the file for Perfetto."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

import turnout
from tests.race.races import CPU, race_on_a_gpu
from turnout.race import perfetto
from turnout.race.kernels import (
    Kernel,
    Trace,
    kind_of,
    launched_in,
    traced,
    without_profiler_lines,
)
from turnout.race.run import race


def test_kind_of_a_kernel_follows_from_its_name():
    names = {
        "sm90_xmma_fprop_implicit_gemm_bf16": "conv",
        "implicit_gemm": "conv",
        "nvjet_hsh_128x256": "gemm",
        "rms_rows": "norm",
        "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
        "void cudnn::engines_precompiled::nchwToNhwcKernel": "layout",
        "Memcpy DtoD": "copy",
        "flash_fwd": "attention",
        "something": "other",
    }
    assert {name: kind_of(name) for name in names} == names


def test_trace_sums_times_by_kind_and_by_kernel():
    trace = Trace([Kernel("conv_a", 0.0, 2.0), Kernel("conv_b", 2.0, 1.0), Kernel("Memcpy", 3.0, 0.5)])
    assert trace.by_kind() == {"conv": 3.0, "copy": 0.5}
    assert trace.longest(1) == [("conv_a", 1, 2.0)]


def event(name, start=0.0, end=0.0, number=0, where="CPU"):
    """As torch's profiler gives them, in microseconds."""
    device, times = SimpleNamespace(name=where), SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, id=number, device_type=device, time_range=times, device_time=end - start
    )


def test_kernels_belong_to_the_call_that_launched_them():
    """By the number of their launch, whenever they run; of calls in one another to the inner one."""
    calls = [event("turnout::a/x", 0, 100), event("turnout::b/y", 20, 50), event("turnout::a/x", 200, 300)]
    others = [
        event("cudaLaunchKernel", 10, 12, 1),
        event("cuLaunchKernelEx", 30, 31, 2),
        event("cuLaunchKernelEx", 150, 151, 3),
        event("cudaMemcpyAsync", 210, 220, 4),
        event("aten::add", 230, 240, 5),
    ]
    kernels = [
        event(f"kernel {i}", 1000 * i, 1000 * i + ms * 1000, i, "CUDA")
        for i, ms in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 16))
    ]
    ranges = [event("turnout::a/x", 1000, 4000, 1, "CUDA")]  # a range repeats its kernels
    assert launched_in(calls, [*calls, *others, *kernels, *ranges]) == [1.0, 2.0, 8.0]


@pytest.mark.gpu
def test_triton_kernels_have_time_in_a_trace():
    x = torch.randn(1, 96, 4, 120, 208, device="cuda").to(memory_format=torch.channels_last_3d)
    weight = torch.ones(96, device="cuda")
    with turnout.pin(rms_norm_silu="rows"):
        turnout.rms_norm_silu(x, weight, eps=1e-6)
        trace = traced(
            lambda: [turnout.rms_norm_silu(x, weight, eps=1e-6) for _ in range(3)],
            torch.device("cuda"),
            routes=True,
        )
    assert [(share.op, share.route, share.calls) for share in trace.routes] == [("rms_norm_silu", "rows", 3)]
    assert trace.routes[0].ms == pytest.approx(trace.busy, rel=0.01)


def test_perfetto_file_has_every_kernel_of_every_lane(tmp_path):
    result = race_on_a_gpu(1)
    perfetto.write(result, tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert list(names.values()) == [f"wan-vae, {lane}" for lane in result.lanes]
    for process, lane in enumerate(result.lanes.values()):
        kernels = [
            event for event in content["traceEvents"] if event["ph"] == "X" and event["pid"] == process
        ]
        assert [event["name"] for event in kernels] == [kernel.name for kernel in lane.trace.kernels]
        assert kernels[0]["ts"] == 0
        assert sum(event["dur"] for event in kernels) == pytest.approx(1e3 * lane.trace.busy, rel=1e-3)


def test_lines_of_the_profiler_are_not_shown(capfd):
    race("flux-vae", "tiny", torch.float32, CPU, rounds=2, seconds=0)
    out, err = capfd.readouterr()
    assert "profiler_st" not in out + err
    with without_profiler_lines():
        os.write(
            2,
            b"before\nUSDT:2026-11-16 17:54:04 19877:19877 SyncActivityProfilerHandler.cpp:52] profiler_start\nafter\n",  # noqa: E501
        )
        os.write(2, b"ERROR:2026-11-16 17:54:04 1:2 CuptiActivityApi.cpp:5] no privileges\n")
        os.write(1, b"INFO:2026-11-16 17:54:04 1:2 a.cpp:5] hello\nkept without an end")
    out, err = capfd.readouterr()
    assert out == "kept without an end"
    assert err == "before\nafter\nERROR:2026-11-16 17:54:04 1:2 CuptiActivityApi.cpp:5] no privileges\n"
