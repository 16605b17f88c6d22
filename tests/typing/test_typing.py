"""turnout is a typed package: a user's file passes pyright in strict mode, and does what it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import turnout

ROOT = Path(__file__).parents[2]
USER_FILE = Path(__file__).with_name("user_file.py")


def pyright(folder: Path, text: str) -> list[str]:
    """What pyright says in strict mode of a user's file that is not in this repository."""
    (folder / "user.py").write_text(text)
    settings = {"include": ["user.py"], "typeCheckingMode": "strict", "extraPaths": [str(ROOT / "src")]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "-p",
        str(folder),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    return [
        f"{result['range']['start']['line'] + 1}: {result['message']}"
        for result in json.loads(done.stdout)["generalDiagnostics"]
    ]


def test_a_users_file_passes_in_strict_mode(tmp_path):
    assert pyright(tmp_path, USER_FILE.read_text()) == []


def test_a_users_type_errors_are_reported(tmp_path):
    lines = [
        "import torch, turnout",
        "x = torch.ones(1)",
        "turnout.dot(x)",
        "turnout.dot(x, 3)",
        "turnout.conv2d(x, x, paddding=1)",
        "y: int = turnout.matmul(x, x)",
        "turnout.causal_conv1d(x, x).shape",
        "turnout.causal_conv1d(x, x, return_final_states=True).shape",
    ]
    wrong = {int(message.split(":")[0]) for message in pyright(tmp_path, "\n".join(lines) + "\n")}
    assert {3, 4, 5, 6, 8} <= wrong
    assert 7 not in {
        int(message.split(":")[0])
        for message in pyright(tmp_path, "\n".join(lines[:7]) + "\n")
        if "shape" in message
    }


@pytest.mark.parametrize("name", turnout.__all__)
def test_the_users_file_has_every_public_name(name):
    assert re.search(rf"\bturnout\.{name}\b", USER_FILE.read_text())


def test_the_users_file_runs():
    done = subprocess.run([sys.executable, str(USER_FILE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_package_says_that_it_is_typed():
    assert Path(turnout.__file__).with_name("py.typed").exists()
