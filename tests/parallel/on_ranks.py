"""What a rank of `test_processes` does. Each function is called on all ranks with the mesh."""

import os
import signal
import time

import torch
from torch.distributed.device_mesh import DeviceMesh

import turnout
from tests.parallel.matrix import CLIPS, LATENTS, model, random
from turnout.models import DecodeStream


def in_turn(mesh, calls):
    """Functions of this module by name, each with its arguments: what they return, or raise, in order."""
    found = []
    for name, *args in calls:
        try:
            found.append(globals()[name](mesh, *args))
        except Exception as failure:
            found.append(f"{type(failure).__name__}: {failure}")
    return found


@torch.no_grad()
def same_bits(mesh, cases):
    """Decode, encode and a stream, of each model by one process and split: whether all bits are the same."""
    results = {}
    for name, dtype, fast, split in cases:
        vae = model(name, dtype, fast)
        z, x = random(*LATENTS[name][-1], dtype=dtype), random(*CLIPS[name], dtype=dtype)
        alone = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
        streamed = [DecodeStream(vae).decode(z[:, :, :1])]
        turnout.distribute(vae, mesh, split=split, timeout=60)
        for _ in range(2):
            split_up = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
            streams = [DecodeStream(vae).decode(z[:, :, :1])]
            pairs = zip((*alone, *streamed), (*split_up, *streams), strict=True)
            results[name, str(dtype), fast, split] = [torch.equal(a, b) for a, b in pairs]
    return results


@torch.no_grad()
def gathered(mesh, gather):
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 5, 4, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    turnout.distribute(vae, mesh, split="height", gather=gather, timeout=60)
    part = vae.decode(z).sample
    begin = 0 if mesh.get_local_rank() == 0 else 24
    if gather == "none":
        return torch.equal(part, alone[:, :, :, begin : begin + part.shape[3]])
    return part is None if mesh.get_local_rank() else torch.equal(part, alone)


@torch.no_grad()
def list_dealt_out(mesh, gather):
    """Whether each clip's frames are those of one process; None where there are no frames."""
    vae = model("wan", torch.bfloat16, fast=True)
    clips = [random(1, 4, frames, 4, 3, dtype=torch.bfloat16) for frames in (1, 3, 1)]
    alone = [vae.decode(clip).sample for clip in clips]
    turnout.distribute(vae, mesh, gather=gather, timeout=60)
    found = vae.decode(clips, return_dict=False)
    frames = [None if each is None else each[0] for each in found]
    return [None if a is None else torch.equal(a, b) for a, b in zip(frames, alone, strict=True)]


@torch.no_grad()
def refused_everywhere(mesh):
    """Calls that every rank refuses; then one that works."""
    vae = model("wan", torch.bfloat16, fast=True)
    messages = []

    def refused(call):
        try:
            call()
        except (ValueError, RuntimeError, TypeError) as failure:
            messages.append(f"{type(failure).__name__}: {failure}")
        else:
            messages.append("nothing")

    ranks = mesh.size()
    refused(
        lambda: turnout.distribute(
            vae, DeviceMesh("cpu", torch.arange(ranks).view(ranks, 1), mesh_dim_names=("a", "b"))
        )
    )
    refused(lambda: turnout.distribute(torch.nn.Linear(2, 2), mesh))
    vae.enable_tiling()
    refused(lambda: turnout.distribute(vae, mesh))
    vae.disable_tiling()
    other = model("wan" if mesh.get_local_rank() else "wan22", torch.bfloat16, fast=True)
    refused(lambda: turnout.distribute(other, mesh, timeout=60))
    z = random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    turnout.distribute(vae, mesh, timeout=60)
    refused(lambda: vae.decode(z[:, :, :, :1, :1]))
    refused(lambda: vae.decode(z if mesh.get_local_rank() else z[:, :, :1]))
    with turnout.numerics("exact" if mesh.get_local_rank() else "close"):
        refused(lambda: vae.decode(z))
    return messages, torch.equal(vae.decode(z).sample, alone)


