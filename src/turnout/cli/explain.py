"""`turnout explain`: read a public function's arguments from the command line, and print the verdict."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any

import typer

from turnout.cli.common import Json

TAKES_ANY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}
LAYOUTS = ("contiguous", "channels-last", "strides=...")


def explain(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="A public function or an op, such as matmul.")],
    dtype: Annotated[
        str, typer.Option(help="Of all tensors: float32, float16, bfloat16 (fp32, fp16, bf16), complex64 ...")
    ] = "float32",
    layout: Annotated[
        str, typer.Option(help="Of tensors with four or five dimensions: contiguous or channels-last.")
    ] = "contiguous",
    device: Annotated[
        str | None,
        typer.Option(help="A device by name, here or not: h200, a100, mi300x, cpu ...; default: this one."),
    ] = None,
    json: Json = False,
) -> None:
    """Show which route a call would take and why, also for a GPU that is not in this machine.

    Pass each argument of the function as --name VALUE: a shape for a tensor, otherwise a number, a list, a
    string, true, false or none. A dtype and a layout for one tensor follow its shape: 8,64:float32,
    1,96,4,60,104:channels-last, 2,24,4608,128:strides=14155776,128,3072,1. Semicolons separate several
    tensors or lists. Where the function takes lists as well as tensors (kv_lengths), numbers are a list.
    Omitted arguments take their defaults.

    [bold]Example[/bold]  turnout explain matmul --a 1,50000000 --b 50000000,1 --dtype bf16 --device h200

    [bold]Example[/bold]  turnout explain conv2d --input 1,64,90,160 --weight 64,64,3,3 --layout channels-last

    [bold]Example[/bold]  turnout explain norm_rope_qk --q "1,512,8,64;1,64,8,64" --k "1,512,8,64;1,64,8,64"
    """
    from turnout.asking import check_shapes
    from turnout.asking import explain as ask
    from turnout.routing.device import Device
    from turnout.routing.names import device_here, one_of
    from turnout.routing.public import public_named

    parameters = public_named(op).signature.parameters
    options = _options(context.args)
    for name in options:
        if name not in parameters:
            raise ValueError(f"{op} has no argument {name}; {one_of(name, parameters)}")
    arguments = {
        name: _argument(f"--{name}", parameters[name].annotation, text, dtype, layout)
        for name, text in options.items()
    }
    card = Device.of(device_here(None)) if device is None else Device.named(device)
    try:
        check_shapes(op, **arguments)
        verdict = ask(op, **arguments, device=card)
    except TypeError as mistake:
        example = f"turnout explain {op} --{next(iter(parameters))} 1,4096 ..."
        raise ValueError(f"{mistake}: {example}") from mistake
    print(verdict.json() if json else verdict)


def _options(words: list[str]) -> dict[str, str]:
    """Read `--a 1,2 --b=3` as {"a": "1,2", "b": "3"}."""
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    options: dict[str, str] = {}
    while flat:
        option = flat.pop(0)
        if not option.startswith("--"):
            raise ValueError(
                f"{option!r} cannot be read; give each argument as --name and a shape: --a 1,4096 --b 4096,1"
            )
        if not flat or flat[0].startswith("--"):
            raise ValueError(f"{option} has no value; give one, such as {option} 1,4096 or {option} true")
        options[option[2:].replace("-", "_")] = flat.pop(0)
    return options


def _argument(option: str, annotation: Any, text: str, dtype: str, layout: str) -> Any:
    """The value of an option's text for a parameter with this annotation."""
    kinds = [kind.strip() for kind in str(annotation).split("|")]

    def any_has(*words: str) -> bool:
        return any(word in kind for kind in kinds for word in words)

    if text.lower() in ("none", "null"):
        if "None" not in kinds:
            raise ValueError(f"{option} none: it takes {annotation_in_words(kinds)} and cannot be left empty")
        return None
    if any_has("bool"):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{option} {text}: it takes true or false")
        return text.lower() == "true"
    if ";" in text and any_has("Sequence", "list"):
        return [_argument(option, annotation, part, dtype, layout) for part in text.split(";")]
    shape, *suffixes = text.split(":")
    takes_lists = any(kind.endswith(("[int]", "[int]]")) for kind in kinds)
    try:
        numbers = _numbers(shape)
    except ValueError as mistake:
        if any_has("float"):
            return _float(option, text)
        if any_has("str"):
            return text
        shape_in_words = "a shape, whole numbers with commas between, such as 1,4096"
        takes = shape_in_words if any_has("Tensor") else f"{annotation_in_words(kinds)}, such as 1 or 1,2"
        raise ValueError(f"{option} {text}: it takes {takes}") from mistake
    if any(abs(number) >= 2**63 for number in numbers):
        raise ValueError(f"{option} {text}: too large; numbers are below 2**63")
    if any_has("Tensor") and (suffixes or not takes_lists):
        return _tensor(option, numbers, suffixes, dtype, layout)
    takes_number = not takes_lists or any("int" in kind and "[" not in kind for kind in kinds)
    is_number = len(numbers) == 1 and takes_number
    if not is_number and not takes_lists:
        raise ValueError(f"{option} {text}: it takes {annotation_in_words(kinds)}, not several numbers")
    return numbers[0] if is_number else numbers


