"""First hitting (Zheng et al. 2024): exact simulation of the masked process, at the times at which tokens are revealed."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.process.rank_one import time_of_mask_probability
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class FirstHitting(Sampler):
    """With n masks left, the next one is revealed at beta(tau) = beta(t) u^(1/n), at a random site, by a draw from mu.

    With as many steps as there are sites to fill, there is no discretization error. With fewer steps, a step reveals several
    sites, at the time of the last of them. There are never more steps than sites.
    """

    name = "first_hitting"
    needs = (Need.PURE_MASK, Need.POSTERIOR)
    preserves_marginal = Preserves.ALL_SITES

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        """Draw the reveal times. `grid` is not used."""
        process = head.process.rank_one
        assert process is not None
        most = int(free.max()) if free.numel() else 0
        log_beta = [torch.zeros(len(free), dtype=torch.float64, device=free.device)]
        for number in range(most):
            left = free - number
            log_beta.append(log_beta[-1] + torch.where(left > 0, torch.log(noise.once(number)) / left.clamp(min=1), 0))
        calls = free.clamp(min=1, max=steps)
        numbers = torch.arange(max(1, min(steps, most)) + 1, device=free.device).unsqueeze(-1)
        done = torch.minimum(numbers, calls) * free // calls  # sites that are filled before each call, spread evenly
        times = time_of_mask_probability(process, torch.stack(log_beta).gather(0, done[1:]).exp())
        return Plan(times, times, done.diff(dim=0))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        """Reveal as many random masked sites as the plan says."""
        assert move.reveal is not None
        chosen = first_sites(noise("order"), prediction.masked, move.reveal)
        return torch.where(chosen, prediction.draw_token(noise("token")).token, prediction.x_t.long())


def first_sites(
    order: Float[Tensor, "B L"], among: Bool[Tensor, "B L"], count: Int[Tensor, "B"], ties: Float[Tensor, "B L"] | None = None
) -> Bool[Tensor, "B L"]:
    """Choose sites of each sample by a ranking.

    Args:
        order: The ranking: smallest first.
        among: The sites that can be chosen.
        count: How many to choose, of each sample.
        ties: Uniforms that decide between sites of equal rank. By default such sites are taken from left to right.

    Returns:
        True at the chosen sites.
    """
    return among & (by_rank(order.masked_fill(~among, torch.inf), ties).argsort(-1) < count.unsqueeze(-1))


def by_rank(order: Float[Tensor, "B L"], ties: Float[Tensor, "B L"] | None = None) -> Int[Tensor, "B L"]:
    """Return the sites of each sample in the order of a ranking, smallest first.

    Args:
        order: The ranking.
        ties: Uniforms that decide between sites of equal rank. By default such sites are taken from left to right.
    """
    if ties is None:
        return order.argsort(dim=-1, stable=True)
    shuffled = ties.argsort(dim=-1, stable=True)
    return shuffled.gather(-1, order.gather(-1, shuffled).argsort(dim=-1, stable=True))
