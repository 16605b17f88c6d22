"""What torch and others call private is used in one module per dependency, and is there in this version."""

import ast
from pathlib import Path

import pytest

import turnout
from turnout import doctor
from turnout.routing import torch_private

PACKAGE = Path(turnout.__file__).parent
# The one module, or folder, that may use what each package calls private: of transformers nothing does.
HOME = {
    "torch": "routing/torch_private.py",
    "triton": "launch/",
    "numba": "ops/numba_cache.py",
    "diffusers": "models/diffusers_private.py",
    "transformers": "nowhere",
}
# Private by their place, public by their use: extensions of Numba and tutorials of Triton import these.
PUBLIC = ("numba.core.types", "numba.core.cgutils", "numba.core.config", "triton.runtime.driver")
INTERNAL = {"numba": ("numba.core",), "triton": ("triton.runtime", "triton.compiler", "triton.backends")}


def is_private(name):
    """Whether a dotted name, such as torch._C.Stream, is private to its package."""
    package, *parts = name.split(".")
    if package not in HOME or name.startswith(PUBLIC) or parts[:1] == ["ops"]:
        return False
    if name.startswith(INTERNAL.get(package, ())):
        return True
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def names_used(tree):
    """The dotted names that a module imports or looks up in an imported module."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update((a.asname or a.name, a.name) for a in node.names)
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases.update((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
            yield from (f"{node.module}.{a.name}" for a in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if rest:
                yield f"{aliases.get(first, first)}.{rest}"


def test_private_names_of_a_package_are_used_in_one_place():
    strays = []
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if path.endswith("kernels.py"):
            continue  # kernels are written in Triton and Numba
        for name in names_used(ast.parse(file.read_text())):
            if is_private(name) and not path.startswith(HOME[name.split(".")[0]]):
                strays.append(f"{path}: {name}")
    assert sorted(set(strays)) == []


def test_this_torch_has_all_private_names():
    assert torch_private.missing() == []


def test_a_missing_name_raises_when_it_is_used_and_is_listed(monkeypatch):
    monkeypatch.setattr(torch_private, "_missing", [])
    gone = torch_private.find("torch:_C._no_such_function")
    assert torch_private.missing() == ["torch:_C._no_such_function"]
    assert any("has no torch._C._no_such_function: calls" in check.note for check in doctor.known_bad())
    with pytest.raises(
        torch_private.MissingName, match=r"has no torch\._C\._no_such_function, which turnout"
    ):
        gone(1)
    assert torch_private.find("torch:_C._no_such_function", lambda: 7)() == 7
