"""Fingerprints follow what a timing depends on, and nothing else."""

import importlib.util
import inspect
from pathlib import Path

from turnout.ops.dot import DOT
from turnout.ops.matmul import MATMUL
from turnout.routing import source

TEXT = '''
from turnout.ops.dot.contraction import CPU_DTYPES

SIZE = 4
UNUSED = 1


def helper(x):
    """Doc."""
    return x + SIZE


@decorated
def route(a, b):
    # a comment
    return helper(a) + b
'''


def fingerprint(tmp_path, text):
    file = tmp_path / f"m{abs(hash(text))}.py"
    file.write_text(text.replace("@decorated\n", "@(lambda f: f)\n"))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source._definitions.cache_clear()
    return source.fingerprint(module.route)


def test_comments_docstrings_and_what_is_not_used_do_not_count(tmp_path):
    before = fingerprint(tmp_path, TEXT)
    for old, new in (
        ("# a comment", "# another"),
        ('"""Doc."""', '"""Other words."""'),
        ("UNUSED = 1", "UNUSED = 2"),
        ("@decorated\n", ""),
    ):
        assert fingerprint(tmp_path, TEXT.replace(old, new)) == before


def test_code_it_uses_directly_or_through_others_counts(tmp_path):
    before = fingerprint(tmp_path, TEXT)
    for old, new in (("helper(a) + b", "helper(a) - b"), ("x + SIZE", "x - SIZE"), ("SIZE = 4", "SIZE = 8")):
        assert fingerprint(tmp_path, TEXT.replace(old, new)) != before


def test_kernels_of_another_op_count():
    names = set(source._definitions(Path(inspect.getfile(MATMUL.routes["two-stage"].run))))
    assert {"dot_chunks", "sum_on_gpu", "launch"} <= names
    assert len({route.source for op in (DOT, MATMUL) for route in op.routes.values()}) == len(DOT.routes) + len(MATMUL.routes)
