"""Random inputs of the last layer: hidden states, weights, tokens and times, similar to those of training."""

from dataclasses import dataclass

import torch
from torch import Tensor

import m2s
from m2s.benchmark.setting import Setting
from m2s.dtypes import at_least_float32

SCALE, MAX_STRENGTH = 0.05, 16.0  # standard deviation of the weights; largest logit of the clean token


@dataclass(frozen=True)
class Inputs:
    """Inputs of the last layer, one row for each site.

    The hidden states point toward the clean token, with a strength from zero to near certainty, as in a trained network.

    Args:
        hidden: [N, D] hidden states, bf16.
        weight: [V, D] weight of the last layer, float32.
        bias: [V] bias, float32.
        x_0: [N] clean tokens.
        t: [N] times, float64: one in each of N equal parts of [1e-3, 1).
        vocab: Number of tokens, at most V.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    x_0: Tensor
    t: Tensor
    vocab: int

    @classmethod
    def random(cls, setting: Setting) -> "Inputs":
        """Draw inputs of the sizes of a setting, from its seed.

        Args:
            setting: Sizes N = `rows`, V = `columns`, D = `width`, and the device and seed.

        Returns:
            The inputs on the device of the setting. Hidden states, weight and bias require gradients.
        """
        device = setting.device
        generator = torch.Generator(device).manual_seed(setting.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        weight, bias = SCALE * normal(setting.columns, setting.width), SCALE * normal(setting.columns)
        x_0 = torch.randint(setting.vocab, (setting.rows,), generator=generator, device=device)
        strength = MAX_STRENGTH * torch.rand(setting.rows, 1, generator=generator, device=device)
        direction = weight[x_0] / (weight[x_0] ** 2).sum(-1, keepdim=True)
        hidden = (normal(setting.rows, setting.width) + strength * direction).bfloat16()
        t = m2s.stratified_times(setting.rows, 1e-3, 1.0, generator, device)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), x_0, t, setting.vocab)

    @property
    def output(self) -> m2s.Unprojected:
        """The network's output before the product of the last layer."""
        return m2s.Unprojected(self.hidden, self.weight, self.bias)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that have gradients."""
        return self.hidden, self.weight, self.bias

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """Hidden states and weight as operands of a matrix product, without gradients: bf16 on a GPU, else float32."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        return (hidden, weight.to(hidden.dtype)) if hidden.is_cuda else (at_least_float32(hidden), weight)

    def corrupt(self, process: m2s.Process) -> Tensor:
        """Draw x_t ~ P_t(.|x_0), each site at a different time.

        Args:
            process: The forward process.

        Returns:
            x_t, [N]. The seed is fixed: each call returns the same tokens.
        """
        generator = torch.Generator(self.x_0.device).manual_seed(1)
        return process.corrupt(self.x_0.unsqueeze(-1), self.t, generator).squeeze(-1)
