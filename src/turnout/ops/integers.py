"""Integer arithmetic of launches and costs."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> ceil_div(7, 3), ceil_div(6, 3)
    (3, 2)
    """
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> power_of_two(1), power_of_two(5)
    (1, 8)
    """
    return 1 << max(n - 1, 0).bit_length()
