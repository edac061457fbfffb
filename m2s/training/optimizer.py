"""The optimizer of a run: AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from m2s.errors import UserError
from m2s.ops.adamw import OptimizerStep
from m2s.training.config import OptimizerConfig
from m2s.training.ema import EMA
from m2s.training.muon import Muon


def block_matrices(model: nn.Module) -> dict[str, int]:
    """Return the parameters that Muon updates, by name, each with the number of matrices stacked in it.

    Args:
        model: The network.

    Returns:
        What the network's method `block_matrices` returns.

    Raises:
        UserError: The network has no such method.
    """
    method: Callable[[], dict[str, int]] | None = getattr(model, "block_matrices", None)
    if method is None:
        reason = f"{type(model).__name__} does not name the matrices of its blocks"
        hint = "use --network.kind dit, or give your network a method block_matrices"
        raise UserError(option="optimizer.kind", value="muon", reason=reason, hint=hint)
    return method()


class Optimizer:
    """The optimizers of a run behind one interface. Every parameter belongs to exactly one of them.

    Args:
        model: The network.
        config: The kind of optimizer and its options.
        average: The moving average of the weights, which each step updates.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, average: EMA) -> None:
        self.average = average
        weights = dict(model.named_parameters())
        self.matrices = block_matrices(model) if config.kind == "muon" else {}
        self.others = [name for name in weights if name not in self.matrices]
        self.adamw = torch.optim.AdamW(
            [weights[name] for name in self.others],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=weights[self.others[0]].device.type in ("cpu", "cuda"),
        )
        self.adamw_step = OptimizerStep(self.adamw)
        matrices = [(weights[name], parts) for name, parts in self.matrices.items()]
        self.muon = Muon(matrices, config.lr, config.weight_decay) if matrices else None

    def _all(self) -> Iterable[torch.optim.Optimizer]:
        """The optimizers that have parameters."""
        return (self.adamw,) if self.muon is None else (self.adamw, self.muon)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Release their memory.
        """
        for optimizer in self._all():
            optimizer.zero_grad(set_to_none)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step.

        Args:
            rate: The learning rate.
        """
        for optimizer in self._all():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def state(self, name: str) -> dict[str, Any]:
        """Return the state of a parameter, which may be changed: moments and the count of steps, or the momentum.

        Args:
            name: The name of the parameter.
        """
        owner = self.muon if self.muon is not None and name in self.matrices else self.adamw
        return owner.state[self.average.weights[name]]

    def state_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors in the state of a parameter after the first step.

        Args:
            name: The name of the parameter.
        """
        return ("momentum_buffer",) if name in self.matrices else ("exp_avg", "exp_avg_sq", "step")

    def start(self, norm: Tensor, clip: float, average_weight: float, numbers: Tensor) -> Callable[[], None]:
        """Make the step if all `numbers` are finite.

        Args:
            norm: Norm of the gradient.
            clip: Greatest norm of the gradient; 0 for no clipping.
            average_weight: Weight of the new parameters in the moving average.
            numbers: Float64 numbers `[n]`, such as loss and gradient norm.

        Returns:
            A function to call once the host knows that the numbers are finite. It finishes the step.
        """
        weights, averages = self.average.weights_and_averages(self.others)
        finish = self.adamw_step.start(weights, averages, norm, clip, average_weight, numbers)
        if self.muon is not None:
            self._start_muon(self.muon, norm, clip, average_weight, numbers)
        return finish

    @torch.no_grad()
    def _start_muon(self, muon: Muon, norm: Tensor, clip: float, average_weight: float, numbers: Tensor) -> None:
        """Make the step of Muon and of its averages. Whether the numbers are finite is decided on the device."""
        finite = numbers.isfinite().all()
        scale = (clip / (norm + 1e-6)).clamp(max=1) if clip else torch.ones_like(norm)  # as clip_grads_with_norm_
        muon.conditional_step(scale, finite)
        weights, averages = self.average.weights_and_averages(list(self.matrices))
        gaps = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(gaps, torch.where(finite, average_weight, 0.0))
        torch._foreach_add_(averages, gaps)
