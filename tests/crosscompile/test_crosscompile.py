"""Every kernel, compiled for cards that are not here, within what these have.

`make test` runs this with each Triton that is supported: see the Makefile.
"""

import re

import pytest

from tests.crosscompile.chosen import CARDS, LEVEL, TRITON, compiled_here, launches
from tests.walk import LAUNCHING, takes
from turnout.launch.crosscompile import Compiled, compile_launches
from turnout.routing.op import OPS

PARTS = 4  # of a card's kernels, so that several processes may share them
PLACES = [(card, part) for card in (CARDS if LEVEL != "quick" else ["sm_90"]) for part in range(PARTS)]

MOST_REGISTERS = 255
# Where a kernel may use more registers than it does, ptxas sometimes keeps a value or two in memory all the
# same.
BY_CHOICE = 8
# Two values of the producer, before its loops: 80 registers a thread let two blocks share a multiprocessor,
# which is worth more. Neither fewer channels a block nor a loop over them mended it.
ALLOWED = {("narrow_out_rolled", (3, 9)): 16}


def reused_barriers(ptx: str) -> list[int]:
    """Offsets of barriers in shared memory that lie where values are stored, and are never made invalid. To
    the card a barrier stays one
    until then: its 8 bytes change when another process is given the card for a while."""
    stores = [int(at) for at in re.findall(r"st\.shared\S*\s+\[%r\d+\+(\d+)\]", ptx)]
    if not stores:
        return []
    sums = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    created, ended = (
        {int(sums.get(at, 0)) for at in re.findall(rf"mbarrier\.{kind}\S*\s+\[(%r\d+)\]", ptx)}
        for kind in ("init", "inval")
    )
    return sorted(barrier for barrier in created - ended if min(stores) <= barrier <= max(stores))


def mismatch(compiled: Compiled, shared: int, tuned: bool) -> str | None:
    """What a kernel needs that it should not, in words.

    Of those that no model's call takes: more memory than there is.
    """
    resources, name = compiled.resources, compiled.launch.kernel.fn.__name__
    most = compiled.launch.options.get("maxnreg") or MOST_REGISTERS
    if resources.shared > shared:
        return f"{resources.shared} bytes of shared memory, the card has {shared}"
    if reused := reused_barriers(compiled.kernel.asm.get("ptx", "")):
        return f"memory of barriers used for something else: {reused}"
    if not tuned:
        return None
    if resources.serialized:
        return "its products wait for one another"
    allowed = max(0 if resources.registers >= most else BY_CHOICE, ALLOWED.get((name, TRITON), 0))
    if resources.stack > allowed:
        return f"{resources.stack} bytes of spilled registers, at {resources.registers} of {most}"
    return None


@pytest.mark.parametrize(("card", "part"), PLACES, ids=[f"{card}-{part}" for card, part in PLACES])
def test_kernels_compile_as_they_should(card, part):
    """In the route and configuration that are chosen for a call: nothing is spilled, no product waits for
    another.
    """
    device = CARDS[card]
    results = []
    for chosen in compiled_here(card)[part::PARTS]:
        for compiled in compile_launches([chosen.launch], device):
            why = mismatch(compiled, device.shared, chosen.tuned)
            results += [f"{chosen.name}: {why}"] if why else []
    assert results == []


def test_every_route_is_among_them():
    """Each route that launches kernels of ours was compiled for a card that it takes, with every kernel it
    declares.
    """
    names = {
        f"{chosen.launch.kernel.fn.__module__}:{chosen.launch.kernel.fn.__name__}"
        for chosen in compiled_here("sm_90")
    }
    declared = {
        kernel for op, route in LAUNCHING if takes(op, route, CARDS["sm_90"]) for kernel in route.kernels
    }
    assert declared - names == set()


def test_routes_declare_what_they_launch():
    """Rows are kept by a hash of these: a kernel that is not named could change unnoticed."""
    undeclared = {
        (chosen.op, chosen.route, kernel)
        for chosen in launches("sm_90")
        for kernel in [f"{chosen.launch.kernel.fn.__module__}:{chosen.launch.kernel.fn.__name__}"]
        if kernel not in OPS[chosen.op].routes[chosen.route].kernels
    }
    assert undeclared == set()


KEPT = """
    add.s32 %r1, %r9, 4096;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
    st.shared.b32 [%r2+1024], %r3;
    st.shared.v2.b32 [%r2+2048], {%r3, %r4};
"""


@pytest.mark.parametrize(("at", "result"), [(4096, []), (1024, [1024]), (1536, [1536]), (512, [])])
def test_memory_of_barriers_is_theirs(at, result):
    assert reused_barriers(KEPT.replace("4096", str(at))) == result
    assert reused_barriers(KEPT.replace("4096", str(at)) + "mbarrier.inval.shared::cta.b64 [%r1];") == []
