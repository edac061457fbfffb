"""Problems so small that all sequences are enumerated: the exact value of an estimator for every clean sequence."""

import itertools
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at, safe_log, scatter_at
from m2s.errors import UserError
from m2s.evaluation.likelihood.base import Estimator, Options, Term
from m2s.heads import Head, LogScore
from m2s.losses.elbo import NelboTerms
from m2s.losses.objective import Model
from m2s.modes import evaluation_mode
from m2s.ops.last_layer import Unprojected
from m2s.process import Process

MAX_STATES, MAX_PAIRS = 2000, 600_000
CHUNK = 30_000  # sequences in one call of the network


def is_enumerable(process: Process, length: int) -> bool:
    """Return whether a world has few enough sequences.

    Args:
        process: The forward process.
        length: The length of sequences.
    """
    clean, noisy = process.vocab**length, process.states**length
    return noisy <= MAX_STATES and clean * noisy <= MAX_PAIRS


class World:
    """All sequences of a length, and a network.

    `clean` has all K^L clean sequences and `noisy` all S^L noisy ones; the last position changes fastest.

    Args:
        model: The network, called as model(x_t, t).
        head: What its output means.
        length: The length L.
        options: The options of the estimators.

    Raises:
        UserError: There are too many sequences.
    """

    def __init__(self, model: Model, head: Head, length: int, options: Options | None = None) -> None:
        validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
        validation.positive_int("length", length)
        process, self.options = head.process, options or Options()
        if not is_enumerable(process, length):
            raise UserError(
                option="length",
                value=length,
                reason=f"{process.states**length:,} noisy sequences are too many to enumerate",
                hint=f"at most {MAX_STATES:,} noisy sequences and {MAX_PAIRS:,} pairs with clean ones: take fewer tokens or a "
                "shorter length",
            )
        self.model, self.head, self.length = model, head, length
        self.clean, self.noisy = (enumerate_sequences(count, length) for count in (process.vocab, process.states))
        self.network = NelboTerms(model, head, self.options.t_min)

    def output(self, times: Float[Tensor, "M"]) -> Float[Tensor, "M N L V"]:
        """Return the network's output at all noisy sequences and several times, in float64.

        Args:
            times: Times, [M].
        """
        count = len(self.noisy)
        x_t, t = self.noisy.repeat(len(times), 1), times.double().repeat_interleave(count)
        with evaluation_mode(self.model), torch.no_grad():
            parts = [self.network.network(*part) for part in zip(x_t.split(CHUNK), t.split(CHUNK), strict=True)]
        projected = [part.project() if isinstance(part, Unprojected) else part for part in parts]
        return torch.cat(projected).double().unflatten(0, (len(times), count))

    def expected(self, term: Term) -> Float[Tensor, "X"]:
        """Return the exact value of a term for every clean sequence, in nats.

        x_t is enumerated. Levels are enumerated, or integrated by Gauss-Legendre quadrature.

        Args:
            term: The term.
        """
        if term.levels is None:
            with evaluation_mode(self.model), torch.no_grad():
                return term.prior(self.network, self.clean).sum(-1)
        total = torch.zeros(len(self.clean), dtype=torch.float64)
        # The network's time is clamped, so that the integrand has a kink there.
        nodes = term.levels.nodes(self.head.process, self.length, (self.options.t_min, 1 - self.options.t_min))
        place_0, place_t = self._pairs()
        for level, weight in zip(*(part.split(max(1, CHUNK // len(place_0))) for part in _columns(nodes)), strict=True):
            total += self._weighted_sum(term, level, weight, place_0, place_t)
        return total

    def _weighted_sum(self, term: Term, level: Tensor, weight: Tensor, place_0: Tensor, place_t: Tensor) -> Float[Tensor, "X"]:
        """The sum over levels and noisy sequences of weight times probability times value, for each clean sequence."""
        assert term.levels is not None and term.value is not None
        process, pairs = self.head.process, len(place_0)
        t = term.levels.time(process, level)
        output = self.output(t)[:, place_t].flatten(0, 1)
        places = place_0.repeat(len(level))
        x_0, x_t = self.clean[places], self.noisy[place_t.repeat(len(level))]
        each = level.repeat_interleave(pairs)
        probability = term.levels.probability(process, x_0, x_t, each) * weight.repeat_interleave(pairs)
        counted = probability > 0
        parts = (value[counted] for value in (output, x_0, x_t, t.repeat_interleave(pairs)))
        nats = term.value(self.head, *parts).double().sum(-1)
        total = torch.zeros(len(self.clean), dtype=torch.float64)
        return total.index_add_(0, places[counted], probability[counted] * nats)

    def nats(self, estimator: Estimator) -> Float[Tensor, "X"]:
        """Return the exact expectation of an estimator for every clean sequence.

        Args:
            estimator: The estimator.
        """
        return torch.stack([self.expected(term) for term in estimator.build(self.head, self.options)]).sum(0)

    def _pairs(self) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
        """The places of clean and noisy sequences, of which the second can come from the first."""
        process = self.head.process
        place_0, place_t = torch.cartesian_prod(torch.arange(len(self.clean)), torch.arange(len(self.noisy))).unbind(-1)
        if process.rank_one is not None and process.rank_one.is_pure_mask:
            x_0, x_t = self.clean[place_0], self.noisy[place_t]
            reached = ((x_0 == x_t) | process.is_mask(x_t)).all(-1)
            return place_0[reached], place_t[reached]
        return place_0, place_t


def _columns(nodes: list[tuple[float, float]]) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """Levels and weights as tensors."""
    level, weight = torch.tensor(nodes, dtype=torch.float64).unbind(-1)
    return level, weight


def enumerate_sequences(states: int, length: int) -> Int[Tensor, "N L"]:
    """Return all sequences; the last position changes fastest.

    Args:
        states: The number of values of a position.
        length: The length.

    Returns:
        Sequences, [states ** length, length].
    """
    return torch.tensor(list(itertools.product(range(states), repeat=length)))


def random_network(process: Process, length: int, seed: int = 0, scale: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a network whose logits are a random table of the noisy sequence, linear in t; float64.

    Args:
        process: The forward process.
        length: The length of sequences.
        seed: The seed of the table.
        scale: The standard deviation of its entries.
    """
    generator = torch.Generator().manual_seed(seed)
    size = (2, process.states**length, length, process.states)
    table = scale * torch.randn(size, generator=generator, dtype=torch.float64)
    power = process.states ** torch.arange(length - 1, -1, -1)

    def network(x_t: Tensor, t: Tensor) -> Tensor:
        at = (x_t.long() * power).sum(-1)
        return table[0, at] + t.double().reshape(-1, 1, 1) * table[1, at]

    return network


def exact_network(head: Head, length: int, seed: int = 0, scale: float = 1.5) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the network that knows a random distribution of clean sequences: its head has the exact posterior or score.

    Estimates of the likelihood are tight there, so that a dropped term shows.

    Args:
        head: A posterior without offset, or a log-score without scale.
        length: The length of sequences.
        seed: The seed of the distribution.
        scale: The standard deviation of its log-probabilities.
    """
    process = head.process
    clean = enumerate_sequences(process.vocab, length)
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.log_softmax(scale * torch.randn(len(clean), generator=generator, dtype=torch.float64), -1)

    def leave_one_out(x_t: Tensor, t: Tensor) -> Tensor:
        """log Pr(X_0^i = z | X_t^{-i}), [B, L, K]."""
        columns = safe_log(process.columns(x_t, t)[..., : process.vocab])
        likelihood = columns[:, torch.arange(length), clean]  # [B, clean, site]
        others = log_p[:, None] + likelihood.sum(-1, keepdim=True) - likelihood
        others = others.nan_to_num(nan=-torch.inf)
        states = torch.arange(process.vocab)
        chosen = torch.where(clean.unsqueeze(-1) == states, 0.0, -torch.inf)  # [clean, site, z]
        return torch.logsumexp(others.unsqueeze(-1) + chosen, 1)

    def network(x_t: Tensor, t: Tensor) -> Tensor:
        x_t, t = x_t.long(), t.double()
        log_nu = torch.log_softmax(leave_one_out(x_t, t).clamp(min=-700), -1)
        if isinstance(head, LogScore):
            matrix = process.transition_matrix(t)[:, : process.vocab]
            log_marginal = safe_log(torch.einsum("blz,bzy->bly", log_nu.exp(), matrix))
            return scatter_at(log_marginal - gather_at(log_marginal, x_t), x_t, 0.0).clamp(min=-700, max=700)
        log_mu = log_nu + safe_log(process.columns(x_t, t)[..., : process.vocab])
        padding = (0, process.states - process.vocab)
        return torch.nn.functional.pad(log_mu.clamp(min=-700), padding, value=-700.0)

    return network
