"""Every public function says what it takes and shows an example that runs."""

import doctest
import inspect
from pathlib import Path

import pytest
import torch

import turnout

FUNCTIONS = [name for name in turnout.__all__ if inspect.isfunction(getattr(turnout, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_runs(name):
    function = getattr(turnout, name)
    assert function.__name__ == name
    parsed = doctest.DocTestParser().get_doctest(
        inspect.getdoc(function), {"torch": torch, "turnout": turnout}, name, None, 0
    )
    assert parsed.examples
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(parsed).failed == 0


def test_public_names_exist_and_keep_their_signatures():
    assert set(turnout.__all__) <= set(dir(turnout))
    assert str(inspect.signature(turnout.dot)) == "(a: 'Tensor', b: 'Tensor') -> 'Tensor'"


def test_readme_shows_the_output_of_explain():
    shown = (Path(__file__).parents[2] / "README.md").read_text().split("```\nmatmul(")[1].split("```")[0]
    a, b = torch.empty(1, 50_000_000, device="meta"), torch.empty(50_000_000, 1, device="meta")
    assert str(turnout.explain(turnout.matmul, a, b, device="cpu")) + "\n" == "matmul(" + shown
