"""Names of Gluon that changed from Triton 3.6 to 3.9, each under one that stays. For kernels only.

They are Gluon's own builtins, so a kernel calls them as such: no function stands between. The new name is
asked for first, as 3.9 still has the old ones, which raise when compiled.
"""
# pyright: basic, reportAttributeAccessIssue=false

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = (
    tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
)  # renamed in 3.8
async_store = (
    tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
)  # renamed in 3.8
_memory = gl.shared_memory_descriptor
reinterpret = (
    _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
)  # renamed in 3.9