@torch.no_grad()
def refused_on_one(mesh):
    """Mistakes of the last rank alone: what all raise, and whether the next call has the same bits."""
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    x = random(1, 3, 1, 32, 32, dtype=torch.bfloat16)
    alone, wrong = vae.decode(z).sample, mesh.get_local_rank() == mesh.size() - 1
    vae.use_tiling = wrong
    messages = [_raised(lambda: turnout.distribute(vae, mesh, timeout=60))]
    vae.use_tiling = False
    turnout.distribute(vae, mesh, timeout=60)
    for _ in range(2):  # what is known is compared as well
        vae.decode(z)
        vae.encode(x)
    for call in (
        lambda: vae.encode(x) if wrong else vae.decode(z),
        lambda: vae.decode("z" if wrong else z),
        lambda: vae.decode([z, "z"] if wrong else [z, z]),
        lambda: vae.decode(z[:, :, :1] + wrong),
    ):
        messages.append(_raised(call))
    return messages, torch.equal(vae.decode(z).sample, alone)


def _raised(call):
    try:
        call()
    except (ValueError, RuntimeError, TypeError, AttributeError) as failure:
        return f"{type(failure).__name__}: {failure}"
    return "nothing"


@torch.no_grad()
def with_other_tables(mesh):
    """The second rank has measured something of its own."""
    from turnout.ops.causal_conv3d import CAUSAL_CONV3D
    from turnout.routing.device import Device
    from turnout.routing.table import Tables, forget_tables

    forget_tables()  # of what this group did before
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    turnout.distribute(vae, mesh, timeout=60)
    if mesh.get_local_rank():
        tables = Tables.for_device(Device.of("cpu"))
        tables.here.rows.append({"op": CAUSAL_CONV3D.name, "measured": "elsewhere"})
    try:
        vae.decode(z)
    finally:
        forget_tables()


@torch.no_grad()
def one_raises(mesh):
    """A hook of the last rank raises in the middle of a call; then all decode again."""
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    alone = vae.decode(z).sample
    turnout.distribute(vae, mesh, timeout=60)
    vae.decode(z)
    stream, calls = DecodeStream(vae), []
    before = stream.decode(z[:, :, :1])

    def raises(module, args):
        calls.append(args)
        if mesh.get_local_rank() == mesh.size() - 1:
            raise OSError("of a hook")

    handle, messages = vae.decoder.mid_block.register_forward_pre_hook(raises), []
    for call in (lambda: vae.decode(z), lambda: stream.decode(z[:, :, 1:])):
        started = time.monotonic()
        try:
            call()
        except (OSError, RuntimeError) as failure:
            messages.append((f"{type(failure).__name__}: {failure}", time.monotonic() - started))
    handle.remove()
    after = stream.decode(z[:, :, 1:])
    return (
        messages,
        torch.equal(vae.decode(z).sample, alone),
        torch.equal(torch.cat([before, after], 2), alone),
    )


@torch.no_grad()
def one_is_lost(mesh, how):
    """The first rank, which holds the store of the process group, goes on; the last is killed, or does not
    answer.
    """
    vae, z = model("wan", torch.bfloat16, fast=True), random(1, 4, 2, 4, 4, dtype=torch.bfloat16)
    turnout.distribute(vae, mesh, timeout=60)
    vae.decode(z)
    if how == "stuck":
        turnout.distribute(vae, mesh, timeout=10)

    def leaves(module, args):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)

    if mesh.get_local_rank() == mesh.size() - 1:
        vae.decoder.mid_block.register_forward_pre_hook(leaves)
    started = time.monotonic()
    try:
        vae.decode(z)
    except RuntimeError as failure:
        return f"{type(failure).__name__}: {failure}", time.monotonic() - started
    return "nothing", time.monotonic() - started
