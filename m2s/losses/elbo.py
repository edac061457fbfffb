"""The negative ELBO (NELBO), an upper bound on the NLL, with all of its terms.

    -log p(x_0) <= integral over [t_min, T] of the score entropy         (integral)
                   + KL(q_T(.|x_0) || reference)                         (prior)
                   + E_{q_{t_min}} sum_i -log p(x_0^i | x_{t_min})       (reconstruction)

T = 1 - t_min, or 1 where the KL at 1 - t_min is infinite (the reference is the mask). A finite chain (m2s.Chain) has its own
times: the integral is the sum over its steps, and its first step replaces t_min. The integral alone, which papers report, is
not a bound.

Where clean tokens remain at t = 1 although sampling starts from masks (alpha_1 = eps > 0 under a log-linear schedule), the KL
is replaced by `prior_nats`.

`NelboTerms` computes the three terms at given times and noise. Both estimators use it: `elbo`, for a batch, and
`m2s.evaluation.dataset_nelbo`, for a data set. They differ only in how they draw times and noise, and how they average.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import apply_transition
from m2s.errors import UserError, counted
from m2s.heads import Head
from m2s.heads.output import call_model, check_batch, check_model, without_padding
from m2s.losses.d3pm import chain_kl
from m2s.losses.next_token import zero_integral
from m2s.losses.objective import Loss, Model, apply_weight, stratified_times
from m2s.losses.score_entropy import score_entropy
from m2s.modes import evaluation_mode
from m2s.ops.last_layer import Output
from m2s.process.base import kl_terms
from m2s.process.chain import snap_times, time_interval


@dataclass(frozen=True)
class Elbo:
    """The NELBO of each example, an upper bound on -log p(x_0) in nats, and its three terms.

    It unpacks as (nats, standard_error).

    Args:
        nats: The NELBO, averaged over passes, [B].
        standard_error: Its standard error over passes, [B]; NaN with a single pass, infinite where the NELBO is.
        integral: The integral, [B].
        prior: The prior term, [B].
        reconstruction: The reconstruction term, [B].
        passes: The NELBO of every pass, [passes, B].
        sites: The weight of all positions of each example, which is its number of tokens where there is no other weight, [B].
    """

    nats: Float[Tensor, "B"]
    standard_error: Float[Tensor, "B"]
    integral: Float[Tensor, "B"]
    prior: Float[Tensor, "B"]
    reconstruction: Float[Tensor, "B"]
    passes: Float[Tensor, "passes B"]
    sites: Float[Tensor, "B"]

    @classmethod
    def concatenate(cls, parts: Sequence["Elbo"]) -> "Elbo":
        """Join the results of several batches.

        Args:
            parts: The results, all with the same number of passes.

        Returns:
            The result of all examples in their order.
        """
        names = ("nats", "standard_error", "integral", "prior", "reconstruction", "passes", "sites")
        return cls(*(torch.cat([getattr(part, name) for part in parts], -1) for name in names))

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.nats, self.standard_error))

    def __repr__(self) -> str:
        names = ("nats", "integral", "prior", "reconstruction")
        nelbo, *terms = (f"{float(getattr(self, name).mean()):.4f}" for name in names)
        parts = ", ".join(f"{name} {value}" for name, value in zip(names[1:], terms, strict=True))
        return f"Elbo({nelbo} nats per example: {parts}; {counted(len(self.nats), 'example')}, passes {len(self.passes)})"

    def _repr_html_(self) -> str:
        """The means of the NELBO and of its terms, as a notebook shows them."""
        sites, mean_error = float(self.sites.sum()), self.mean()[1]
        rows = []
        for name in ("integral", "prior", "reconstruction", "nats"):
            value = getattr(self, name)
            bits = float(value.sum()) / sites / math.log(2)
            error = f" ± {mean_error:.4f}" if name == "nats" and math.isfinite(mean_error) else ""
            title = "NELBO" if name == "nats" else name
            rows.append(f"<tr><td>{title}</td><td>{float(value.mean()):.4f}{error}</td><td>{bits:.4f}</td></tr>")
        head = "<tr><th></th><th>nats per example</th><th>bits per token</th></tr>"
        count, passes = len(self.nats), len(self.passes)
        return f"<p>NELBO of {count:,} examples, {passes} passes</p><table>{head}{''.join(rows)}</table>"

    def mean(self) -> tuple[float, float]:
        """Return the NELBO averaged over the batch, and its standard error.

        Times are stratified within a pass and independent between passes. With several passes the error is that of times and
        noise for this batch; a few passes give only a rough estimate of it. With one pass the error is taken over examples, and
        includes the choice of examples.
        """
        if len(self.passes) > 1:
            means = self.passes.mean(1)
            return float(means.mean()), float(_standard_error(means))
        return float(self.nats.mean()), float(_standard_error(self.nats))


def _standard_error(values: Float[Tensor, "n *rest"]) -> Float[Tensor, "*rest"]:
    """The standard error of the mean over the first axis; infinite where a value is."""
    error = values.std(0) / len(values) ** 0.5
    return torch.where(values.isinf().any(0), torch.inf, error)


def prior_nats(
    head: Head,
    network: Callable[[Tensor, Tensor], Output],
    x_0: Int[Tensor, "B *site"],
    end: float,
    shared: bool = False,
    t_min: float = 1e-3,
) -> Float[Tensor, "B *site"]:
    """Return the prior term of the NELBO.

    It is KL(q_T(.|x_0) || reference). Where the reference is the mask and clean tokens remain at t = 1, that KL is infinite.
    There the forward process gets one more jump, at t = 1, in which every token becomes the mask. Its reverse predicts x_1 from
    masks alone, each site independently, with mu the network's prediction of x_0 given all masks:

        p(x_1^i = y) = sum_z mu_z P_1(y|z),        term = KL(P_1(.|x_0) || p) = alpha_1 (-log mu_{x_0}) under absorbing noise.

    Args:
        head: What the network's output means.
        network: Called as network(x_t, t) -> output, with t = 1 and masks alone, only where clean tokens remain.
        x_0: Clean tokens, [B, L].
        end: T, the end of the integral.
        shared: Call the network on one example and use its output for all, where no condition distinguishes them.
        t_min: A head that excludes t = 1 (`Head.excludes_t_one`) is evaluated at 1 - t_min. The term is exact for any mu.

    Returns:
        Nats per position, [B, L], float64.
    """
    process = head.process
    t = torch.full((len(x_0),), end, dtype=torch.float64, device=x_0.device)
    if not process.has_clean_tokens_at_end:
        return process.prior_kl(x_0, t)
    masks = torch.full_like(x_0, process.states - 1)
    called = slice(0, 1) if shared else slice(None)
    head_time = t.clamp(max=1 - t_min) if head.excludes_t_one else t
    log_mu = head.last_step(network(masks[called], t[called]), masks[called], head_time[called]).expand(*x_0.shape, -1)
    rank_one = process.rank_one
    if rank_one is not None:  # its reference is the mask, so the closed form for absorbing noise holds
        survival = validation.align("t", rank_one.alpha(t), x_0)
        return -survival * log_mu.gather(-1, x_0.long().unsqueeze(-1)).squeeze(-1).double()
    return kl_terms(process.rows(x_0, t), apply_transition(log_mu.double().exp(), process.transition_matrix(t))).sum(-1)


def nelbo_integrand(head: Head) -> Loss:
    """Return the loss whose integral over time is the first term of the NELBO.

    Args:
        head: The head.

    Returns:
        Score entropy; the KL of each step for a finite chain; zero where the head has the exact likelihood.
    """
    if head.exact:
        return zero_integral
    return score_entropy if head.process.chain is None else chain_kl


@dataclass(frozen=True)
class NelboTerms:
    """The terms of the NELBO per position, at given times and noise.

    Args:
        model: The network, called as model(x_t, t) or model(x_t, t, condition).
        head: What its output means.
        t_min: The integral excludes [0, t_min) and (1 - t_min, 1]; the network never sees a time there.
        loss: The integrand; None: that of `nelbo_integrand(head)`.
        autocast: Makes the context in which the network is called.

    Raises:
        ValueError: `t_min` is not in (0, 0.5).
    """

    model: Model
    head: Head
    t_min: float = 1e-3
    loss: Loss | None = None
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        validation.instance("head", self.head, Head, "a head such as m2s.Posterior(process)")
        validation.in_interval("t_min", self.t_min, "(0, 0.5)")
        check_model(self.model, self.head.process)

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the integral: t_min and T, or the first and the last time of a finite chain."""
        return time_interval(self.head.process, self.t_min)

    def snap(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return the times themselves, or for a finite chain the ends of the steps into which they fall.

        Args:
            t: Drawn times, [B].

        Returns:
            Times, [B].
        """
        return snap_times(self.head.process, t)

    def first_times(self, count: int, device: torch.device | None = None) -> Float[Tensor, "count"]:
        """Return the time of the reconstruction, once for each example, float64.

        Args:
            count: The number B of examples.
            device: The device of the result; None: torch's default device.

        Returns:
            Times, [B], all equal.
        """
        return self.snap(torch.full((count,), self.interval[0], dtype=torch.float64, device=device))

    def network(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Output:
        """Call the network, with times clamped to [t_min, 1 - t_min].

        Args:
            x_t: Noisy tokens, [B, L].
            t: Times, [B].
            condition: The network's third argument, [B, ...]; None: it gets none.

        Returns:
            The network's output, [B, L, V], or `m2s.Unprojected`.
        """
        network_time = t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())
        with self.autocast():
            return call_model(self.model, self.head.process, x_t, network_time, condition)

    def integrand(self, x_0: Tensor, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Float[Tensor, "B *site"]:
        """Return the loss at time t, nats per position.

        Args:
            x_0: Clean tokens, [B, L].
            x_t: Noisy tokens at time t, [B, L].
            t: Times, [B].
            condition: The network's third argument, [B, ...]; None: it gets none.

        Returns:
            The loss, [B, L]. Its mean over x_t and uniform t, times the length of `interval`, is the integral term of the
            NELBO.
        """
        loss = self.loss or nelbo_integrand(self.head)
        return loss(self.head, self.network(x_t, t, condition), x_0, x_t, t)

    def log_likelihood(self, x_0: Tensor, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Float[Tensor, "B *site"]:
        """Return log p(x_0^i | x_t) at the first time, nats per position: minus the reconstruction term.

        Args:
            x_0: Clean tokens, [B, L].
            x_t: Noisy tokens at the first time, [B, L].
            t: The first time of each example, [B], from `first_times`.
            condition: The network's third argument, [B, ...]; None: it gets none.

        Returns:
            Log-probabilities, [B, L].
        """
        log_posterior = self.head.last_step(self.network(x_t, t, condition), x_t, t)
        return log_posterior.gather(-1, x_0.long().unsqueeze(-1)).squeeze(-1)

    def prior(self, x_0: Tensor, condition: Tensor | None = None, shared: bool = False) -> Float[Tensor, "B *site"]:
        """Return the prior term, nats per position.

        Args:
            x_0: Clean tokens, [B, L].
            condition: The network's third argument, [B, ...]; None: it gets none.
            shared: One call of the network for all examples (see `prior_nats`).

        Returns:
            The prior term, [B, L], in float64.
        """
        end = self.interval[1]
        return prior_nats(self.head, lambda x_t, t: self.network(x_t, t, condition), x_0, end, shared, self.t_min)


@torch.no_grad()
def elbo(
    model: Model,
    head: Head,
    x_0: Int[Tensor, "B *site"],
    passes: int = 1,
    t_min: float = 1e-3,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
    weight: Float[Tensor, "B *site"] | None = None,
    condition: Tensor | None = None,
) -> Elbo:
    """Estimate the NELBO of a batch. For a data set, see `m2s.evaluation.dataset_nelbo`.

    Each pass draws one time per example, stratified over the batch. The network is called on all examples at once, in
    evaluation mode, as `m2s.sample` calls it.

    Args:
        model: The network, called as model(x_t, t) or model(x_t, t, condition).
        head: What its output means.
        x_0: Clean tokens, [B, L].
        passes: Times per example. With one pass, the standard error of each example is NaN.
        t_min: Both ends of time, [0, t_min) and (1 - t_min, 1], are cut off the integral.
        loss: The integrand; None: that of `nelbo_integrand(head)`.
        generator: The source of randomness; None: torch's global generator, so that every call draws other noise.
        weight: Weight of each site, [B, L]; 0 for padding, which a network with a `padding_id` does not see. None: every
            weight is 1.
        condition: The network's third argument, [B, ...]. The NELBO is then an upper bound on -log p(x_0 | condition).

    Returns:
        The NELBO of each example and its terms.

    Raises:
        ValueError: A token, `t_min` or a shape is invalid.

    Example:
        >>> found = m2s.elbo(model, head, x_0, passes=4)
        >>> nats, error = found.mean()                          # of the NELBO, over examples
        >>> bits = found.nats / found.sites / math.log(2)       # per position
    """
    validation.positive_int("passes", passes)
    validation.generator("generator", generator)
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    process = head.process
    validation.tokens("x_0", x_0, process.vocab)
    if x_0.ndim == 0:
        raise UserError(option="x_0", expected="a batch of sequences, [B, L], not a single number")
    if condition is not None:
        validation.one_per_example("condition", condition, "x_0", x_0)
    check_model(model, process)
    check_batch("x_0", x_0, model)
    terms = NelboTerms(without_padding(model, weight), head, t_min, loss)
    low, end = terms.interval

    def total(nats: Tensor) -> Tensor:
        return apply_weight(nats.double(), weight).flatten(1).sum(-1)

    integral, reconstruction = [], []
    with evaluation_mode(model):
        for _ in range(passes):
            t = terms.snap(stratified_times(len(x_0), low, end, generator, x_0.device))
            x_t = process.corrupt(x_0, t, generator)
            integral.append(total((end - low) * terms.integrand(x_0, x_t, t, condition)))

            t = terms.first_times(len(x_0), x_0.device)
            x_t = process.corrupt(x_0, t, generator)
            reconstruction.append(total(-terms.log_likelihood(x_0, x_t, t, condition)))

        prior = total(terms.prior(x_0, condition))
    each = torch.stack(integral) + torch.stack(reconstruction) + prior
    error = _standard_error(each) if passes > 1 else torch.full_like(prior, torch.nan)
    sites = total(torch.ones(x_0.shape, dtype=torch.float64, device=x_0.device))
    return Elbo(each.mean(0), error, torch.stack(integral).mean(0), prior, torch.stack(reconstruction).mean(0), each, sites)