def _numbers(text: str) -> list[int]:
    """Whole numbers with commas between, in brackets or without: "1,4096", "[1, 4096]"; none for "".

    >>> _numbers("[1, 4096]"), _numbers("")
    ([1, 4096], [])
    """
    inner = text.strip()
    for left, right in ("[]", "()"):
        if inner.startswith(left) and inner.endswith(right):
            inner = inner[1:-1].strip().removesuffix(",")
    return [int(number) for number in inner.split(",")] if inner else []


def annotation_in_words(kinds: list[str]) -> str:
    """A parameter's type without the names of modules: "int or Sequence[int]"."""
    short = (kind.removeprefix("<class '").removesuffix("'>").split("[")[0].split(".")[-1] for kind in kinds)
    return " or ".join(dict.fromkeys(short))


def _float(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as mistake:
        raise ValueError(f"{option} {text}: it takes a number, such as 1e-6") from mistake


def _tensor(option: str, shape: list[int], suffixes: list[str], dtype: str, layout: str) -> Any:
    """A meta tensor. suffixes: a dtype, a layout, or both, which replace the defaults for this tensor."""
    import torch

    from turnout.routing.names import dtype_named, not_known, one_of

    if any(size < 0 for size in shape):
        raise ValueError(f"{option}: shape {shape} has a negative size; sizes are 0 or more")
    layouts = [suffix for suffix in suffixes if _layout(suffix) is not None]
    dtypes = [suffix for suffix in suffixes if suffix not in layouts]
    for suffix in dtypes:
        if difflib.get_close_matches(suffix, ("channels-last", "contiguous", "strides="), cutoff=0.7):
            raise ValueError(f"{option}: {suffix!r} is no layout; {one_of(suffix, LAYOUTS)}")
    for kind, own in (("dtypes", dtypes), ("layouts", layouts)):
        if len(own) > 1:
            raise ValueError(f"{option}: {' and '.join(own)} are {len(own)} {kind}; give one")
    has_own_layout = bool(layouts)
    given, dtype = (layouts or [layout])[0], (dtypes or [dtype])[0]
    layout = _layout(given) or ""
    _check_extent(option, "shape", shape)
    options: dict[str, Any] = {"dtype": dtype_named(dtype), "device": "meta"}
    if layout.startswith("strides="):
        try:
            strides = [int(n) for n in layout.removeprefix("strides=").split(",")]
        except ValueError as mistake:
            message = (
                f"{option}: {layout}: strides are whole numbers with commas between, such as strides=64,1"
            )
            raise ValueError(message) from mistake
        if any(stride < 0 for stride in strides):
            raise ValueError(f"{option}: strides {strides}: torch has no negative strides; give 0 or more")
        _check_extent(option, "strides", strides)
        if len(strides) != len(shape):
            raise ValueError(
                f"{option}: {len(strides)} strides for a shape of {len(shape)} sizes; give as many"
            )
        return torch.empty_strided(shape, strides, **options)
    if layout not in LAYOUTS[:2]:
        raise not_known("layout", given, LAYOUTS)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if layout == "channels-last" else {}
    if has_own_layout and formats and len(shape) not in formats:
        raise ValueError(
            f"{option}: channels-last needs four or five dimensions, shape {shape} has {len(shape)}"
        )
    return torch.empty(shape, **options, memory_format=formats.get(len(shape), torch.contiguous_format))


def _layout(text: str) -> str | None:
    """The layout of a word, in whatever case, with hyphens or underscores; None for one that is none."""
    word = text.lower().replace("_", "-")
    return word if word in LAYOUTS[:2] or word.startswith("strides=") else None


def _check_extent(option: str, kind: str, numbers: list[int]) -> None:
    """Raise ValueError if a tensor of this extent has more elements than torch can count."""
    if math.prod(max(number, 1) for number in numbers) >= 2**63 or max(numbers, default=0) >= 2**63:
        raise ValueError(f"{option}: {kind} {numbers}: too large; torch counts up to 2**63 - 1 elements")
