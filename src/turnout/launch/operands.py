"""Products with operands in registers, without the copies that Triton makes of these from version 3.8 on.

A warpgroup's product reads its first operand from registers while the program goes on, so nothing may be
written to them before the product is done. From 3.8 on Triton copies the operand for every product
(triton-lang/triton #9514), so that a program may write to the original. Our convolutions multiply the same
pixels by several taps and keep them until all of these products are done (`settle` in their kernels), so they
need no copy; and six copies of 8 registers beside 192 of sums are more than ptxas 13.3 and 13.4 can place:
they make each product wait for the one before it, and the convolution takes 1.7 times as long. So the copies
are taken out of the PTX of kernels that say `operands_are_kept=True` when they are launched: what is left is
what Triton 3.6 and 3.7 write.
"""
# pyright: reportMissingModuleSource=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from turnout.routing import versions

FIRST_WITH_COPIES = (3, 8)
OPTION = "operands_are_kept"

_REGISTER = re.compile(r"%r\d+")
_COPY = re.compile(
    r"^\s*mov\.b32 (%r\d+), (%r\d+);[ \t]*$", re.MULTILINE
)  # as inline assembly, one blank apart
_lock = threading.RLock()


def without_copies(ptx: str) -> str:
    """PTX in which products read the registers that were copied for them. A copy that anything else reads
    stays.

    >>> copies = "mov.b32 %r2, %r1;\\nmov.b32 %r4, %r3;"
    >>> uses = "wgmma.mma_async {%r9}, {%r2};\\nadd.s32 %r5, %r4, 1;"
    >>> print(without_copies(f"{copies}\\n{uses}"))
    <BLANKLINE>
    mov.b32 %r4, %r3;
    wgmma.mma_async {%r9}, {%r1};
    add.s32 %r5, %r4, 1;
    """
    lines = ptx.splitlines()
    is_product = ["wgmma.mma_async" in line for line in lines]
    everywhere = Counter(register for line in lines for register in _REGISTER.findall(line))
    in_products = Counter(
        register
        for line, product in zip(lines, is_product, strict=True)
        if product
        for register in _REGISTER.findall(line)
    )
    copies = {
        copy: source for copy, source in _COPY.findall(ptx) if everywhere[copy] == in_products[copy] + 1
    }
    written = []
    for line, product in zip(lines, is_product, strict=True):
        match = _COPY.match(line)
        if match is not None and match[1] in copies:
            written.append("")
        elif product:
            written.append(_REGISTER.sub(lambda register: copies.get(register[0], register[0]), line))
        else:
            written.append(line)
    return "\n".join(written)


_KEY = hashlib.sha256(inspect.getsource(without_copies).encode()).hexdigest()


def _hook(self=None, stages=None, options=None, language=None, capability=None) -> Any:
    """Change Triton's compilation stages; called without arguments, return what to add to its cache keys."""
    if stages is None:
        return f"-turnout-{_KEY[:16]}", _KEY
    make_ptx = stages["ptx"]
    stages["ptx"] = lambda source, metadata: without_copies(make_ptx(source, metadata))
    return None


@contextlib.contextmanager
def compiling(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Enter this to compile a kernel with these options of `launch`; gives those that Triton knows.

    Where the kernel keeps its operands, and Triton would copy them, its PTX is changed on the way. Other
    kernels are compiled as usual; another thread that compiles one waits meanwhile.
    """
    supported = {name: value for name, value in options.items() if name != OPTION}
    if not options.get(OPTION) or not makes_copies():
        yield supported
        return
    from triton import knobs

    with _lock:
        before = knobs.runtime.add_stages_inspection_hook
        if before is not None:  # somebody else's: ours would take its place
            yield supported
            return
        knobs.runtime.add_stages_inspection_hook = _hook
        try:
            yield supported
        finally:
            knobs.runtime.add_stages_inspection_hook = before


def makes_copies() -> bool:
    """Whether the installed Triton copies operands in registers, and lets us change that."""
    version = versions.minor(versions.triton())
    return version is not None and version >= FIRST_WITH_COPIES
