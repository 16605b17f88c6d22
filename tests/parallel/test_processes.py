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


def test_two_ranks():
    """One group of processes for all of it: to start one takes longer than most of what it does."""
    calls = [
        ("same_bits", SOME),
        ("gathered", "first"),
        ("gathered", "none"),
        ("list_dealt_out", "all"),
        ("list_dealt_out", "first"),
        ("list_dealt_out", "none"),
        ("one_raises",),
        ("refused_everywhere",),
        ("refused_on_one",),
        ("with_other_tables",),
    ]
    first, second = run_ranks(on_ranks.in_turn, 2, calls)
    for rank, found in enumerate((first, second)):
        bits, of_first, of_none, *lists, raised, refusals, of_one, tables = found
        assert_bits(bits)
        assert (of_first, of_none) == (True, True)
        own = [None, True, None] if rank == 0 else [True, None, True]  # the largest clip goes first
        assert lists == [[True] * 3, [True if rank == 0 else None] * 3, own]
        messages, *go_on = raised
        reason = "OSError: of a hook" if rank == 1 else "RankFailed: rank 1 raised OSError: of a hook"
        assert [text for text, _ in messages] == [reason] * 2
        assert go_on == [True, True]
        assert_refused(refusals)
        assert_refused_on_one(of_one)
        assert tables.startswith("RanksDiffer: ranks must agree, and differ in measured tables: "), tables


def test_three_ranks_of_which_one_fails():
    """It raises, does not answer in time, and is killed; after the first two the group goes on."""
    calls = [("one_raises",), ("one_is_lost", "stuck"), ("one_is_lost", "killed")]
    found = run_ranks(on_ranks.in_turn, 3, calls)
    assert found[2] is None  # killed
    for raised, *lost in found[:2]:
        messages, repeated, stream_again = raised
        assert len(messages) == 2
        for text, seconds in messages:
            assert "rank 2 raised OSError: of a hook" in text
            assert seconds < 20
        assert repeated
        assert stream_again
        for text, seconds in lost:
            assert text.startswith("RankFailed: ")
            assert seconds < 40


if ALL:

    @pytest.mark.parametrize("ranks", [2, 3, 4])
    def test_bits_of_every_kind_are_those_of_one_process(ranks):
        for found in run_ranks(on_ranks.same_bits, ranks, EVERY, timeout=1800):
            assert_bits(found)


def assert_bits(found):
    assert isinstance(found, dict), found
    assert all(all(same) for same in found.values()), found


def assert_refused_on_one(found):
    messages, works_then = found
    needed = (
        "disable_tiling",
        "differ in method: decode on rank 0, encode on rank 1",
        "'str' object has no attribute",
        "item 1 of the list is str",
        "values of the input: ",
    )
    assert [part for part, text in zip(needed, messages, strict=True) if part not in text] == [], messages
    assert works_then


def assert_refused(found):
    messages, works_then = found
    needed = (
        "a mesh of 2 dimensions",
        "Linear is not known",
        "disable_tiling",
        "RanksDiffer: ranks must agree, and differ in weights",
        "height 1 and width 1 for 2 ranks",
        "shape and dtype: ",
        "numerics: ",
    )
    assert [part for part, text in zip(needed, messages, strict=True) if part not in text] == [], messages
    assert works_then
