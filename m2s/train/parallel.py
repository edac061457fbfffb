"""One process or many: the same calls. Started by torchrun, every process holds the weights (DDP) or a shard of them (FSDP2).

A state on the disk holds whole tensors, gathered one by one, so that it does not depend on how many processes wrote it.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from m2s.report import Refused
from m2s.train.scored import Scored


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @classmethod
    def start(cls, device: str = "") -> "World":
        """This process's place among those that torchrun started; alone without torchrun."""
        try:
            kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise Refused(f"device is {device!r}: {error}") from error
        if kind.type == "cuda" and not torch.cuda.is_available():
            raise Refused(f"device is {device!r}, but this torch sees no GPU")
        if kind.type == "cuda":
            torch.backends.cudnn.allow_tf32 = False  # the last layer of a U-Net is a convolution in float32
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, kind)
        if kind.type == "cuda":
            kind = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(kind)
        if not dist.is_initialized():
            _join("cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo")
        return cls(dist.get_rank(), size, kind)

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

    def agree(self, value: int) -> int:
        """The first process's number, at every process."""
        return int(self.sum(torch.tensor(value if self.first else 0, device=self.device)))

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def _join(backend: str) -> None:
    """Meet the other processes.

    torchrun keeps one store over its restarts, in which the addresses of dead processes still stand (torch 2.13), so each
    restart has a prefix of its own. On several nodes restarts are not counted alike; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    gives each a new store.
    """
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that repeat: the members of the network's lists."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for members in lists for block in members if next(block.parameters(), None) is not None]


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


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor laid out over devices as `like` is."""
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
