"""The negative ELBO (NELBO), an upper bound on the NLL, with all of its terms.

    -log p(x_0) <= integral over [t_min, T] of the score entropy + KL(q_T(.|x_0) || reference) + E_{q_{t_min}} sum_i -log
    p(x_0^i | x_{t_min})

T = 1 - t_min, or 1 where the KL at 1 - t_min is infinite (the reference is the mask). A finite chain (m2s.Chain) has its own
times: its steps, of which the integral is the sum, and the first in place of t_min. The integral alone, which papers report,
is not a bound.

Where tokens survive to t = 1 although sampling starts from masks (alpha_1 = eps > 0 under a log-linear schedule), the KL is
replaced by `prior_nats`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import apply_transition
from m2s.heads import Head
from m2s.heads.output import call_model, check_model
from m2s.losses.objective import Loss, Model, apply_weight, stratified_times
from m2s.losses.score_entropy import score_entropy
from m2s.ops.last_layer import Output
from m2s.process import RankOne
from m2s.process.base import kl_terms
from m2s.process.chain import snap_times, time_interval


@dataclass(frozen=True)
class Elbo:
    """An upper bound on -log p(x_0) for each sample, in nats, and its three terms. Unpacks as (nats, standard_error)."""

    nats: Float[Tensor, "B"]
    standard_error: Float[Tensor, "B"]  # of each sample's bound over the passes; NaN with a single pass
    integral: Float[Tensor, "B"]
    prior: Float[Tensor, "B"]
    reconstruction: Float[Tensor, "B"]
    passes: Float[Tensor, "passes B"]  # the bound of every pass

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.nats, self.standard_error))

    def mean(self) -> tuple[float, float]:
        """The bound averaged over the batch and its standard error.

        Times are stratified within a pass and independent between passes, so with several passes the error is the one of
        sampling times and noise for this batch, itself known only roughly from a few passes; with one it is taken over
        samples, and covers the choice of samples too.
        """
        if len(self.passes) > 1:
            means = self.passes.mean(1)
            return float(means.mean()), float(means.std() / len(means) ** 0.5)
        return float(self.nats.mean()), float(self.nats.std() / len(self.nats) ** 0.5)


def prior_nats(
    head: Head,
    network: Callable[[Tensor, Tensor], Output],
    x_0: Int[Tensor, "B *site"],
    end: float,
    shared: bool = False,
) -> Float[Tensor, "B *site"]:
    """Return the prior term of the NELBO.

    It is KL(q_T(.|x_0) || reference). Where the reference is the mask and tokens survive to t = 1, that KL is infinite. There
    the forward process is given one more jump, at t = 1, in which every token becomes the mask. Its reverse predicts x_1 from
    masks alone, every site by itself, with mu the network's prediction of x_0 given all masks:

        p(x_1^i = y) = sum_z mu_z P_1(y|z),        term = KL(P_1(.|x_0) || p) = alpha_1 (-log mu_{x_0}) under absorbing noise.

    Args:
        head: What the network's output means.
        network: Called as network(x_t, t) -> output, with t = 1 and masks alone, only where tokens survive.
        x_0: Clean tokens, [B, L].
        end: T, the end of the integral.
        shared: Call the network on one example and use its output for all, where no condition tells them apart.

    Returns:
        Nats per site, [B, L], float64.
    """
    process = head.process
    t = torch.full((len(x_0),), end, dtype=torch.float64, device=x_0.device)
    if not process.has_clean_tokens_at_end:
        return process.prior_kl(x_0, t)
    masks = torch.full_like(x_0, process.states - 1)
    asked = slice(0, 1) if shared else slice(None)
    log_mu = head.last_step(network(masks[asked], t[asked]), masks[asked], t[asked]).expand(*x_0.shape, -1)
    if isinstance(process, RankOne):  # which is then a mask alone
        survival = validation.align("t", process.alpha(t), x_0)
        return -survival * log_mu.gather(-1, x_0.long().unsqueeze(-1)).squeeze(-1).double()
    return kl_terms(process.rows(x_0, t), apply_transition(log_mu.double().exp(), process.kernel(t))).sum(-1)


@torch.no_grad()
def elbo(
    model: Model,
    head: Head,
    x_0: Int[Tensor, "B *site"],
    passes: int = 1,
    t_min: float = 1e-3,
    loss: Loss = score_entropy,
    generator: torch.Generator | None = None,
    weight: Float[Tensor, "B *site"] | None = None,
    condition: Tensor | None = None,
) -> Elbo:
    """Estimate the NELBO with `passes` times for each sample, stratified over the batch within a pass.

    With `passes=1`, the default, the standard error of each sample is NaN: one draw does not show its own spread. Take two
    passes at least, or `mean()`, whose error is then the one over samples.

    `weight` multiplies the terms of each site (zero for padding). A `condition` [B, ...] is the network's third argument, and
    what is bounded is -log p(x_0 | condition). The network is called as it is, all rows at once: `model.eval()` before, where
    it has dropout or hides labels. `m2s.evaluation.bpd.bound` takes a whole set, some rows at a time.
    """
    validation.positive_int("passes", passes)
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    process = head.process
    validation.tokens("x_0", x_0, process.vocab)
    if not 0 < t_min < 0.5:
        raise ValueError(f"t_min is {t_min}, but it must lie in (0, 0.5)")
    if condition is not None:
        validation.one_per_example("condition", condition, "x_0", x_0)
    check_model(model, process)
    low, end = time_interval(process, t_min)

    def said(x_t: Tensor, t: Tensor) -> Output:
        return call_model(model, process, x_t, t.clamp(t_min, 1 - t_min).to(torch.get_default_dtype()), condition)

    def total(terms: Tensor) -> Tensor:
        return apply_weight(terms.double(), weight).flatten(1).sum(-1)

    integral, reconstruction = [], []
    for _ in range(passes):
        t = snap_times(process, stratified_times(len(x_0), low, end, generator, x_0.device))
        x_t = process.corrupt(x_0, t, generator)
        integral.append(total((end - low) * loss(head, said(x_t, t), x_0, x_t, t)))

        t = snap_times(process, torch.full((len(x_0),), low, dtype=torch.float64, device=x_0.device))
        x_t = process.corrupt(x_0, t, generator)
        distribution = head.last_step(said(x_t, t), x_t, t)
        reconstruction.append(total(-distribution.gather(-1, x_0.long().unsqueeze(-1)).squeeze(-1)))

    prior = total(prior_nats(head, said, x_0, end))
    each = torch.stack(integral) + torch.stack(reconstruction) + prior
    error = each.std(0) / passes**0.5 if passes > 1 else torch.full_like(prior, torch.nan)
    return Elbo(each.mean(0), error, torch.stack(integral).mean(0), prior, torch.stack(reconstruction).mean(0), each)
