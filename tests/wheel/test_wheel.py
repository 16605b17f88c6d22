"""A built wheel holds the tables and works in an environment that has nothing but what it asks for."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_in_an_empty_environment(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "turnout/tables/nvidia-h200.json" in names
    assert not [name for name in names if name.startswith("tests")]
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    code = (
        "import torch, turnout; from turnout.routing.device import Device; from turnout.routing.table import Tables;"
        "assert turnout.dot(torch.ones(5), torch.ones(5)) == 5; print(len(Tables(Device.named('h200')).shipped.rows), turnout.__file__)"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows, file = done.stdout.split()
    assert int(rows) >= 18
    assert file.startswith(str(tmp_path))
    said = subprocess.run([str(python.with_name("turnout")), "doctor"], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr
