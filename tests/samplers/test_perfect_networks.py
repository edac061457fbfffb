"""Samples of a perfect network are the data: every sampler, process, schedule, head and grid, on data with one sequence.

The network is exact, so an error in the samples comes from the sampler: an initial state that is not the reference
distribution, noise that is left after the last step, or a mask that was not drawn.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import m2s
from exact_steps import unchecked
from m2s.heads import NextToken, Ordinal, Shifted
from m2s.process import Chain
from m2s.process.chain import cosine_betas, even_betas, linear_betas
from m2s.samplers import SAMPLERS, NamedSampler, StepEvent
from m2s.samplers.registry import make_sampler

VOCAB, PERIOD = 5, 3
LENGTH, SAMPLES, STEPS = 2 * PERIOD, 4, 2
IMPOSSIBLE = -1e4  # a logit whose probability is 0 in float64
SCHEDULES = {
    "linear": m2s.Linear(),
    "exponential": m2s.Exponential(5.0),
    "log-linear": m2s.LogLinear(0.1),  # enough tokens survive to t = 1 for a test with 24 sites
    "geometric": m2s.Geometric(0.2, 7.0),  # enough noise at t = 0
    "geometric-rate": m2s.GeometricRate(7.0),
    "cosine": m2s.Cosine(),
    "rescaled": m2s.Rescaled(m2s.Cosine(), 0.05),  # noise at t = 0 and tokens at t = 1
}
KINDS: dict[str, Callable[[m2s.Schedule], m2s.Process]] = {
    "uniform": lambda schedule: m2s.Uniform(VOCAB, schedule),
    "absorbing": lambda schedule: m2s.Absorbing(VOCAB, schedule),
    "tabulated-absorbing": lambda schedule: m2s.RateMatrix.absorbing(VOCAB, schedule),
    "gaussian": lambda schedule: m2s.RateMatrix.gaussian(VOCAB, schedule, 1.0, 5.0),
    "birth-death": lambda schedule: m2s.RateMatrix.birth_death(torch.ones(VOCAB - 1), torch.ones(VOCAB - 1), schedule),
}
PROCESSES: dict[str, Callable[[], m2s.Process]] = {
    **{
        f"{kind}-{name}": functools.partial(build, schedule)
        for (kind, build), (name, schedule) in itertools.product(KINDS.items(), SCHEDULES.items())
        if kind in ("uniform", "absorbing") or name in ("log-linear", "geometric")
    },
    "hybrid-0": lambda: m2s.Hybrid(VOCAB, p_uniform=0.0),
    "hybrid-0.2": lambda: m2s.Hybrid(VOCAB, p_uniform=0.2),
    "chain-uniform": lambda: Chain.uniform(VOCAB, cosine_betas(20)),
    "chain-absorbing": lambda: Chain.absorbing(VOCAB, even_betas(20)),
    "chain-absorbing-not-to-the-end": lambda: Chain.absorbing(VOCAB, torch.full((20,), 0.1)),
    "chain-gaussian": lambda: Chain.gaussian(VOCAB, linear_betas(20)),
    "none": lambda: Shifted(VOCAB),
}
MASKED = [name for name in PROCESSES if any(part in name for part in ("absorbing", "hybrid", "none"))]
HEADS: dict[str, Callable[[m2s.Process], m2s.Head]] = {
    "posterior": lambda process: m2s.Posterior(process, "none"),
    "leave-one-out": lambda process: m2s.Posterior(process, "exact"),
    "ordinal": lambda process: Ordinal(process, "exact"),
    "log-score": lambda process: m2s.LogScore(process),
    "scaled-log-score": lambda process: m2s.LogScore(process, "sigma"),
    "factorized-rate": lambda process: m2s.FactorizedRate(process),
    "projected": lambda process: m2s.Projected(m2s.LogScore(process)),
    "next-token": lambda process: NextToken(process),
}


def pattern(length: int) -> Tensor:
    """The only sequence of the data: 3 1 4 3 1 4 ..."""
    return torch.tensor([3, 1, 4])[torch.arange(length) % PERIOD]


@dataclass
class Perfect:
    """The output of a perfect network for one kind of head, in float64."""

    head: m2s.Head

    def __call__(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        head, process, t = self.head, self.head.process, t.double()
        clean = pattern(x_t.shape[1]).expand(x_t.shape)
        known = torch.full((*x_t.shape, process.states), IMPOSSIBLE, dtype=torch.float64)
        known.scatter_(-1, clean.unsqueeze(-1), 0.0)
        if isinstance(head, Ordinal):
            return torch.stack([2 * clean / (VOCAB - 1) - 1, torch.full(clean.shape, -70.0)] + [clean * 0] * 4, -1).double()
        if isinstance(head, m2s.Posterior | NextToken):
            return known
        score = self.log_score(x_t, clean, t)
        if isinstance(head, m2s.FactorizedRate):
            return self.factorized(score, x_t, t)
        return score + head.shift(x_t, t).unsqueeze(-1) if isinstance(head, m2s.LogScore) else score

    def log_score(self, x_t: Tensor, clean: Tensor, t: Tensor) -> Tensor:
        """log P_t(y|x_0) / P_t(x_t|x_0); 0 for a token that x_0 cannot become."""
        log_rows = self.head.process.rows(clean, t).log().clamp(min=-700)
        at_current = log_rows.gather(-1, x_t.unsqueeze(-1))
        return torch.where(at_current > -700, log_rows - at_current, 0)

    def factorized(self, log_score: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        rates = self.head.process.rates_into(x_t, t)
        reverse, total = rates * log_score.exp(), rates.sum(-1, keepdim=True)
        exit_rate = torch.where(total > 0, reverse.sum(-1, keepdim=True) / total.where(total > 0, 1), 1)
        return reverse.log().clamp(min=-700).scatter(-1, x_t.unsqueeze(-1), exit_rate.log())


def neighbors_only(process: m2s.Process) -> bool:
    """Whether some pair of levels has no rate between them."""
    return isinstance(process, m2s.RateMatrix) and process.mask is None and bool((process.generator == 0).any())


def supported_heads(sampler: str, process: m2s.Process) -> list[tuple[str, m2s.Head]]:
    """The heads over a process that a sampler supports, with their names."""
    found = []
    for name, build in HEADS.items():
        if (name == "next-token") != isinstance(process, Shifted):
            continue
        if name in ("log-score", "factorized-rate", "projected") and neighbors_only(process):
            continue  # scores of candidates without a rate into x_t have no weight in the loss
        try:
            head = build(process)
            m2s.samplers.options.SamplingOptions(head, (1, LENGTH), sampler=sampler)
        except (TypeError, ValueError):
            continue
        found.append((name, head))
    return found


def cases(names: list[str]) -> list[tuple[str, str]]:
    """Every sampler with every process that it supports."""
    every = itertools.product(SAMPLERS, names)
    return [(sampler, name) for sampler, name in every if supported_heads(sampler, PROCESSES[name]())]


def quick(sampler: str) -> NamedSampler:
    """The sampler, with one correction where it has a corrector."""
    kind = SAMPLERS[sampler]
    return make_sampler(sampler, **({"corrections": 1} if "corrections" in kind.__dataclass_fields__ else {}))


def network_of(head: m2s.Head) -> Perfect:
    return Perfect(head.head if isinstance(head, m2s.Projected) else head)


@pytest.mark.parametrize(("sampler", "name"), cases(list(PROCESSES)))
def test_samples_are_the_data(sampler: str, name: str) -> None:
    """For every head, with the linear and the cosine grid alternately. Half of the samples have clamped tokens."""
    process, given = PROCESSES[name](), torch.full((SAMPLES, LENGTH), -1)
    given[::2, 1::4] = torch.tensor([[0], [2]])
    wanted = torch.where(given < 0, pattern(LENGTH), given)
    for (kind, head), grid in zip(supported_heads(sampler, process), itertools.cycle(("linear", "cosine")), strict=False):
        with unchecked():
            found = m2s.sample(
                network_of(head), head, (SAMPLES, LENGTH), STEPS, quick(sampler), grid, 3, clamp=given, micro_batch=SAMPLES
            )
        assert torch.equal(found, wanted), (kind, grid)


LEFT = ["uniform-geometric", "absorbing-log-linear", "hybrid-0.2", "gaussian-geometric", "chain-absorbing-not-to-the-end"]


@pytest.mark.parametrize(("sampler", "name"), cases(LEFT))
def test_samples_are_the_data_in_windows_and_under_guidance(sampler: str, name: str) -> None:
    for kind, head in supported_heads(sampler, PROCESSES[name]()):
        for guide in ("posterior", "rates", "step"):
            asked = {"guidance": 2.0, "guide": guide, "condition": torch.arange(SAMPLES)}
            try:
                m2s.samplers.options.SamplingOptions(head, (SAMPLES, 9), sampler=sampler, **asked)
            except TypeError:
                assert guide != "posterior"  # every sampler of these heads supports it
                continue
            asked |= {"window": LENGTH, "overlap": PERIOD, "micro_batch": SAMPLES, "steps": STEPS}
            with unchecked():
                found = m2s.sample(network_of(head), head, (SAMPLES, 9), sampler=quick(sampler), **asked)
            assert torch.equal(found, pattern(9).expand(SAMPLES, -1)), (kind, guide)


@pytest.mark.parametrize("name", ["uniform-geometric", "gaussian-geometric"])
@pytest.mark.parametrize("sampler", ["analytic", "euler", "tau_leaping"])
def test_samples_are_the_data_of_a_network_that_sees_no_small_times(sampler: str, name: str) -> None:
    """A score is inverted at the time that the network sees, at least t_min, not at that of the plan, 1e-5."""
    for kind, head in supported_heads(sampler, PROCESSES[name]()):
        found = m2s.sample(network_of(head), head, (64, LENGTH), 8, sampler, t_min=0.2, micro_batch=64)
        assert torch.equal(found, pattern(LENGTH).expand(64, -1)), kind


@pytest.mark.parametrize(("sampler", "name"), cases(MASKED))
def test_samples_start_from_masks(sampler: str, name: str) -> None:
    """For any alpha_1, except at clamped sites."""
    process, first = PROCESSES[name](), []
    given = torch.full((SAMPLES, LENGTH), -1)
    given[:, 2] = 0

    def look(step: StepEvent) -> None:
        if step.number == 0:
            first.append(step.x_t)

    asked = {"steps": 2, "sampler": quick(sampler), "clamp": given, "callback": look, "micro_batch": SAMPLES}
    for _, head in supported_heads(sampler, process):
        with unchecked():
            m2s.sample(network_of(head), head, tuple(given.shape), **asked)
    assert torch.equal(torch.cat(first), torch.where(given < 0, process.states - 1, given).repeat(len(first), 1))


# ------------------------------------------------------------------------------------------------------------------- ranking


CONFIDENCE = torch.tensor([0.5, 0.9, 0.3, 0.8, 0.4, 0.7])
SHARP = {"greedy": {"top_k": 1}, "cold": {"temperature": 0.01}, "nucleus": {"top_p": 0.2}}


def sure_by_site(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
    """The data at every site, with a different confidence at each, and the same probability for all other tokens."""
    probability = ((1 - CONFIDENCE) / (VOCAB - 1)).unsqueeze(-1).repeat(1, VOCAB + 1)
    probability[torch.arange(LENGTH), pattern(LENGTH)] = CONFIDENCE
    return probability.double().log().expand(*x_t.shape, -1)


def revealed(sampler: str, network: Callable[..., Tensor], count: int, **asked: object) -> Tensor:
    """The sites of each sample in the order in which they are revealed, one a step, [count, L]."""
    head, seen = m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear())), m2s.samplers.Trajectory()
    m2s.sample(network, head, (count, LENGTH), LENGTH, sampler, "linear", callback=seen, **asked)
    masked = seen.states == VOCAB
    assert (masked.sum(-1) == torch.arange(LENGTH, -1, -1).unsqueeze(-1)).all()
    return masked.sum(0).argsort(-1)  # by the number of steps for which a site was masked


@pytest.mark.parametrize("how", SHARP)
@pytest.mark.parametrize("sampler", ["confidence", "adaptive"])
def test_sites_are_ranked_by_the_unsharpened_prediction(sampler: str, how: str) -> None:
    """Greedy decoding reveals sites by decreasing probability, not from left to right."""
    order = revealed(sampler, sure_by_site, 3, **SHARP[how])
    assert torch.equal(order, CONFIDENCE.argsort(descending=True).expand(3, -1))


@pytest.mark.parametrize("sampler", ["confidence", "adaptive"])
def test_ties_are_broken_by_the_randomness_of_the_sample(sampler: str) -> None:
    """With equal confidence the order is random, different for each sample, and the same in another batch."""
    network = network_of(m2s.Posterior(m2s.Absorbing(VOCAB, m2s.Linear())))
    order = revealed(sampler, network, 40, seed=2)
    assert len(order[:, 0].unique()) == LENGTH and len({tuple(row) for row in order.tolist()}) > 30
    assert torch.equal(revealed(sampler, network, 5, seed=2, start=20, batch_size=2), order[20:25])


# -------------------------------------------------------------------------------------------------------------------- modes


class Blocks(nn.Module):
    """A network in training mode with a frozen part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.learning = nn.Dropout(0.5).eval(), nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
        self.seen: list[bool] = []

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        self.seen.append(any(module.training for module in self.modules()))
        return torch.zeros(*x_t.shape, VOCAB)


def test_every_module_gets_its_own_mode_back() -> None:
    inner = Blocks().eval()
    trained = inner.learning.train()
    before = [module.training for module in inner.modules()]
    head = m2s.Posterior(m2s.Uniform(VOCAB, m2s.Linear()))
    m2s.sample(inner, head, (2, 3), steps=2)
    assert [module.training for module in inner.modules()] == before and trained.training and not inner.frozen.training
    assert inner.seen == [False, False]
    with pytest.raises(ValueError, match="output"):  # also after an error
        m2s.sample(inner, m2s.Posterior(m2s.Uniform(VOCAB + 1, m2s.Linear())), (2, 3), steps=2)
    assert [module.training for module in inner.modules()] == before
