"""Training on one process or several: DDP, FSDP2, compilation of blocks, activation checkpointing."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from m2s.distributed import World
from m2s.training.training_loss import TrainingLoss


def wrap(scored: TrainingLoss, world: World, parallel: str) -> nn.Module:
    """`scored` as this world trains it: itself, in DDP, or with its weights sharded by FSDP2."""
    if world.size == 1:
        return scored
    if parallel == "ddp":
        return DistributedDataParallel(scored)
    mesh = world.mesh()
    for block in blocks(scored.model):
        fully_shard(block, mesh=mesh)
    fully_shard(scored.model, mesh=mesh)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nothing changes it in place
    return scored


@contextlib.contextmanager
def accumulating(wrapped: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are averaged over the processes in the last backward pass of a training step only."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        with wrapped.no_sync():
            yield
        return
    if isinstance(wrapped, TrainingLoss) and isinstance(wrapped.model, FSDPModule):
        wrapped.model.set_requires_gradient_sync(last)
    yield


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that repeat: the members of the network's lists."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for members in lists for block in members if next(block.parameters(), None) is not None]


def compile_parts(scored: TrainingLoss, loss: bool) -> Callable[[], None]:
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


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, or all of it; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_full(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU. With shards, every process must ask."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()
