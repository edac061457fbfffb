"""Compile a network's blocks and its loss, and return to eager mode where compilation fails."""

import sys

import torch
from torch import nn

from m2s.distributed import World
from m2s.losses.objective import TrainingObjective
from m2s.patches import AttributePatches
from m2s.training.parallel import blocks

COMPILED = ("cuda",)  # the devices on which "auto" compiles
RECOMPILE_LIMIT = 64  # torch's default is too low for a network with many different shapes of blocks


class Eager:
    """No compilation."""

    errors: tuple[type[Exception], ...] = ()
    """The errors of a first gradient after which it is computed again without compilation."""

    def succeed(self) -> None:
        """Note that a gradient was computed."""

    def undo(self, error: Exception) -> None:
        """Continue without compilation, and print why.

        Args:
            error: The error of the first gradient, one of `errors`.
        """

    def close(self) -> None:
        """Restore the network and torch's flags."""


class Compiled(Eager):
    """Compiled blocks, similar ones once, and a compiled loss.

    Args:
        objective: The objective. Its network's blocks are replaced by compiled ones.
        loss: Compile the loss too, with the last layer of a transformer. Not possible where
            the loss looks at the values of the times.
        fallback: Where compiling fails at the first gradient, continue without it.
    """

    def __init__(self, objective: TrainingObjective, loss: bool, fallback: bool) -> None:
        self.patches = AttributePatches()
        # Imported by torch.compile in any case; only here, because it takes seconds.
        self.patches.set(torch._dynamo.config, "recompile_limit", max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit))
        for block in blocks(objective.model):
            if not isinstance(block, nn.Conv2d):
                self.patches.set(block, "forward", torch.compile(block.forward, dynamic=False))
        if getattr(objective.model, "unprojected", None) is not None:
            self.patches.set(objective.model, "unprojected", True)
        if loss:
            self.patches.set(objective, "compiled", torch.compile(objective.score, dynamic=False))
        if fallback:
            self.errors = (torch._dynamo.exc.TorchDynamoException,)

    def succeed(self) -> None:
        """Note that a gradient was computed: from now on every error is raised."""
        self.errors = ()

    def undo(self, error: Exception) -> None:
        """Continue without compilation, and print why."""
        why = str(error).strip().splitlines()
        print(f"this network cannot be compiled here ({why[0] if why else error}): continuing without", file=sys.stderr)
        self.errors = ()
        self.patches.close()

    def close(self) -> None:
        """Restore the network and torch's flags."""
        self.patches.close()


def choose_compilation(objective: TrainingObjective, mode: str, world: World, graph_safe: bool) -> Eager:
    """Compile an objective where the configuration asks for it.

    Args:
        objective: The objective.
        mode: "yes", "no", or "auto": on a GPU, and without compilation where that fails on a single process.
        world: The processes.
        graph_safe: Whether the process does not look at the values of the times, so that the loss can be compiled too.

    Returns:
        The compilation, or `Eager()`.
    """
    if mode == "no" or (mode == "auto" and world.device.type not in COMPILED):
        return Eager()
    return Compiled(objective, graph_safe, fallback=mode == "auto" and world.size == 1)
