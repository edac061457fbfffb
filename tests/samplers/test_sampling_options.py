"""Invalid options and outputs raise errors, before the network is called where possible; default samplers."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import m2s
from m2s.heads import NextToken, Shifted
from m2s.samplers import (
    SAMPLERS,
    Bayes,
    CounterNoise,
    FirstHitting,
    Move,
    Need,
    Prediction,
    PredictorCorrector,
    Sampler,
    SamplingOptions,
    default_sampler,
    make_sampler,
    sample_with_options,
)
from m2s.samplers import prediction as prediction_module
from m2s.samplers.inference_model import InferenceModel
from run_cases import PROCESSES, K, L, Rounding, never, run

pytestmark = pytest.mark.usefixtures("without_shape_hook")


head = m2s.Posterior(PROCESSES["uniform"])
masked = m2s.Posterior(PROCESSES["absorbing"])
unconstrained = m2s.LogScore(PROCESSES["uniform"])
two = torch.zeros(2, dtype=torch.long)


def call(head: Any = head, shape: Any = (2, 3), model: Any = never, **options: Any) -> Callable[[], object]:
    return lambda: m2s.sample(model, head, shape, **options)


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no steps": (call(steps=0), ValueError, r"steps is 0.*at least 1"),
    "negative steps": (call(steps=-3), ValueError, r"steps is -3"),
    "fractional steps": (call(steps=2.0), TypeError, r"steps must be an int, not float"),
    "steps is a bool": (call(steps=True), TypeError, r"steps must be an int, not bool"),
    "unknown sampler": (
        call(sampler="nearest"),
        ValueError,
        r"sampler is 'nearest', but there is no.*bayes, euler, analytic, tau_leaping",
    ),
    "misspelled sampler": (call(sampler="bayess"), ValueError, r"sampler is 'bayess', .*did you mean bayes\?"),
    "misspelled longer sampler": (call(sampler="tau-leaping"), ValueError, r"did you mean tau_leaping"),
    "sampler is no name": (
        call(sampler=None),
        TypeError,
        r"sampler must be the name of a sampler, or a sampler such as .*, not None",
    ),
    "sampler is a list": (call(sampler=["bayes"]), (ValueError, TypeError), r"sampler"),
    "sampler is a class": (call(sampler=Bayes), TypeError, r"sampler must be the name of a sampler.*not <class"),
    "unknown grid": (
        call(grid="quadratic"),
        ValueError,
        r"grid is 'quadratic', but there is no grid of that name: choose from linear, cosine",
    ),
    "grid is a list": (call(grid=[1.0, 0.5, 0.0]), (ValueError, TypeError), r"grid"),
    "head is a process": (call(PROCESSES["uniform"]), TypeError, r"head must be a head such as m2s.Posterior"),
    "model is nothing": (call(model=None), TypeError, r"model"),
    "bayes with an unconstrained score": (
        call(unconstrained, sampler="bayes"),
        TypeError,
        r"'bayes' draws from a posterior.*LogScore predicts an unconstrained score.*use sampler='analytic', or m2s.Projected",
    ),
    "ancestral from uniform": (
        call(sampler="ancestral"),
        TypeError,
        r"'ancestral' supports m2s.Absorbing only.*Uniform.*use sampler='bayes'",
    ),
    "first hitting with an unconstrained score": (
        call(m2s.LogScore(PROCESSES["absorbing"]), sampler="first_hitting"),
        TypeError,
        r"'first_hitting' draws from a posterior.*m2s.Projected\(head\)",
    ),
    "confidence of a hybrid": (
        call(m2s.Posterior(PROCESSES["hybrid"]), sampler="confidence"),
        TypeError,
        r"supports m2s.Absorbing only",
    ),
    "remasking of a rate matrix": (
        call(m2s.Posterior(PROCESSES["tabulated-absorbing"]), sampler="remasking"),
        TypeError,
        r"'remasking' supports m2s.Absorbing only.*RateMatrix",
    ),
    "analytic of a rate matrix": (
        call(m2s.Posterior(PROCESSES["gaussian"]), sampler="analytic"),
        TypeError,
        r"'analytic' supports rank-one processes.*use sampler='bayes'",
    ),
    "euler of a chain": (
        call(m2s.Posterior(PROCESSES["chain"]), sampler="euler"),
        TypeError,
        r"'euler' needs the rates of a process in continuous time.*Chain\(.*use sampler='bayes'",
    ),
    "confidence of a chain": (
        call(m2s.Posterior(PROCESSES["chain"]), sampler="confidence"),
        TypeError,
        r"'confidence' supports m2s.Absorbing only.*Chain\(.*use sampler='bayes'",
    ),
    "projection over a chain": (
        call(m2s.Projected(m2s.LogScore(PROCESSES["chain"]))),
        (TypeError, ValueError),
        r"chain",
    ),
    "ordinal masks": (
        call(masked, sampler=m2s.samplers.TauLeaping(ordinal=True)),
        TypeError,
        r"a mask has no place in an order",
    ),
    "a corrector after first hitting": (
        call(masked, sampler=PredictorCorrector(FirstHitting())),
        TypeError,
        r"'first_hitting' reveals sites one after another and takes no corrector",
    ),
    "predictor by name": (lambda: PredictorCorrector("bayes"), TypeError, r"predictor must be a sampler such as"),
    "no corrections": (lambda: PredictorCorrector(corrections=0), ValueError, r"corrections is 0"),
    "strength": (lambda: m2s.samplers.Remasking(strength=1.5), ValueError, r"strength is 1\.5"),
    "clamp of another shape": (call(clamp=torch.zeros(3, 2).long()), ValueError, r"clamp has shape \[3, 2\].*\[2, 3\]"),
    "clamp of one row": (call(clamp=torch.zeros(3).long()), ValueError, r"clamp has shape \[3\].*\[2, 3\]"),
    "clamp of floats": (call(clamp=torch.zeros(2, 3)), TypeError, r"clamp must be a torch.Tensor of integers"),
    "clamp of bools": (call(clamp=torch.zeros(2, 3).bool()), TypeError, r"clamp must be a torch.Tensor of integers"),
    "clamp is a list": (call(clamp=[[0, 0, 0], [0, 0, 0]]), TypeError, r"clamp must be a torch.Tensor of integers"),
    "clamp above the vocabulary": (
        call(clamp=torch.tensor([[0, 0, 0], [0, 5, 0]])),
        ValueError,
        r"clamp\[1, 1\] is 5.*0\.\.4, or -1",
    ),
    "clamp below -1": (call(clamp=torch.tensor([[0, 0, -2], [0, 0, 0]])), ValueError, r"clamp\[0, 2\] is -2"),
    "clamp to the mask": (call(masked, clamp=torch.full((2, 3), K)), ValueError, r"clamp\[0, 0\] is 5.*0\.\.4"),
    "uint8 clamp above the vocabulary": (
        call(clamp=torch.tensor([[0, 255, 0], [0, 0, 0]], dtype=torch.uint8)),
        ValueError,
        r"clamp\[0, 1\] is 255",
    ),
    "condition of another length": (call(condition=torch.zeros(3)), ValueError, r"condition has 3 rows, but 2 samples"),
    "condition is a list": (call(condition=[1, 2]), (TypeError, ValueError), r"condition"),
    "condition is one number": (call(condition=torch.tensor(1)), (TypeError, ValueError), r"condition"),
    "guidance without a condition": (call(guidance=2.0), ValueError, r"guidance is 2\.0, but there is no condition"),
    "guidance is no number": (call(guidance=math.nan, condition=two), ValueError, r"guidance is nan"),
    "infinite guidance": (call(guidance=math.inf, condition=two), ValueError, r"guidance is inf"),
    "guidance on rates for bayes": (
        call(guidance=2.0, guide="rates", condition=two, sampler="bayes"),
        TypeError,
        r"guidance on rates.*sampler 'bayes' draws from a posterior",
    ),
    "guidance on rates for a corrector after bayes": (
        call(guidance=2.0, guide="rates", condition=two, sampler=m2s.samplers.PredictorCorrector(m2s.samplers.Bayes())),
        TypeError,
        r"guidance on rates",
    ),
    "guide": (call(guide="scores"), ValueError, r"guide is 'scores'.*'posterior', 'rates', 'step'"),
    "on": (call(on="score"), ValueError, r"on is 'score'.*'posterior', 'leave_one_out'"),
    "temperature of zero": (call(temperature=0.0), ValueError, r"temperature is 0\.0.*positive.*top_k 1"),
    "negative temperature": (call(temperature=-1.0), ValueError, r"temperature is -1\.0"),
    "temperature is infinite": (call(temperature=10**400), ValueError, r"temperature is 1000"),
    "temperature is text": (call(temperature="1"), ValueError, r"temperature is '1'"),
    "temperature is no number": (call(temperature=math.nan), ValueError, r"temperature is nan"),
    "temperature of an unconstrained score": (
        call(unconstrained, sampler="euler", temperature=0.5),
        TypeError,
        r"temperature is 0\.5, but it sharpens a posterior.*m2s.Projected\(head\)",
    ),
    "top_k 1 of an unconstrained score": (
        call(unconstrained, sampler="euler", top_k=1),
        TypeError,
        r"top_k is 1, but it sharp",
    ),
    "micro_batch above 64 bits": (call(micro_batch=2**63), ValueError, r"micro_batch is 9223372036854775808.*below 2\^63"),
    "top_k of zero": (call(top_k=0), ValueError, r"top_k is 0"),
    "top_k is a float": (call(top_k=2.0), TypeError, r"top_k must be an int, not float"),
    "top_p of zero": (call(top_p=0.0), ValueError, r"top_p is 0\.0.*\(0, 1\]"),
    "top_p above one": (call(top_p=1.5), ValueError, r"top_p is 1\.5"),
    "shape of one number": (call(shape=(3,)), ValueError, r"shape is \(3,\).*\(number of samples, length\)"),
    "shape is a number": (call(shape=3), ValueError, r"shape is 3"),
    "shape of three": (call(shape=(1, 2, 3)), ValueError, r"shape is \(1, 2, 3\)"),
    "no samples": (call(shape=(0, 3)), ValueError, r"shape\[0\] is 0"),
    "no length": (call(shape=(2, 0)), ValueError, r"shape\[1\] is 0"),
    "shape of floats": (call(shape=(2.0, 3)), TypeError, r"shape\[0\] must be an int"),
    "negative seed": (call(seed=-1), ValueError, r"seed is -1.*2\^64"),
    "seed too large": (call(seed=1 << 64), ValueError, r"seed is 18446744073709551616"),
    "seed is a bool": (call(seed=True), ValueError, r"seed is True"),
    "seed is a float": (call(seed=0.5), ValueError, r"seed is 0\.5"),
    "negative start": (call(start=-1), ValueError, r"start is -1.*at least 0"),
    "start is a float": (call(start=1.0), TypeError, r"start must be an int"),
    "too many samples": (call(start=(1 << 32) - 1), ValueError, r"start \+ n is 4294967297.*2\^32"),
    "batch of none": (call(batch_size=0), ValueError, r"batch_size is 0"),
    "micro-batch of none": (call(micro_batch=0), ValueError, r"micro_batch is 0"),
    "window of one": (call(window=1), ValueError, r"window is 1.*at least 2"),
    "window is a float": (call(window=2.5), TypeError, r"window must be an int"),
    "overlap of a full window": (call(window=2, overlap=2), ValueError, r"overlap is 2.*0\.\.1"),
    "negative overlap": (call(window=2, overlap=-1), ValueError, r"overlap is -1"),
    "overlap is a float": (call(window=2, overlap=0.5), (TypeError, ValueError), r"overlap"),
    "overlap without a window": (call(overlap=1), ValueError, r"give window too"),
    "t_min of zero": (call(t_min=0.0), ValueError, r"t_min is 0\.0"),
    "t_min of a half": (call(t_min=0.5), ValueError, r"t_min is 0\.5"),
    "t_min is no number": (call(t_min=math.nan), ValueError, r"t_min is nan"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_invalid_options_raise_before_the_network_is_called(case: str) -> None:
    wrong, error, pattern = BAD[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011  the type is checked below
        wrong()
    assert isinstance(caught.value, error), repr(caught.value)
    assert re.search(pattern, str(caught.value)), repr(caught.value)


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "too few columns": (lambda x: torch.zeros(*x.shape, K - 1), ValueError, r"output has 4 columns, but the process has 5"),
    "too few sites": (lambda x: torch.zeros(len(x), L - 1, K), ValueError, r"output has shape"),
    "too many sites": (lambda x: torch.zeros(len(x), L + 1, K), ValueError, r"output has shape"),
    "too few samples": (lambda x: torch.zeros(len(x) - 1, L, K), ValueError, r"output has shape"),
    "no sites": (lambda x: torch.zeros(len(x), K), ValueError, r"output has shape"),
    "integers": (lambda x: torch.zeros(*x.shape, K).long(), TypeError, r"output must hold floats"),
    "a tuple": (lambda x: (torch.zeros(*x.shape, K),), TypeError, r"output"),
    "last layer too small": (lambda x: m2s.Unprojected(torch.zeros(*x.shape, 8), torch.zeros(4, 8)), ValueError, r"4 rows"),
    "too many hidden sites": (
        lambda x: m2s.Unprojected(torch.zeros(len(x), L + 1, 8), torch.zeros(K, 8)),
        ValueError,
        r"output has shape|hidden has shape",
    ),
}


@pytest.mark.parametrize("rows", [1 << 20, 16, 1], ids=["in one piece", "in pieces", "site by site"])
@pytest.mark.parametrize("case", OUTPUTS, ids=str)
def test_an_output_of_the_wrong_shape_raises(case: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a large vocabulary is processed in chunks: rows must not be assigned to other sites."""
    monkeypatch.setattr(prediction_module, "CPU_CHUNK", rows * K)
    output, error, pattern = OUTPUTS[case]
    for sampler in ("bayes", "euler"):
        with pytest.raises(error, match=pattern):
            run(lambda x_t, t: output(x_t), head, sampler=sampler)


