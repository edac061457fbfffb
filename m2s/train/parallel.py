"""One process or many: the same calls. Started by torchrun, every process holds the weights (DDP) or shards (FSDP2)."""

import contextlib
import functools
import gc
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from m2s.device import refuse, usable
from m2s.train.scored import Scored

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
            refuse(name, "it has no float64, in which losses are summed")
        kind = torch.device(usable(name))
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

    def wrap(self, scored: Scored, parallel: str) -> nn.Module:
        """`scored` as this world trains it."""
        if self.size == 1:
            return scored
        if parallel == "ddp":
            return DistributedDataParallel(scored)
        mesh = init_device_mesh(self.device.type, (self.size,))
        _meshes.append(mesh)
        for block in blocks(scored.model):
            fully_shard(block, mesh=mesh)
        fully_shard(scored.model, mesh=mesh)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nothing changes it in place
        return scored

    @contextlib.contextmanager
    def accumulating(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Gradients are averaged over the processes in the last backward pass of an update only."""
        if isinstance(wrapped, DistributedDataParallel) and not last:
            with wrapped.no_sync():
                yield
            return
        if isinstance(wrapped, Scored) and isinstance(wrapped.model, FSDPModule):
            wrapped.model.set_requires_gradient_sync(last)
        yield

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


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that repeat: the members of the network's lists."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for members in lists for block in members if next(block.parameters(), None) is not None]


def compile_parts(scored: Scored, loss: bool) -> Callable[[], None]:
    """Compile the blocks of the network, alike ones once, and the `loss` with the last layer of a transformer, but where it
    looks at the times. Returns what takes it back."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # one for each shape of a block
    mine = [block for block in blocks(scored.model) if not isinstance(block, nn.Conv2d)]
    before = [block.forward for block in mine]
    for block in mine:
        block.forward = torch.compile(block.forward, dynamic=False)
    unprojected = getattr(scored.model, "unprojected", None)
    if unprojected is not None:
        scored.model.unprojected = True  # type: ignore[assignment]
    if loss:
        scored.compiled = torch.compile(scored.score, dynamic=False)

    def undo() -> None:
        for block, forward in zip(mine, before, strict=True):
            block.forward = forward
        if unprojected is not None:
            scored.model.unprojected = unprojected
        scored.compiled = scored.score

    return undo


def recompute(model: nn.Module) -> None:
    """Keep no activations inside blocks; the backward pass computes them again."""
    for block in blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def reshard(model: nn.Module) -> None:
    """Drop the whole weights that a forward pass may have left gathered: they would hide a change of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, or all of it; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU. With shards, every process must ask."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()
