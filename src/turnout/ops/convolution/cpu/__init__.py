"""Convolutions by our own CPU kernels: Winograd's method.

`winograd.py` leads in, the kernels files are Numba's.
"""
