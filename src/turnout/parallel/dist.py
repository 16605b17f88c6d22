"""Ranks as processes: a 1-D `DeviceMesh`, NCCL on GPUs and gloo on CPUs.

Tensors travel by point-to-point messages. With NCCL they use the mesh's own group. With gloo they use
connections of our own: closing them ends a call on all ranks, and the next call opens new ones. What ranks
say on the host (digests, failures) travels by the store through which torch.distributed started.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from turnout.parallel.failures import RankFailed
from turnout.routing.torch_private import default_store

PrefixStore: Any = dist.distributed_c10d.PrefixStore
_POLL = 0.5  # seconds between looks at whether another rank has failed, while its answer is waited for
_ROUNDS = 10**9  # more than anybody says between two failures
# How many engines were made of these ranks, by each of them in the same order
_made: collections.Counter[str] = collections.Counter()


class Dist:
    """This process's rank of a mesh. timeout: seconds to wait for another rank before the call fails."""

    is_alone, compares_all = False, False

    def __init__(self, mesh: DeviceMesh, timeout: float):
        if mesh.ndim != 1:
            raise ValueError(
                f"a mesh of {mesh.ndim} dimensions {tuple(mesh.shape)}; it needs one: take mesh['name']"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not part of the mesh of ranks {mesh.mesh.tolist()}; only these "
                "call distribute"
            )
        self.mesh, self.timeout = mesh, timeout
        self.group = mesh.get_group()
        self.backend = dist.get_backend(self.group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._gloo: Any = None
        self._has_met = False
        self._said = 0
        members = "-".join(map(str, dist.get_process_group_ranks(self.group)))
        _made[members] += 1
        self._store: Any = PrefixStore(f"turnout/{members}/{_made[members]}", default_store())
        self._failed_key = "failed/0"
        self._failures = 0

    def begin(self) -> None:
        """Open the connections, if there are none: all ranks are there, or the call fails."""
        if self.backend == "gloo" and self._gloo is None:
            self.agree("opens connections")
            store = PrefixStore(f"messages/{self._failures}", self._store)
            limit = datetime.timedelta(seconds=self.timeout)
            with self._told_why():
                self._gloo = dist.ProcessGroupGloo(store, self.rank, self.ranks, limit)
        if self.backend == "nccl" and not self._has_met:
            # NCCL's communicator is made by its first operation, which all ranks have to be part of: a
            # message between two of them would wait for the others.
            self.agree("opens connections")
            dist.barrier(self.group, device_ids=[torch.cuda.current_device()])
            self._has_met = True

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        if not sends and not receives:
            return
        if self.backend != "gloo":
            messages = [dist.P2POp(dist.isend, x, group=self.group, group_peer=other) for other, x in sends]
            messages += [
                dist.P2POp(dist.irecv, x, group=self.group, group_peer=other) for other, x in receives
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()  # the stream waits, not the host
            return
        with self._told_why():
            pending = [self._gloo.recv([x], other, 0) for other, x in receives]
            pending += [self._gloo.send([x], other, 0) for other, x in sends]
            for work in pending:
                work.wait(datetime.timedelta(seconds=self.timeout))

    def agree(self, said: Any) -> list[Any]:
        self._said += 1
        keys = [f"said/{self._said}/{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], pickle.dumps(said))
        heard = [pickle.loads(each) for each in self._hear(keys)]
        if self._said > 2:  # all ranks have read what was said two rounds ago
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(f"said/{self._said - 2}/{self.rank}")
        return heard

    def _hear(self, keys: list[str]) -> list[bytes]:
        """What the ranks say under these keys, once all have."""
        end = time.monotonic() + self.timeout
        while True:
            left = max(0.001, min(_POLL, end - time.monotonic()))
            try:
                self._store.wait(keys, datetime.timedelta(seconds=left))
                return self._store.multi_get(keys)
            except RuntimeError as failure:  # DistStoreError: not there yet, or the store is gone
                self._raise_if_failed()
                if time.monotonic() >= end:
                    raise RankFailed(
                        f"{self._silent(keys)} did not answer within {self.timeout:g} s: {failure}"
                    ) from failure

    def _silent(self, keys: list[str]) -> str:
        """Which ranks have said nothing."""
        silent = []
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
            silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        return f"rank {', '.join(silent)}" if silent else "another rank"

    def fail(self, failure: BaseException) -> None:
        """Tell all ranks that this one has failed, and close what they may be waiting at."""
        with contextlib.suppress(RuntimeError):
            if not self._store.check([self._failed_key]):
                text = f"rank {self.rank} raised {type(failure).__name__}: {failure}"
                self._store.set(self._failed_key, text.encode())
        self._gloo = None
        # all ranks get here: the next call begins anew, under other keys
        self._failures += 1
        self._failed_key = f"failed/{self._failures}"
        self._said = self._failures * _ROUNDS

    @contextlib.contextmanager
    def _told_why(self) -> Any:
        """The message of torch when a rank is gone names a socket; the rank that failed has said why."""
        try:
            yield
        except RuntimeError as failure:
            self._raise_if_failed()
            raise RankFailed(
                f"rank {self.rank} lost another rank, or waited {self.timeout:g} s for it: {failure}"
            ) from failure

    def _raise_if_failed(self) -> None:
        reason = None
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
            if self._store.check([self._failed_key]):
                reason = self._store.get(self._failed_key).decode()
        if reason is not None:
            raise RankFailed(reason) from None
