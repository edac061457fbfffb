"""One process or several: rank, size, device and collective operations."""

import gc
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from m2s.devices import invalid_device, resolve_device

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place among all. A context: what `start` joined is left at the end of it."""

    rank: int
    size: int
    device: torch.device
    joined: bool = False

    @classmethod
    def start(cls, device: str = "") -> "World":
        """Among the processes that torchrun started; alone without torchrun."""
        size, name = int(os.environ.get("WORLD_SIZE", "1")), device or ("cuda" if torch.cuda.is_available() else "cpu")
        if size > 1 and name.startswith("cuda"):
            name = f"cuda:{os.environ['LOCAL_RANK']}"
        if name.startswith("mps"):
            invalid_device(name, "it has no float64, in which losses are summed")
        kind = torch.device(resolve_device(name))
        if kind.index is not None and kind.type == "cuda":
            torch.cuda.set_device(kind)  # kernels are started on the device that is set, whatever the tensors'
        if size == 1:
            return cls(0, 1, kind)
        joins = not dist.is_initialized()
        if joins:
            _join("cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo")
        return cls(dist.get_rank(), size, kind, joins)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the connections, and end their threads: one that frees a tensor while the interpreter ends aborts the process.
        Not after an error, where closing could wait for a process that is gone."""
        if self.joined and kind is None:
            for mesh in _meshes:  # torch 2.13 keeps them in its caches, and they the connections
                getattr(mesh, "_pg_registry", {}).clear()
            _meshes.clear()
            gc.collect()  # a wrapped network holds on to connections too
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """A mesh over all processes, for FSDP2. It is released when the context ends."""
        _meshes.append(init_device_mesh(self.device.type, (self.size,)))
        return _meshes[-1]

    def sum(self, value: Tensor) -> Tensor:
        """`value` added up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def once(self, work: Callable[[], T]) -> T:
        """Done by the first process: its result, or its error, at every process."""
        if self.size == 1:
            return work()
        told: list[Any] = [None, None]  # the result and the error
        if self.first:
            try:
                told[0] = work()
            except Exception as error:
                told[1] = error
        dist.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise told[1]
        return told[0]


_joins = itertools.count()
_meshes: list[DeviceMesh] = []


def _join(backend: str) -> None:
    """Meet the other processes.

    torchrun keeps one store over its restarts, in which the addresses of dead processes still stand (torch 2.13), so each
    restart has a prefix of its own. On several nodes restarts are not counted alike; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    gives each a new store.
    """
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore(f"join-{next(_joins)}", store)
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
