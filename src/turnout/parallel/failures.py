"""What a rank raises when another one failed, left or does not answer."""

from __future__ import annotations


class RankFailed(RuntimeError):
    """Another rank raised an exception, ended or did not answer in time: this rank's call cannot be finished."""


class RanksDiffer(RuntimeError):
    """Ranks that must agree (on versions, tables, settings, weights' shapes, arguments) do not."""
