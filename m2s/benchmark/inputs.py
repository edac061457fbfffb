"""Random hidden states, a last layer and tokens, as training meets them."""

from dataclasses import dataclass

import torch
from torch import Tensor

import m2s
from m2s.benchmark.setting import Setting
from m2s.dtypes import at_least_float32

SPREAD, STRONGEST = 0.05, 16.0


@dataclass(frozen=True)
class Inputs:
    """One row for each site. The hidden states lean towards the clean token, from not at all to near certainty."""

    hidden: Tensor  # [N, D], bf16
    weight: Tensor  # [V, D], float32
    bias: Tensor  # [V], float32
    x_0: Tensor  # [N]
    t: Tensor  # [N], float64, one in each of N equal parts of [1e-3, 1)
    vocab: int

    @classmethod
    def draw(cls, setting: Setting) -> "Inputs":
        device = setting.device
        generator = torch.Generator(device).manual_seed(setting.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        weight, bias = SPREAD * normal(setting.columns, setting.width), SPREAD * normal(setting.columns)
        x_0 = torch.randint(setting.vocab, (setting.rows,), generator=generator, device=device)
        strength = STRONGEST * torch.rand(setting.rows, 1, generator=generator, device=device)
        towards = weight[x_0] / (weight[x_0] ** 2).sum(-1, keepdim=True)
        hidden = (normal(setting.rows, setting.width) + strength * towards).bfloat16()
        t = m2s.stratified_times(setting.rows, 1e-3, 1.0, generator, device)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), x_0, t, setting.vocab)

    @property
    def output(self) -> m2s.Unprojected:
        return m2s.Unprojected(self.hidden, self.weight, self.bias)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Hidden states and weight as operands of a product, with no gradient: bf16 on a GPU."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        return (hidden, weight.to(hidden.dtype)) if hidden.is_cuda else (at_least_float32(hidden), weight)

    def corrupt(self, process: m2s.Process) -> Tensor:
        """x_t ~ P_t(.|x_0), every site at its own time."""
        generator = torch.Generator(self.x_0.device).manual_seed(1)
        return process.corrupt(self.x_0.unsqueeze(-1), self.t, generator).squeeze(-1)