@pytest.mark.parametrize("lazy", [False, True], ids=["logits", "hidden states"])
def test_nan_outputs_raise_in_checked_mode(lazy: bool) -> None:
    def model(x_t: Tensor, t: Tensor) -> Any:
        output = torch.zeros(*x_t.shape, K)
        output[3, 1, 2] = torch.nan
        return m2s.Unprojected(output, torch.eye(K)) if lazy else output

    with m2s.checked(), pytest.raises(ValueError, match=r"output\[3, 1, 2\] is NaN"):
        run(model, head)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (m2s.Posterior(m2s.Uniform(5, m2s.Linear())), "bayes"),
        (m2s.LogScore(m2s.Uniform(5, m2s.Linear())), "analytic"),
        (m2s.FactorizedRate(m2s.RateMatrix.gaussian(5, m2s.Linear())), "tau_leaping"),
        (m2s.Projected(m2s.LogScore(m2s.Uniform(5, m2s.Linear()))), "bayes"),
        (NextToken(Shifted(5)), "autoregressive"),
    ],
    ids=str,
)
def test_default_sampler_depends_on_the_head(head, name):
    """The samples are those of the named sampler."""

    def network(x_t, t, condition=None):
        return torch.sin(torch.arange(head.process.states) + x_t.unsqueeze(-1))

    drawn, named = (m2s.sample(network, head, (3, 4), steps=5, seed=0, **given) for given in ({}, {"sampler": name}))
    assert torch.equal(drawn, named)
    if name == "bayes" and type(head) is m2s.Posterior:
        guided = {"condition": torch.zeros(3), "guidance": 2.0, "guide": "rates", "steps": 5}
        drawn, named = (m2s.sample(network, head, (3, 4), seed=0, **guided, **given) for given in ({}, {"sampler": "analytic"}))
        assert torch.equal(drawn, named)


