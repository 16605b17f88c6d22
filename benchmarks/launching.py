"""What a routed call costs the host up to the driver, without a card: python benchmarks/launching.py

Calls of the router with all that stands between them and the driver: key, checks, plan, allocation, Triton's
launcher in C. A library that launches nothing stands in for the driver (tests/launch/recording_cuda.c), and
tensors are on the CPU. us of the process's own time, the median of 31 rounds that take turns. A card's host
adds what CUDA's launch and allocator take.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CALLS = (  # op, route, the case's name in `turnout bench`
    ("norm_rope", "one-pass", "text 1x512x24x128 bfloat16"),
    ("rms_norm_silu", "rows", "tiny"),
    ("conv2d", "implicit-gemm-hopper", "128x128 16->512 3x3 channels-last bfloat16"),
    ("causal_conv1d_update", "one-launch", "step 1x5120 state 4 bfloat16"),
    ("selective_scan_update", "one-launch", "step"),
)
ROUNDS, REPEATS = 31, 300


def library(folder: Path) -> None:
    """The stand-in for the driver."""
    import triton

    include = Path(triton.__file__).parent / "backends/nvidia/include"
    source = ROOT / "tests/launch/recording_cuda.c"
    target = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-O2", "-w", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run(["gcc", *options, str(source), "-o", str(target)], check=True)
    (folder / "libcuda.so").symlink_to(target)


def measure() -> None:
    """In a process that finds the stand-in."""
    sys.path[:0] = [str(ROOT)]
    import torch
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from tests.launch.launched_directly import pretend_a_card
    from turnout.launch import launcher, plans
    from turnout.launch.recording import recorded
    from turnout.ops.convolution.gpu import routes as convolution_routes
    from turnout.ops.convolution.layout import LAST
    from turnout.routing import settings
    from turnout.routing.device import Device
    from turnout.routing.op import OPS

    torch.set_num_threads(1)
    pretend_a_card()
    driver.set_active(CudaDriver())
    card, device = torch.device("cuda", 0), Device.named("h200")
    plans.card_of = lambda tensor: card
    plans.start = launcher._start_in_triton
    convolution_routes.torch_format = lambda input, *rest: LAST[input.dim()]

    runs: dict[str, dict[str, Any]] = {}
    for name, route_name, wanted in CALLS:
        op = OPS[name]
        case = next(case for case in op.cases() if str(case).startswith(wanted))
        args = op.arguments(*case.make(torch.device("cpu"), 0))
        route = op.routes[route_name]
        with recorded(device):
            prepared = route.prepared(args, route.configs(op.problem(*args), device)[0])
        run = op.with_runtime_checks(prepared.call, args, route)
        split = settings.split_by(lambda op, args, run=run: run)

        def call(op: Any = op, args: tuple = args, split: Any = split) -> None:
            op.call(*args)

        runs[f"{name} {case}"] = {
            "settings": split,
            "call": call,
            "checked": lambda run=run, args=args: run(*args),
            "planned": lambda run=prepared.call, args=args: run(*args),
        }
    times: dict[str, dict[str, list[float]]] = {
        name: {part: [] for part in ("call", "checked", "planned")} for name in runs
    }
    with torch.no_grad():
        for _ in range(ROUNDS + 2):
            for name, each in runs.items():
                with settings.entering(each["settings"]):
                    for part, samples in times[name].items():
                        run = each[part]
                        start = time.thread_time()
                        for _ in range(REPEATS):
                            run()
                        samples.append((time.thread_time() - start) / REPEATS * 1e6)
    print(f"{'':70s} {'call':>7s} {'key':>7s} {'checks':>7s} {'plan':>7s}  us")
    for name, parts in times.items():
        call, checked, planned = (statistics.median(samples[2:]) for samples in parts.values())
        print(f"{name:70s} {call:7.2f} {call - checked:7.2f} {checked - planned:7.2f} {planned:7.2f}")


def main() -> None:
    if "measure" in sys.argv:
        measure()
        return
    with tempfile.TemporaryDirectory() as folder:
        library(Path(folder))
        environment = {"TRITON_LIBCUDA_PATH": folder, "LD_LIBRARY_PATH": folder, "TRITON_CACHE_DIR": folder}
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, __file__, "measure"]
        subprocess.run(command, env={**os.environ, **environment, "PYTHONPATH": path}, check=True)


if __name__ == "__main__":
    main()
