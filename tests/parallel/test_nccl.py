"""What ranks on GPUs do otherwise, without GPUs."""

import torch
import torch.distributed as dist

from turnout.parallel.dist import Dist


def test_ranks_open_their_communicator_together_before_the_first_message(monkeypatch):
    """NCCL makes it in the first operation, and a message between two ranks would wait for all others."""
    engine, done = object.__new__(Dist), []
    engine.backend, engine.group, engine._gloo, engine._has_met = "nccl", "the mesh's", None, False
    monkeypatch.setattr(engine, "agree", lambda said: done.append("agreed"), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: done.append((group, device_ids)))
    for _ in range(2):
        engine.begin()
    assert done == ["agreed", ("the mesh's", [3])]
