"""Generate the function that users call for an op: one look-up in the dispatch cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from turnout.routing import settings
from turnout.routing.declaration import arguments_of
from turnout.routing.fallback import autocasting

if TYPE_CHECKING:
    from turnout.routing.op import Op


def entry_point(op: Op) -> Callable[..., Any]:
    """Generate the function that users call, as source code for the op's signature.

    It builds the cache key, which holds everything that the choice depends on, looks it up in the dispatch
    cache, and runs what it finds. The code is generated because a loop over the arguments would cost more
    than all the rest.
    """
    tensor = "{0}.shape, {0}.stride(), {0}.dtype"
    key, grads = ["settings()", "autocasting()"] if op.autocast == "cast" else ["settings()"], []
    if op.ambient is not None:
        key.append(f"ambient({next(iter(op.signature.parameters))})")
    # The runtime checks of routes make sure that the other tensors are on this device too. On a CPU, times
    # and costs depend on the number of torch's threads.
    key += [
        f"(device := {next(iter(op.signature.parameters))}.get_device())",
        "threads() if device < 0 else 0",
    ]
    for name, (kind, optional) in arguments_of(op.reference).items():
        part = {"tensor": tensor.format(name), "list": f"tuple({name})"}.get(kind or "", name)
        key.append(f"None if {name} is None else ({part})" if optional and part != name else part)
        if kind == "tensor":
            wants = f"{name}.requires_grad"
            grads.append(f"({name} is not None and {wants})" if optional else wants)
    key.append(f"grad_enabled() and ({' or '.join(grads)})")
    arguments = ", ".join(op.signature.parameters)
    source = f"""
def {op.name}({arguments}):
    if compiling():
        return when_compiled({arguments})
    try:
        cache_key = ({", ".join(key)})
        run = cached(cache_key)
    except Exception as failure:
        raise_if_interrupted(failure, look_up, {arguments})
        return dispatch_uncached(None, {arguments})  # wrong argument types, symbolic sizes: torch says why
    if run is None:
        return dispatch_uncached(cache_key, {arguments})
    return run({arguments})

def look_up({arguments}):
    return cached(({", ".join(key)}))
"""
    scope = {
        "compiling": torch.compiler.is_dynamo_compiling,
        "when_compiled": op.when_compiled,
        "settings": settings.entered.get,
        "autocasting": autocasting,
        "grad_enabled": torch.is_grad_enabled,
        "cached": op.dispatch_cache.get,
        "dispatch_uncached": op.dispatch_uncached,
        "ambient": op.ambient,
        "raise_if_interrupted": raise_if_interrupted,
        "threads": torch.get_num_threads,
    }
    exec(source, scope)
    return scope[op.name]


def raise_if_interrupted(failure: BaseException, look_up: Callable[..., Any], *args: Any) -> None:
    """Raise a failure to build a cache key if it came from a signal handler, and not from the arguments.

    The look-up is repeated: a failure that lies in the arguments comes again, and is not raised here. A
    failure of a handler during the repetition is raised too.
    """
    failed = [failure]
    for _ in range(4):
        try:
            look_up(*args)
        except BaseException as again:  # of any kind: one that does not come again is raised below
            failed.append(again)
            if _are_alike(*failed[-2:]):
                break
        else:
            raise failure
    for one in failed:
        if not _are_alike(one, failed[-1]):
            raise one


def _are_alike(one: BaseException, other: BaseException) -> bool:
    return type(one) is type(other) and str(one) == str(other)
