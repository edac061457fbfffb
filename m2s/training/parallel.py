"""Training on one process or several: DDP, FSDP2, and activation checkpointing."""

import contextlib
import functools
import warnings
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from m2s.distributed import World
from m2s.losses.objective import TrainingObjective
from m2s.patches import AttributePatches


def wrap(objective: TrainingObjective, world: World, parallel: str) -> nn.Module:
    """Wrap an objective for the processes that train it.

    Args:
        objective: The objective.
        world: The processes.
        parallel: "ddp" or "fsdp".

    Returns:
        The objective itself for one process; wrapped by DDP; or with its network sharded by FSDP2.
    """
    if world.size == 1:
        return objective
    if parallel == "ddp":
        return DistributedDataParallel(objective)
    mesh = world.mesh()
    for block in blocks(objective.model):
        fully_shard(block, mesh=mesh)
    fully_shard(objective.model, mesh=mesh)
    # The output of the network is a view, which nothing here changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return objective


@contextlib.contextmanager
def accumulating(wrapped: nn.Module, last: bool) -> Iterator[None]:
    """Average gradients over the processes only in the last backward pass of a training step.

    Args:
        wrapped: The result of `wrap`.
        last: Whether the backward pass inside is the last one of the step.
    """
    if isinstance(wrapped, DistributedDataParallel) and not last:
        with wrapped.no_sync():
            yield
        return
    if isinstance(wrapped, TrainingObjective) and isinstance(wrapped.model, FSDPModule):
        wrapped.model.set_requires_gradient_sync(last)
    yield


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated modules of a network.

    Args:
        model: The network.

    Returns:
        The members of its `nn.ModuleList`s that have parameters.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for members in lists for block in members if next(block.parameters(), None) is not None]


def recompute(model: nn.Module, patches: AttributePatches) -> None:
    """Store no activations inside blocks. The backward pass computes them again.

    Args:
        model: The network.
        patches: Restores the blocks.
    """
    for block in blocks(model):
        patches.set(block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False))


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward pass may have left: they would hide a change of the shards.

    Args:
        model: The network, with or without FSDP2.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or all of an unsharded one.

    Args:
        tensor: The tensor, with which the result shares its memory.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_full(tensor: Tensor) -> Tensor:
    """Return all of a tensor, on the CPU. Where it is sharded, every process must call this.

    Args:
        tensor: The tensor.
    """
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()
