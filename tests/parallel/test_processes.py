"""Ranks that are processes, with gloo: the bits of one process, and failures that end everywhere."""

import pytest
import torch

from tests.parallel import on_ranks
from tests.parallel.matrix import ALL, DTYPES, LATENTS
from tests.parallel.processes import run_ranks

SOME = [
    ("wan", torch.bfloat16, True, "width"),
    ("wan", torch.float32, True, "auto"),
    ("wan22", torch.bfloat16, False, "height"),
    ("qwen-image-vae", torch.float32, False, "auto"),
]
EVERY = [
    (name, dtype, fast, split)
    for name in LATENTS
    for dtype in DTYPES
    for fast in (False, True)
    for split in ("height", "width")
]


@pytest.mark.parametrize("ranks", [2, 3, 4] if ALL else [2])
def test_bits_are_those_of_one_process(ranks):
    for result in run_ranks(on_ranks.same_bits, ranks, EVERY if ALL else SOME, timeout=1800 if ALL else 240):
        assert isinstance(result, dict), result
        assert all(all(same) for same in result.values()), result


@pytest.mark.parametrize("gather", ["first", "none"])
def test_results_go_where_they_are_asked_for(gather):
    assert run_ranks(on_ranks.gathered, 2, gather) == [True, True]


def test_bad_input_and_ranks_that_differ_are_refused_on_every_rank():
    for result in run_ranks(on_ranks.refused_everywhere, 2):
        message, works_then = result
        needed = (
            "a mesh of 2 dimensions",
            "Linear is not known",
            "disable_tiling",
            "RanksDiffer: ranks must agree, and differ in weights",
            "height 1 and width 1 for 2 ranks",
            "shape and dtype: ",
            "numerics: ",
        )
        assert [part for part, text in zip(needed, message, strict=True) if part not in text] == [], message
        assert works_then


def test_ranks_with_other_tables_are_refused():
    for message in run_ranks(on_ranks.with_other_tables, 2):
        assert message.startswith("RanksDiffer: ranks must agree, and differ in measured tables: ")


def test_exception_of_one_rank_is_raised_on_all_and_all_go_on():
    result = run_ranks(on_ranks.one_raises, 3)
    for rank, (message, repeated, stream_again) in enumerate(result):
        assert len(message) == 2
        for text, seconds in message:
            assert text == "OSError: of a hook" if rank == 2 else "rank 2 raised OSError: of a hook" in text
            assert seconds < 20
        assert repeated
        assert stream_again


@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_lost_rank_ends_the_call_of_all_others(how):
    result = run_ranks(on_ranks.one_is_lost, 3, how, timeout=120)
    for message, seconds in result[:2]:
        assert message.startswith("RankFailed: ")
        assert seconds < 40
