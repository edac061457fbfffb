"""What the network reads in place of x_t while a curriculum lasts."""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from m2s.heads import Head
from m2s.losses.duo import gaussian_latent, soft_embedding, temperature
from m2s.losses.noise import corrupt_by_counter, normals_by_counter
from m2s.process import Uniform
from m2s.training.config import Config


class PlainTokens:
    """No curriculum: the network reads x_t.

    Args:
        config: The configuration of the run.
        head: The head.
        model: The network.
    """

    def __init__(self, config: Config, head: Head, model: nn.Module) -> None:
        self.head, self.model = head, model
        self.seed, self.steps = config.run.seed, config.run.steps

    def tau(self, step: int) -> float:
        """Return the temperature of the softened tokens at a step; 0: the tokens are plain.

        Args:
            step: The training step, counted from 0.
        """
        return 0.0

    def log_values(self, step: int) -> dict[str, float]:
        """Return what the log records of the curriculum at a step.

        Args:
            step: The training step, counted from 0.
        """
        return {}

    def corrupt(
        self, x_0: Tensor, t: Tensor, rows: Tensor, step: Tensor, tau: Tensor | None
    ) -> tuple[Tensor, AbstractContextManager[None]]:
        """Draw x_t.

        Args:
            x_0: Clean tokens, [B, L].
            t: Times, [B].
            rows: The examples' indices in the global batch, [B].
            step: The training step, a scalar on the device, so that each replay of a CUDA graph reads it again.
            tau: The temperature, a scalar on the device; None: the tokens are plain.

        Returns:
            x_t [B, L], and a context in which the network reads it, or its softened form.
        """
        return corrupt_by_counter(self.head.process, x_0, t, rows, self.seed, step), nullcontext()


class DuoCurriculum(PlainTokens):
    """DUO: in the first half of the run the network reads the mean embedding under softmax(w / tau)."""

    def tau(self, step: int) -> float:
        """Return tau, which falls in the first half of the run, and 0 after it."""
        return temperature(step, 0, self.steps // 2)

    def log_values(self, step: int) -> dict[str, float]:
        """Return tau at a step."""
        return {"tau": self.tau(step)}

    def corrupt(
        self, x_0: Tensor, t: Tensor, rows: Tensor, step: Tensor, tau: Tensor | None
    ) -> tuple[Tensor, AbstractContextManager[None]]:
        """Draw x_t as the argmax of Gaussian noise, whose softmax the network reads."""
        if tau is None:
            return super().corrupt(x_0, t, rows, step, tau)
        process = cast(Uniform, self.head.process)  # checked by `m2s.losses.duo.check_duo`
        w = gaussian_latent(process, x_0, t, normals_by_counter(rows, x_0.shape[1], process.vocab, self.seed, step))
        return w.argmax(-1), soft_embedding(cast(nn.Embedding, self.model.embedding), torch.softmax(w / tau, -1))


CURRICULA: dict[str, type[PlainTokens]] = {"none": PlainTokens, "duo": DuoCurriculum}
