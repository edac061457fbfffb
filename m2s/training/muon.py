"""Muon (Jordan et al. 2024): momentum of a matrix, replaced by the nearest semi-orthogonal matrix.

All singular values of an update are then about 1, so that rare directions of the gradient are learned as fast as frequent
ones. Matrices of one shape are orthogonalized together, in one batch of products. Of a parameter that FSDP2 shards, each
process has rows of the momentum. All of them gather the complete matrix, orthogonalize it, and change their rows.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from m2s.training.parallel import local_shard

MOMENTUM = 0.95
ITERATIONS = 5
# A quintic polynomial that maps (0, 1] near 1 after five iterations, from Jordan et al.; torch.optim.Muon has the same.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
RMS = 0.2  # root mean square of the entries of an update, about that of AdamW (Liu et al. 2025)


def orthogonalize(matrices: Float[Tensor, "n R C"], dtype: torch.dtype = torch.bfloat16) -> Float[Tensor, "n R C"]:
    """Approximate U V^T of each matrix U S V^T by Newton-Schulz iterations.

    X <- a X + (b X X^T + c (X X^T)^2) X, from X = G / |G|. The singular values of the result are between 0.68 and 1.13,
    except those that are very small in G.

    Args:
        matrices: The matrices G, [n, R, C].
        dtype: Dtype of the products. The iteration tolerates bfloat16.

    Returns:
        The result, [n, R, C], in `dtype`.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype)
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:  # the smaller of the two Gram matrices
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized, with the scale of AdamW: W <- W - lr (0.2 sqrt(max(R, C)) O + decay W).

    Args:
        matrices: Parameters `[parts R, C]`, each with its number of `parts`: matrices that are stacked in one parameter, such
            as queries, keys and values, and are orthogonalized one by one.
        lr: The learning rate. The scale of an update makes AdamW's rates suitable.
        weight_decay: Weight decay.
        momentum: Decay of the momentum.
        dtype: Dtype of the products of `orthogonalize`.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, int]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = MOMENTUM,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        matrices = list(matrices)
        super().__init__([matrix for matrix, _ in matrices], {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.parts = [parts for _, parts in matrices]
        self.dtype = dtype

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step with the gradients of the parameters.

        Args:
            closure: Not supported; None.
        """
        one = torch.ones((), device=self.param_groups[0]["params"][0].device)
        self.conditional_step(one, one > 0)

    @torch.no_grad()
    def conditional_step(self, scale: Tensor, condition: Tensor) -> None:
        """Make one step with scaled gradients if a condition on the device holds. The host does not wait for the device.

        Args:
            scale: Factor of the gradients, a scalar.
            condition: A boolean scalar. Where it is false, weights and momentum keep their bits, also if a gradient is not
                finite.
        """
        (group,) = self.param_groups
        parameters: list[Tensor] = group["params"]
        weights = [local_shard(weight.detach()) for weight in parameters]
        taken = condition.float()
        gradients = [torch.where(condition, local_shard(one.grad), 0.0) for one in parameters if one.grad is not None]
        torch._foreach_mul_(gradients, torch.where(condition, scale.float(), 0.0))
        for weight in parameters:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [local_shard(self.state[weight]["momentum_buffer"]) for weight in parameters]
        torch._foreach_mul_(buffers, 1 - (1 - group["momentum"]) * taken)
        torch._foreach_add_(buffers, gradients, alpha=1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, buffers, group["momentum"])  # Nesterov
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * taken)
        complete = [_gather(direction, one) for direction, one in zip(directions, parameters, strict=True)]
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, (weight, count) in enumerate(zip(parameters, self.parts, strict=True)):
            by_shape.setdefault((weight.shape[0] // count, weight.shape[1]), []).append(index)
        for (rows, columns), indices in by_shape.items():
            stacked = torch.cat([complete[index].to(self.dtype).view(-1, rows, columns) for index in indices])
            change = orthogonalize(stacked, self.dtype).float() * (taken * (-group["lr"] * RMS * max(rows, columns) ** 0.5))
            parts = change.split([self.parts[index] for index in indices])
            chosen = [parameters[index] for index in indices]
            changes = [_own_rows(part.reshape(one.shape), one) for part, one in zip(parts, chosen, strict=True)]
            torch._foreach_add_([weights[index] for index in indices], changes)


def _gather(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return a complete matrix from the rows of each process, for a parameter that FSDP2 shards."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


def _own_rows(complete: Tensor, parameter: Tensor) -> Tensor:
    """Return those rows of a matrix that this process has of a parameter."""
    if not isinstance(parameter, DTensor):
        return complete
    parts = complete.chunk(parameter.device_mesh.size())  # as FSDP2 divides the first dimension
    rank = parameter.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else complete[:0]
