"""The problem of a whole call, from that of a rank's part."""

from __future__ import annotations

from typing import Any

from turnout.parallel.layout import strides_resized


def scaled(problem: Any, axis: int, whole: int, residual: int | None = None) -> Any:
    """A problem of a part as that of the whole, with so many rows, and so many in what is added to the
    result.
    """
    changed: dict[str, Any] = {}
    fields = problem._asdict()
    for name, strides in (("input", ("input_strides",)), ("shape", ("strides", "out_strides"))):
        if name in fields and isinstance(fields[name], tuple):
            shape = fields[name]
            changed[name] = resized(shape, axis, whole)
            changed |= {s: strides_resized(shape, fields[s], axis, whole) for s in strides if s in fields}
    for name, value in fields.items():
        if name in ("cache", "residual") and value is not None:
            size = whole if name == "cache" or residual is None else residual
            changed[name] = value._replace(
                shape=resized(value.shape, axis, size),
                strides=strides_resized(value.shape, value.strides, axis, size),
            )
        elif {"input", "shape"} & set(getattr(value, "_fields", ())):
            changed[name] = scaled(value, axis, whole, residual)
    return problem._replace(**changed)


def resized(shape: tuple, axis: int, size: int) -> tuple:
    sizes = list(shape)
    sizes[axis] = size
    return tuple(sizes)
