"""Masking noise: a replaced token becomes the mask and stays masked."""

import torch
from torch import Tensor

from m2s.process.rank_one import Mixing, Scheduled
from m2s.process.schedule import Schedule


class Absorbing(Scheduled):
    """Masking noise: a replaced token becomes the mask, the last of `vocab` + 1 states.

        m_t = (1 - alpha_t) e_mask,    n_t = sigma_t' e_mask

    Args:
        vocab: Number K of clean tokens, at least 2.
        schedule: alpha_t, such as `m2s.Linear()`.

    Example:
        >>> process = m2s.Absorbing(50_257, m2s.LogLinear())
        >>> process.states, process.mask
        (50258, 50257)
    """

    def __init__(self, vocab: int, schedule: Schedule | None = None) -> None:
        super().__init__(vocab, schedule)
        self.states, self.mask = vocab + 1, vocab

    @property
    def masking_schedule(self) -> Schedule:
        return self.schedule

    def _spread(self, mass: Tensor) -> Mixing:
        return Mixing(torch.zeros_like(mass), mass)
