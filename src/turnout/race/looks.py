"""The colour and the meaning of each kind of kernel on the page of a race."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    """The colour that a kind of kernel is drawn in, and what it does."""

    colour: str
    meaning: str


# In the order they are drawn, from the ground up: what a model is made of first, what only moves or prepares
# its data last. Every colour has a contrast of 3 to 1 at least on the light and on the dark ground of a band.
LOOKS = {
    "conv": Look("#2f6fde", "convolutions"),
    "gemm": Look("#0f93b0", "matrix products"),
    "attention": Look("#8757e0", "softmax of queries and keys, times values"),
    "scan": Look("#c24fbd", "state-space scans"),
    "norm": Look("#178a5c", "norms, with the SiLU behind them where it is fused"),
    "resample": Look("#6a951c", "upsampling and downsampling"),
    "reduce": Look("#5f7f3c", "sums, means, softmax"),
    "elementwise": Look("#bd7d0a", "number by number: SiLU, additions, products"),
    "copy": Look("#d6453d", "copies, casts, concatenation, padding"),
    "layout": Look("#e0558f", "channels moved to the front or to the back"),
    "fill": Look("#a5694f", "memory set to one value"),
    "other": Look("#7d848e", "everything else"),
}
