"""Look up names that people type: of ops, routes, models, devices, dtypes. Errors suggest the nearest one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import torch

_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
DTYPES = tuple(sorted(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)))


def one_of(name: str, known: Iterable[str], spellings: Mapping[str, str] | None = None) -> str:
    """The end of an error about an unknown name: the nearest known one, if any is near, then all of them.

    spellings: other spellings in lower case, and the known name that each stands for.

    >>> one_of("atention", ["attention", "dot"]), one_of("x", ["attention", "dot"])
    ('did you mean attention? One of: attention, dot', 'one of: attention, dot')
    """
    known = list(known)
    meant = {**(spellings or {}), **{each.lower(): each for each in known}}
    near = difflib.get_close_matches(str(name).lower(), meant, n=1, cutoff=0.6)
    return (f"did you mean {meant[near[0]]}? One of: " if near else "one of: ") + ", ".join(known)


def not_known(
    kind: str, name: str, known: Iterable[str], spellings: Mapping[str, str] | None = None
) -> ValueError:
    """The error about a name that is not known.

    >>> not_known("op", "atention", ["attention", "dot"])
    ValueError("op 'atention' is not known; did you mean attention? One of: attention, dot")
    """
    return ValueError(f"{kind} {name!r} is not known; {one_of(name, known, spellings)}")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name: torch's own, or one of bf16, fp16, half, fp32 and fp64.

    >>> dtype_named("BF16"), dtype_named("torch.int32")
    (torch.bfloat16, torch.int32)
    """
    word = name.lower().removeprefix("torch.")
    dtype = getattr(torch, _SHORT_DTYPES.get(word, word), None)
    if not isinstance(dtype, torch.dtype):
        usual = ("float32", "float16", "bfloat16", "float64", "complex64", "int32", "int64", "bool")
        near = difflib.get_close_matches(name, [*DTYPES, *_SHORT_DTYPES], n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? Some are: " if near else "some are: "
        raise ValueError(f"dtype {name!r} is not known; {hint}{', '.join(usual)}")
    return dtype


def model_dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name, for the weights of a model: a floating-point one.

    >>> model_dtype_named("fp16")
    torch.float16
    """
    dtype = dtype_named(name)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ValueError(f"dtype {name!r}: a model runs in bfloat16, float16, float32 or float64; give one")
    return dtype


def device_here(name: str | None) -> torch.device:
    """The device of this machine that torch calls by this name; for None the first GPU, else the CPU.

    >>> device_here("cpu")
    device(type='cpu')
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as mistake:
        near = difflib.get_close_matches(name.lower(), ("cpu", "cuda"), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        message = f"device {name!r} is not one of this machine's; {hint}give cpu, cuda or cuda:1"
        raise ValueError(message) from mistake
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this machine has no CUDA GPU; give cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device {name!r}: this machine has {count} CUDA GPUs, cuda:0 to cuda:{count - 1}")
    return device
