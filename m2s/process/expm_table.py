"""Kernels of many times at once by products of a few tabulated ones, where doubling would take some twenty products for each.

The number of expected jumps sigma q, q the fastest rate, is written to the base 64. A digit has a table of 64 kernels, and
what is left of less than one jump is the uniformization series from stored powers of the jump matrix:

    P = (sum_n e^-r r^n/n! U^n)  P_{d_0}  P_{64 d_1}  P_{64^2 d_2} ...

All terms are positive, so that small entries keep their digits; nothing depends on a number that the host would have to read,
so that all of it can be recorded in a graph.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.process.expm import expm

BASE = 64
MOST_DIGITS = 4
MOST_TERMS = 96  # of the series for less than one jump
MOST_STATES = 320  # the tables of 256 states take 118 MiB
ROUNDING = 1e-17  # what a last term may add to any entry, as a share of it
SETTLED = 1e-13  # how far the rows of a kernel may differ that is called the limit, as a share


class ExpmTable:
    """The kernels expm(sigma Q) of one generator, by tables on one device."""

    def __init__(self, fastest: Tensor, powers: Tensor, tables: list[Tensor]) -> None:
        self.fastest = fastest
        self.powers = powers  # U^n, n = 0.., as rows
        self.tables = tables  # one for each digit, the lowest first
        count = torch.arange(len(powers), dtype=powers.dtype, device=powers.device)
        self.count, self.log_factorial = count, torch.lgamma(count + 1)

    @classmethod
    def of(cls, rates: Float[Tensor, "S S"]) -> "Ladder | None":
        """That of a generator, where the limit is reached in few digits and less than one jump is summed in few terms."""
        states, fastest = len(rates), -rates.diagonal().min()
        if states > MOST_STATES or not fastest > 0:
            return None
        powers = powers_of((rates / fastest + torch.eye(states, dtype=rates.dtype, device=rates.device)).clamp(min=0))
        if powers is None:
            return None
        tables = []
        for digit in range(MOST_DIGITS):
            unit = expm(rates, float(BASE**digit) / fastest)
            kernels = [torch.eye(states, dtype=rates.dtype, device=rates.device)]
            for _ in range(BASE):
                kernels.append(kernels[-1] @ unit)
            tables.append(torch.stack(kernels[:BASE]))
            limit = kernels[BASE]
            if bool(((limit - limit[0]).abs() <= SETTLED * limit[0]).all()):
                return cls(fastest, powers, tables)
        return None

    def __call__(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        states = self.tables[0].shape[-1]
        top = float(BASE ** len(self.tables))
        jumps = (sigma.reshape(-1).to(self.powers.dtype) * self.fastest).clamp(max=top - 1)  # there the chain is at its limit
        whole = torch.floor(jumps)
        rest = (jumps - whole).unsqueeze(-1)
        log_terms = torch.xlogy(self.count, rest) - rest - self.log_factorial
        kernel, digits = (log_terms.exp() @ self.powers).view(-1, states, states), whole.long()
        for table in self.tables:
            kernel = torch.bmm(kernel, table[digits % BASE])
            digits = digits // BASE
        return kernel.reshape(*sigma.shape, states, states)


def powers_of(jump: Float[Tensor, "S S"]) -> Float[Tensor, "n S*S"] | None:
    """I, U, U^2, ... until the next term of sum U^n/n! adds nothing to any entry; None if that takes too many."""
    power = torch.eye(len(jump), dtype=jump.dtype, device=jump.device)
    found, term, total = [power.flatten()], power, power
    for n in range(1, MOST_TERMS):
        power, term = power @ jump, (term @ jump) / n
        total = total + term
        found.append(power.flatten())
        if bool((total > 0).all()) and bool((term <= ROUNDING * total).all()):
            return torch.stack(found)
    return None
