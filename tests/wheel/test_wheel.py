"""A built wheel holds the tables and works in an environment that has nothing but what it asks for."""

import email
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import turnout

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    [file] = folder.glob("*.whl")
    return file


def test_wheel_holds_every_file_of_the_package(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    git = ["git", "-C", str(ROOT), "ls-files", "src"]
    tracked = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split()
    needed = {name.removeprefix("src/") for name in tracked}
    assert {
        "turnout/py.typed",
        "turnout/race/templates/report.html",
        "turnout/tables/nvidia-h200.json",
        "turnout/devices/cpu.toml",
    } <= needed
    assert needed <= names
    assert not [name for name in names if not name.startswith("turnout/")]


def test_wheel_metadata_is_complete(wheel):
    archive = zipfile.ZipFile(wheel)
    [file] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(file))
    assert metadata["Version"] == turnout.__version__
    assert set(metadata.get_all("Provides-Extra", [])) == {"cpu", "docs", "dev", "plot", "race"}
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "track" not in metadata["Summary"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {turnout.__version__}" in changes


def test_wheel_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    code = (
        "import torch, turnout; from turnout.routing.device import Device;"
        "from turnout.routing.table import Tables;"
        "assert turnout.dot(torch.ones(5), torch.ones(5)) == 5;"
        "print(len(Tables(Device.named('h200')).shipped.rows), turnout.__file__)"
    )
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows, file = done.stdout.split()
    assert int(rows) >= 18
    assert file.startswith(str(tmp_path))
    message = subprocess.run(
        [str(python.with_name("turnout")), "doctor"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert message.returncode == 0, message.stdout + message.stderr
