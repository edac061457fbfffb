"""Autoregressive: from left to right, one token for each call of the network."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.heads import Head, NextToken
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Autoregressive(Sampler):
    """The first token that is yet to be drawn, from its law given those before it; as many calls as there are such tokens,
    whatever the steps. A clamped token is seen by those after it only."""

    name = "autoregressive"
    left_to_right = True

    def check_supported(self, head: Head) -> None:
        if not isinstance(head, NextToken):
            raise TypeError(f"sampler {self.name!r} draws the next token, which {type(head).__name__} does not predict")

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        calls = max(1, int(free.max()))
        ends = torch.linspace(1, 0, calls + 1, dtype=torch.float64, device=free.device).unsqueeze(-1).expand(-1, len(free))
        return Plan(ends[:-1], ends[1:])

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        x = prediction.x_t.long()
        first = prediction.masked.long().argmax(-1)  # where nothing is left to draw this is 0, and what is there stays
        at = first + torch.arange(len(x), device=x.device) * x.shape[1]
        token = prediction[at].draw(noise("token").reshape(-1)[at]).token
        left = prediction.masked.any(-1)
        return x.scatter(1, first.unsqueeze(-1), torch.where(left, token, x.reshape(-1)[at]).unsqueeze(-1))
