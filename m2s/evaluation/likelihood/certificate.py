"""Whether an estimator is an upper bound on the NLL, decided by enumeration.

In an enumerable world the exact expectation b(x) of an estimator must satisfy, for an upper bound on the NLL of a distribution,

    sum over x of exp(-b(x)) <= 1    and    b(x) >= -log p(x)

where p is the distribution that the reverse process generates. A violation of the first proves that b is the bound of no
distribution at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from m2s.errors import UserError
from m2s.evaluation.likelihood.base import Estimator, Options
from m2s.evaluation.likelihood.registry import ESTIMATORS
from m2s.evaluation.likelihood.reverse import exact_nll
from m2s.evaluation.likelihood.world import World, exact_network, random_network
from m2s.heads import FactorizedRate, Head, LogScore, Posterior
from m2s.losses.objective import Model
from m2s.process import Absorbing, Chain, Cosine, Hybrid, Linear, LogLinear, Uniform
from m2s.process.schedule import Rescaled

TOLERANCE = 2e-6  # nats, besides the error of the numerical solution


@dataclass(frozen=True)
class Certificate:
    """The result for one estimator in one world.

    Args:
        estimator: The name of the estimator.
        world: Head, process, length and network.
        terms: The terms that it has.
        missing: What it declares to lack for an upper bound.
        kraft: The sum over all sequences of exp(-b(x)).
        margin: The smallest b(x) + log p(x), in nats.
        worst: A sequence with the smallest margin.
        gap: The mean of b(x) + log p(x) over the distribution p, in nats.
        error: An estimate of the numerical error of log p(x), in nats.
    """

    estimator: str
    world: str
    terms: tuple[str, ...]
    missing: tuple[str, ...]
    kraft: float
    margin: float
    worst: tuple[int, ...]
    gap: float
    error: float

    @property
    def tolerance(self) -> float:
        """How far below 0 a margin may be by rounding, in nats."""
        return TOLERANCE + self.error

    @property
    def satisfies_kraft(self) -> bool:
        """Whether the estimator can be the bound of some distribution."""
        return self.kraft <= 1 + self.tolerance

    @property
    def passed(self) -> bool:
        """Whether the estimator is an upper bound in this world."""
        return self.satisfies_kraft and self.margin >= -self.tolerance

    def summary(self) -> dict[str, Any]:
        """Return everything as JSON can store it."""
        return {**asdict(self), "satisfies_kraft": self.satisfies_kraft, "passed": self.passed}


def supported(head: Head, names: Sequence[str] | None = None) -> dict[str, Estimator]:
    """Return the estimators that support a head, by name.

    Args:
        head: The head.
        names: The estimators to choose from; None: all that are registered.

    Raises:
        UserError: There is no estimator of that name, or one that was named does not support the head.
    """
    found = {}
    for name in ESTIMATORS if names is None else names:
        estimator = ESTIMATORS.find(name, "estimators")
        reason = estimator.unsupported(head)
        if not reason:
            found[name] = estimator
        elif names is not None:
            raise UserError(option="estimators", value=name, reason=f"it does not support {head}: {reason}")
    return found


def certify(
    model: Model,
    head: Head,
    length: int,
    estimators: Sequence[str] | None = None,
    options: Options | None = None,
    name: str = "",
) -> list[Certificate]:
    """Decide by enumeration which estimators of the likelihood are upper bounds for a network.

    Args:
        model: The network, called as model(x_t, t). It should compute in float64 or float32.
        head: What its output means.
        length: The length of sequences. Vocabulary and length must be so small that all sequences are enumerated.
        estimators: Names of `m2s.evaluation.likelihood.ESTIMATORS`; None: all that support the head.
        options: t_min, and the number of steps in discrete time.
        name: What the network is, for the description of the world.

    Returns:
        One certificate for each estimator.

    Raises:
        UserError: There are too many sequences, or an estimator does not support the head.

    Example:
        >>> process = m2s.Absorbing(3, m2s.Linear())
        >>> for found in m2s.certify(model, m2s.Posterior(process), length=3):
        ...     print(found.estimator, found.passed, found.margin)
    """
    world = World(model, head, length, options)
    described = f"{head}, length {length}" + (f", {name}" if name else "")
    solved: dict[str, tuple[torch.Tensor, float]] = {}
    found = []
    for key, estimator in supported(head, estimators).items():
        if estimator.reverse not in solved:
            solved[estimator.reverse] = exact_nll(world, estimator)
        nll, error = solved[estimator.reverse]
        nats = world.nats(estimator)
        margins = nats - nll
        worst = int(margins.argmin())
        found.append(
            Certificate(
                estimator=key,
                world=described,
                terms=estimator.terms(head, world.options),
                missing=estimator.missing(head, world.options),
                kraft=float(torch.exp(-nats).sum()),
                margin=float(margins[worst]),
                worst=tuple(world.clean[worst].tolist()),
                gap=float(torch.exp(-nll) @ margins),
                error=error,
            )
        )
    return found


def worlds() -> Iterator[tuple[Model, Head, int, str]]:
    """Yield networks, heads, lengths and names of the built-in worlds, on which `m2s certify` tests every estimator.

    Random networks test that bounds hold for any network. Networks that know the distribution make bounds tight, so that a
    dropped term shows.
    """
    masks = [Absorbing(2, schedule) for schedule in (Linear(), Cosine(), LogLinear(1e-3), Rescaled(Linear(), 1e-4))]
    uniform = [Uniform(3, schedule) for schedule in (Linear(), LogLinear(1e-3))]
    heads: list[Head] = [Posterior(process) for process in (*masks, *uniform, Hybrid(2, p_uniform=0.2))]
    chain = Chain.gaussian(3, torch.linspace(0.05, 1.0, 8, dtype=torch.float64), torch.float64)
    heads += [LogScore(masks[2]), LogScore(uniform[1]), Posterior(chain)]
    for head in heads:
        yield exact_network(head, 3), head, 3, "exact network"
        yield random_network(head.process, 3), head, 3, "random network"
    yield random_network(uniform[1], 3), FactorizedRate(uniform[1]), 3, "random network"