@pytest.mark.parametrize(
    ("head", "sampling", "audit"),
    [
        (m2s.Posterior(PROCESSES["uniform"]), "bayes", "analytic"),
        (m2s.Posterior(PROCESSES["gaussian"]), "bayes", "euler"),
        (m2s.Posterior(PROCESSES["chain"]), "bayes", "euler"),
        (m2s.LogScore(PROCESSES["absorbing"]), "analytic", "analytic"),
        (m2s.LogScore(PROCESSES["gaussian"]), "tau_leaping", "euler"),
        (NextToken(Shifted(5)), "autoregressive", "autoregressive"),
    ],
    ids=str,
)
def test_default_samplers_of_sampling_and_of_audits(head: m2s.Head, sampling: str, audit: str) -> None:
    assert default_sampler(head) == sampling and default_sampler(head, for_audit=True) == audit


def test_built_options_give_the_same_samples() -> None:
    """`sample_with_options` uses options that were built before, and does not build them again."""
    network, chosen = Rounding(K), head
    options = SamplingOptions(chosen, (3, L), steps=2, seed=4, temperature=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingOptions, "__post_init__", never)
        samples = sample_with_options(network, options)
    assert torch.equal(samples, m2s.sample(network, chosen, (3, L), steps=2, seed=4, temperature=0.5))


