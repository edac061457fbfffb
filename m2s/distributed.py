"""One process or several: rank, size, device and collective operations."""

import gc
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from m2s.devices import invalid_device, resolve_device
from m2s.errors import UserError
from m2s.heartbeat import VARIABLE, Heartbeat, rank_timeout

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all processes of a run. A context manager: at its end the process group is left.

    Args:
        rank: The number of this process, from 0.
        size: The number of processes.
        device: The device of this process.
        joined: Whether `start` made the process group, which `__exit__` then destroys.
        heartbeat: Signs of life to and from the other processes; None where there are none.
    """

    rank: int
    size: int
    device: torch.device
    joined: bool = False
    heartbeat: Heartbeat | None = None

    @classmethod
    def start(cls, device: str = "") -> "World":
        """Join the processes that torchrun started. Without torchrun there is one process.

        Args:
            device: cpu, cuda, or cuda:N; "auto" or empty: a GPU where there is one. Under torchrun each process takes the GPU
                of its local rank.

        Returns:
            The place of this process.

        Raises:
            UserError: The device cannot be used, or a process did not start within M2S_RANK_TIMEOUT seconds.
        """
        device = "" if device == "auto" else device
        size, name = int(os.environ.get("WORLD_SIZE", "1")), device or ("cuda" if torch.cuda.is_available() else "cpu")
        if size > 1 and name.startswith("cuda"):
            name = f"cuda:{os.environ['LOCAL_RANK']}"
        if name.startswith("mps"):
            invalid_device(name, "it has no float64, in which losses are summed")
        kind = torch.device(resolve_device(name))
        if kind.index is not None and kind.type == "cuda":
            # Triton launches kernels on the current device, whatever the device of its arguments.
            torch.cuda.set_device(kind)
        if size == 1:
            return cls(0, 1, kind)
        joins, heartbeat = not dist.is_initialized(), None
        if joins:
            heartbeat = _join("cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo")
        return cls(dist.get_rank(), size, kind, joins, heartbeat)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the connections and end their threads.

        A thread that frees a tensor while the interpreter exits aborts the process. After an error nothing is closed: that
        could wait for a process that no longer exists.
        """
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.joined and kind is None:
            # torch 2.13 caches meshes, and a mesh holds its connections.
            for mesh in _meshes:
                getattr(mesh, "_pg_registry", {}).clear()
            _meshes.clear()
            gc.collect()  # a wrapped network holds connections too
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """Return a mesh over all processes, for FSDP2. It is released when the context ends."""
        _meshes.append(init_device_mesh(self.device.type, (self.size,)))
        return _meshes[-1]

    def reach(self, place: str | None = None) -> None:
        """Count a place of the program that every process reaches, so that one that does not is named (`m2s.heartbeat`).

        Args:
            place: The name of the place for messages, such as "step 7"; None keeps the last name.
        """
        if self.heartbeat is not None:
            self.heartbeat.reach(place)

    def sum(self, value: Tensor) -> Tensor:
        """Add up `value` over all processes, in place, and return it.

        Args:
            value: A tensor of the same shape in every process.

        Returns:
            `value`, which holds the sum.
        """
        if self.size > 1:
            self.reach()
            dist.all_reduce(value)
        return value

    def once(self, work: Callable[[], T]) -> T:
        """Call `work` in the first process, and return its result, or raise its error, in every process.

        Args:
            work: The function. Other processes wait for its result, which must be picklable.

        Returns:
            The result of `work`.

        Raises:
            Exception: What `work` raised.
        """
        if self.size == 1:
            return work()
        self.reach()
        outcome: list[Any] = [None, None]  # the result and the error
        if self.first:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


_joins = itertools.count()
_meshes: list[DeviceMesh] = []


def _join(backend: str) -> Heartbeat | None:
    """Initialize the process group, and start to watch the other processes.

    torchrun uses one store for all its restarts, and it still holds the addresses of dead processes (torch 2.13). So each
    restart has its own prefix. On several nodes the counts of restarts may differ; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    gives each restart a new store.
    """
    seconds, heartbeat = rank_timeout(), None
    limited = math.isfinite(seconds)
    # Longer than the heartbeat's limit, which names the process that is missing, and than the first process may need to save.
    timeout = max(dist.default_pg_timeout, timedelta(seconds=2 * seconds)) if limited else timedelta(days=365)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=seconds) if limited else timeout))
        store = PrefixStore(f"join-{next(_joins)}", store)
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        if limited:
            heartbeat = Heartbeat(store, rank, size, seconds)
            heartbeat.start()  # before the group: to join it is a collective operation too
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        who = "rank 0 does not answer" if isinstance(error, dist.DistNetworkError) else "some did not connect"
        raise UserError(
            f"not all {os.environ['WORLD_SIZE']} processes have started, {who} ({str(error).splitlines()[0]}): {VARIABLE} sets "
            "the seconds to wait for them"
        ) from error
    return heartbeat
