"""Ranks as processes with gloo: started, watched, and ended by a test."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(function, ranks, *args, timeout=240):
    """`function(mesh, *args)` in `ranks` processes, and what each returned or raised (as text); None for one
    that left without a word. It is found again by its module and name."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function.__module__, function.__name__, args)))
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }
        outputs = [Path(folder, f"output-{rank}") for rank in range(ranks)]
        command = [sys.executable, "-m", "tests.parallel.processes", str(call)]
        started = [
            subprocess.Popen([*command, str(output)], cwd=ROOT, env={**environment, "RANK": str(rank)})
            for rank, output in enumerate(outputs)
        ]
        try:
            for process in started:
                process.wait(timeout)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [pickle.loads(output.read_bytes()) if output.exists() else None for output in outputs]


def main():
    import importlib

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    call, output = map(Path, sys.argv[1:])
    module, name, args = pickle.loads(call.read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        result = getattr(importlib.import_module(module), name)(mesh, *args)
    except Exception as failure:
        traceback.print_exc()
        result = f"{type(failure).__name__}: {failure}"
    output.with_suffix(".part").write_bytes(pickle.dumps(result))
    output.with_suffix(".part").rename(output)
    others = [output.with_name(f"output-{rank}") for rank in range(dist.get_world_size())]
    end = time.monotonic() + 15
    while dist.get_rank() == 0 and time.monotonic() < end and not all(each.exists() for each in others):
        time.sleep(0.1)  # this process has the store that the others ask
    os._exit(0)  # a group that lost a rank may wait when it is taken down


if __name__ == "__main__":
    main()
