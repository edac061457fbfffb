"""Transition matrices of many times at once, as products of a few tabulated ones.

Doubling (`m2s.process.expm`) takes about twenty matrix products for each time. Here the expected number of jumps, sigma times
the fastest rate, is written in base 64. Each digit d_i selects one of 64 tabulated matrices, and the fraction r of a jump that
is left is summed by uniformization from stored powers of the jump matrix U:

    P = (sum_n e^-r r^n/n! U^n)  P_{d_0}  P_{64 d_1}  P_{64^2 d_2} ...

All terms are positive, so that small entries keep their digits. No value is read by the host, so that the computation can be
recorded in a CUDA graph.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.process.expm import expm

BASE = 64
MAX_DIGITS = 4
MAX_TERMS = 96  # of the series for less than one jump
MAX_STATES = 320  # the tables of 256 states take 118 MiB
SERIES_TOLERANCE = 1e-17  # the last term of the series may add this fraction of an entry
LIMIT_TOLERANCE = 1e-13  # the rows of the limit may differ by this fraction


class ExpmTable:
    """The transition matrices expm(sigma Q) of one rate matrix, from tables on one device. Build it with `ExpmTable.of`.

    Args:
        fastest: The fastest exit rate, a scalar.
        powers: I, U, U^2, ... of the jump matrix U = I + Q/fastest, one flattened matrix in each row, [n, S*S].
        tables: For each digit, the lowest first, the matrices of 0..63 times its unit, [64, S, S].
    """

    def __init__(self, fastest: Tensor, powers: Tensor, tables: list[Tensor]) -> None:
        self.fastest, self.powers, self.tables = fastest, powers, tables
        count = torch.arange(len(powers), dtype=powers.dtype, device=powers.device)
        self.count, self.log_factorial = count, torch.lgamma(count + 1)

    @classmethod
    def of(cls, rates: Float[Tensor, "S S"]) -> "ExpmTable | None":
        """Build the tables of a rate matrix.

        Args:
            rates: The rate matrix Q, [S, S].

        Returns:
            The tables, or None if they would be too large: too many states, a limit that is not reached within `MAX_DIGITS`
            digits or depends on the start, or a series of more than `MAX_TERMS` terms.
        """
        states, fastest = len(rates), -rates.diagonal().min()
        if states > MAX_STATES or not fastest > 0:
            return None
        powers = _powers(rates / fastest + torch.eye(states, dtype=rates.dtype, device=rates.device))
        if powers is None:
            return None
        tables = []
        for digit in range(MAX_DIGITS):
            unit = expm(rates, float(BASE**digit) / fastest)
            multiples = [torch.eye(states, dtype=rates.dtype, device=rates.device)]
            for _ in range(BASE):
                multiples.append(multiples[-1] @ unit)
            tables.append(torch.stack(multiples[:BASE]))
            limit = multiples[BASE]
            if bool(((limit - limit[0]).abs() <= LIMIT_TOLERANCE * limit[0]).all()):
                return cls(fastest, powers, tables)
        return None

    def __call__(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """Return expm(sigma Q) for times sigma >= 0, [*b], as [*b, S, S].

        Args:
            sigma: Total noise, [*b], not negative.
        """
        states = self.tables[0].shape[-1]
        top = float(BASE ** len(self.tables))
        jumps = (sigma.reshape(-1).to(self.powers.dtype) * self.fastest).clamp(max=top - 1)  # beyond this it is the limit
        integer = torch.floor(jumps)
        fraction = (jumps - integer).unsqueeze(-1)
        # xlogy(0, 0) is 0: at an integer number of jumps the term n = 0 is 1, and the others vanish.
        log_terms = torch.xlogy(self.count, fraction) - fraction - self.log_factorial
        matrix, digits = (log_terms.exp() @ self.powers).view(-1, states, states), integer.long()
        for table in self.tables:
            matrix = torch.bmm(matrix, table[digits % BASE])
            digits = digits // BASE
        return matrix.reshape(*sigma.shape, states, states)


def _powers(jump: Float[Tensor, "S S"]) -> Float[Tensor, "n S*S"] | None:
    """Return I, U, U^2, ... until the next term of sum U^n/n! adds nothing to any entry; None after `MAX_TERMS` terms."""
    jump = jump.clamp(min=0)  # rounding may have left a tiny negative diagonal
    power = torch.eye(len(jump), dtype=jump.dtype, device=jump.device)
    found, term, total = [power.flatten()], power, power
    for n in range(1, MAX_TERMS):
        power, term = power @ jump, (term @ jump) / n
        total = total + term
        found.append(power.flatten())
        if bool((total > 0).all()) and bool((term <= SERIES_TOLERANCE * total).all()):
            return torch.stack(found)
    return None
