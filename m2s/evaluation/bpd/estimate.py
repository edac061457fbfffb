"""A mean with its standard errors and a confidence interval."""

import math
from dataclasses import asdict, dataclass

from m2s import validation

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with two standard errors of different meaning.

    Args:
        value: The estimate.
        error: Standard error over passes: times and noise are random, the examples are fixed. None with a single pass.
        low: Lower end of Student's 95% interval for `error`. None with a single pass.
        high: Upper end of that interval.
        rows_error: Standard error over examples: they are random too, and independent. None with a single example.
    """

    value: float
    error: float | None
    low: float | None
    high: float | None
    rows_error: float | None

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in another unit, which is 1/factor of this one.

        Args:
            factor: The number of new units in one old unit, such as 1 / log 2 from nats to bits.
        """
        return Estimate(*(None if x is None else factor * x for x in asdict(self).values()))  # type: ignore[arg-type]

    def exp(self) -> "Estimate":
        """Return the estimate of exp(value). The ends of the interval are mapped; errors are multiplied by the slope."""
        value, low, high = (None if x is None else math.exp(min(x, 700.0)) for x in (self.value, self.low, self.high))
        assert value is not None
        error, rows_error = (None if x is None else value * x for x in (self.error, self.rows_error))
        return Estimate(value, error, low, high, rows_error)


def student_t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return the quantile t with Pr(|T| < t) = level of Student's distribution.

    With theta = atan(t / sqrt(freedom)) that probability is a finite sum of powers of cos theta (Abramowitz and Stegun
    26.7.3, 26.7.4). It is solved for theta by bisection.

    Args:
        freedom: The degrees of freedom.
        level: The probability.

    Returns:
        t.
    """
    validation.positive_int("freedom", freedom)
    odd = freedom % 2

    def probability(theta: float) -> float:
        cosine, total = math.cos(theta), 0.0
        term = cosine**odd
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= cosine**2 * (power + 1) / (power + 2)
        return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)