# A sampler of a user, registered by one line.


@dataclass(frozen=True)
class Resample(Sampler):
    """Draw every site from the posterior and corrupt it again to time s, `times` times."""

    name = "test_resample"
    needs = (Need.POSTERIOR, Need.RANK_ONE)
    times: int = 1
    """A user's option."""

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Tensor:
        clean = prediction.draw_token(noise("token")).token
        alpha = prediction.process.alpha(move.s).unsqueeze(-1)
        for number in range(self.times):
            other = (noise(2 * number) * prediction.process.vocab).long()
            clean = torch.where(noise(2 * number + 1) < alpha, clean, other)
        return clean


@pytest.fixture
def registered() -> Iterator[None]:
    """Register it for one test: the other tests use the built-in samplers only."""
    SAMPLERS.add("test_resample", Resample)
    yield
    SAMPLERS.remove("test_resample")


@pytest.mark.usefixtures("registered")
def test_a_registered_sampler_of_a_user() -> None:
    """It works by name, with its options, and its needs are checked."""
    network = Rounding(K)
    by_name, by_object, other = (
        m2s.sample(network, head, (3, L), steps=3, sampler=sampler, seed=0)
        for sampler in ("test_resample", Resample(), make_sampler("test_resample", times=3))
    )
    assert torch.equal(by_name, by_object) and not torch.equal(by_name, other) and int(other.max()) < K
    with pytest.raises(TypeError, match=r"'test_resample' draws from a posterior.*use sampler='analytic'"):
        m2s.sample(never, unconstrained, (3, L), sampler="test_resample")
    with pytest.raises(TypeError, match=r"'test_resample' supports rank-one processes.*use sampler='bayes'"):
        m2s.sample(never, m2s.Posterior(PROCESSES["gaussian"]), (3, L), sampler="test_resample")
    with pytest.raises(ValueError, match="sites is 2, but sampler 'test_resample' does not read it"):
        make_sampler("test_resample", sites=2)
    with pytest.raises(ValueError, match="already a sampler named 'test_resample'"):
        SAMPLERS.add("test_resample", Bayes)


def flags() -> dict[str, object]:
    """Global settings of torch that a library could change."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "benchmark": torch.backends.cudnn.benchmark,
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "random": torch.random.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("fails", [False, True], ids=["to the end", "with an error"])
def test_sampling_changes_neither_the_model_nor_global_settings(fails: bool) -> None:
    """All attributes of the user's model, its weights and torch's settings are as before, also after an error."""
    model = m2s.models.DiT(m2s.models.DiTConfig(K, width=16, depth=1, heads=2)).train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    settings = flags()

    def callback(step: m2s.samplers.StepEvent) -> None:
        if fails and step.number == 1:
            raise KeyboardInterrupt

    prepared = InferenceModel(model, 1 << 20, bf16=True)  # so many states that the last layer is left out
    for network in (model, prepared):
        with contextlib.suppress(KeyboardInterrupt):
            m2s.sample(network, head, (2, 3), steps=3, callback=callback, seed=0)
        assert flags() == settings
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_numbers_may_be_integers_that_int64_does_not_hold() -> None:
    drawn = [m2s.sample(Rounding(K), head, (3, L), steps=2, seed=4, temperature=value) for value in (10**30, 1e30)]
    assert torch.equal(*drawn)
