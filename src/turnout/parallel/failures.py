"""What a rank raises when another one failed, left or does not answer."""

from __future__ import annotations


class RankFailed(RuntimeError):
    """This rank's call cannot be finished: another rank raised an exception, ended or did not answer."""


class RanksDiffer(RuntimeError):
    """Ranks that must agree (on versions, tables, settings, weights' shapes, arguments) do not."""
