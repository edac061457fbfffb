"""Invalid arguments of the library raise errors that name the argument and the value."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s import validation

pytestmark = pytest.mark.usefixtures("without_shape_hook")

K, B, L = 5, 2, 3


uniform = m2s.Uniform(K, m2s.Linear())
absorbing = m2s.Absorbing(K, m2s.Linear())
head = m2s.Posterior(uniform)
x = torch.ones(B, L, dtype=torch.long)
t = torch.full((B,), 0.5)
output = torch.zeros(B, L, K)
score = torch.ones(B, L, K)
big = x.clone()
big[1, 2] = 7
negative = x.clone()
negative[0, 1] = -1
late = torch.tensor([0.5, 1.5])
ends = torch.tensor([0.0, 0.5])
square = torch.tensor([[-1.0, 1.0], [2.0, -2.0]])
uneven = torch.tensor([[-1.0, 1.0], [2.0, -2.5]])
wrong_sign = torch.tensor([[1.0, -1.0], [2.0, -2.0]])


def half(value: float, at: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    out = like.clone()
    out[at] = value
    return out


CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "token too large in corrupt": (lambda: uniform.corrupt(big, t), ValueError, r"x_0\[1, 2\] is 7, .* 0\.\.4"),
    "token too small in corrupt": (lambda: uniform.corrupt(negative, t), ValueError, r"x_0\[0, 1\] is -1, .* 0\.\.4"),
    "mask as a clean token": (lambda: absorbing.corrupt(x * 5, t), ValueError, r"x_0\[0, 0\] is 5, .* 0\.\.4"),
    "noisy token too large": (lambda: m2s.score_entropy(head, output, x, big, t), ValueError, r"x_t\[1, 2\] is 7"),
    "a single number in elbo": (lambda: m2s.elbo(lambda x, t: x, head, x[0, 0]), ValueError, r"x_0 must be a batch of seq"),
    "audit in batches of 1.5": (lambda: m2s.audit(len, head, (2, 3), batch_size=1.5), TypeError, "batch_size must be an int"),
    "a subnormal time": (lambda: m2s.score_entropy(head, output, x, x, t * 0 + 1e-44), ValueError, r"must lie in \(0, 1\)"),
    "negative posterior": (
        lambda: m2s.leave_one_out_from_posterior(-torch.ones(B, L, K), x, t, uniform),
        ValueError,
        r"posterior\[0, 0, 0\] is -1, but it must not be negative",
    ),
    "clean token too large": (lambda: m2s.score_entropy(head, output, big, x, t), ValueError, r"x_0\[1, 2\] is 7"),
    "tokens are floats": (lambda: uniform.corrupt(x.float(), t), TypeError, r"x_0 must hold integers.*torch.float32"),
    "tokens are a list": (lambda: uniform.corrupt([[1, 2]], t), TypeError, r"x_0 must be a torch.Tensor.*list"),
    "time above one": (lambda: uniform.corrupt(x, late), ValueError, r"t\[1\] is 1\.5, .*\[0, 1\]"),
    "time at an end of the loss": (lambda: m2s.score_entropy(head, output, x, x, ends), ValueError, r"t\[0\] is 0, .*\(0, 1\)"),
    "time is an integer": (lambda: uniform.corrupt(x, torch.tensor([0, 1])), TypeError, r"t must hold floats.*int64"),
    "time is a number": (lambda: uniform.corrupt(x, 0.5), TypeError, r"t must be a torch.Tensor.*float"),
    "time of the wrong length": (lambda: uniform.corrupt(x, torch.full((3,), 0.5)), ValueError, r"t has shape \[3\].*\[2, 3\]"),
    "clean and noisy differ": (
        lambda: m2s.score_entropy(head, output, x[:1], x, t),
        ValueError,
        r"x_0 has shape \[1, 3\].*\[2, 3\]",
    ),
    "too few columns": (lambda: head.posterior(output[..., :3], x, t), ValueError, r"output has 3 columns.*5 states"),
    "no column for the mask": (
        lambda: m2s.Posterior(absorbing).posterior(output, x, t),
        ValueError,
        r"output has 5 columns.*6 states",
    ),
    "output of the wrong sites": (
        lambda: head.posterior(output[:, :2], x, t),
        ValueError,
        r"output has shape \[2, 2, 5\].*\[2, 3, 5\]",
    ),
    "integer output": (lambda: head.posterior(output.long(), x, t), TypeError, r"output must hold floats.*int64"),
    "score with another vocabulary": (
        lambda: m2s.project(torch.ones(B, L, 6), x, t, uniform),
        ValueError,
        r"score has 6 columns.*5 states",
    ),
    "NaN logits": (lambda: head.posterior(half(torch.nan, (0, 1, 3), output), x, t), ValueError, r"output\[0, 1, 3\] is NaN"),
    "NaN logits in the loss": (
        lambda: m2s.score_entropy(head, half(torch.nan, (1, 0, 2), output), x, x, t),
        ValueError,
        r"output\[1, 0, 2\] is NaN",
    ),
    "rates that do not sum to zero": (
        lambda: m2s.RateMatrix(uneven, m2s.Linear()),
        ValueError,
        r"row 1 of rates sums to -0\.5",
    ),
    "negative rates": (lambda: m2s.RateMatrix(wrong_sign, m2s.Linear()), ValueError, r"rates\[0, 1\] is -1, .*negative"),
    "rates not square": (lambda: m2s.RateMatrix(square[:1], m2s.Linear()), ValueError, r"rates must be a square.*\[1, 2\]"),
    "rates not finite": (lambda: m2s.RateMatrix(square * torch.inf, m2s.Linear()), ValueError, r"rates\[0, 0\] is not finite"),
    "rates of integers": (lambda: m2s.RateMatrix(square.long(), m2s.Linear()), TypeError, r"rates must hold floats"),
    "negative birth rate": (
        lambda: m2s.RateMatrix.birth_death(torch.tensor([1.0, -2.0]), torch.ones(2), m2s.Linear()),
        ValueError,
        r"birth\[1\] is -2",
    ),
    "support condition": (
        lambda: m2s.score_from_posterior(torch.full((B, L, K + 1), 1 / 6), x, t, absorbing),
        ValueError,
        r"posterior\[0, 0, 0\] is 0\.166667, but P_t\(x_t = 1 \| 0\) = 0 at t = 0\.5: the support condition",
    ),
    "noisy token that cannot come from the clean one": (
        lambda: m2s.score_entropy(m2s.Posterior(absorbing), torch.zeros(B, L, K + 1), x * 0, x, t),
        ValueError,
        r"x_t\[0, 0\] is 1, which cannot come from x_0\[0, 0\] = 0",
    ),
    "chain rows": (lambda: m2s.Chain(torch.full((1, 2, 2), 0.4)), ValueError, r"row 0 of matrices\[0\] sums to 0\.8"),
    "chain negative": (
        lambda: m2s.Chain(torch.tensor([[[1.5, -0.5], [0.5, 0.5]]])),
        ValueError,
        r"matrices\[0, 0, 1\] is -0\.5",
    ),
    "score entropy of a chain": (
        lambda: m2s.score_entropy(m2s.Posterior(m2s.Chain.uniform(K, torch.full((4,), 0.1))), output, x, x, t),
        ValueError,
        r"a finite chain has no rates",
    ),
    "vocabulary of one": (lambda: m2s.Uniform(1, m2s.Linear()), ValueError, r"vocab is 1.*at least 2"),
    "vocabulary not an integer": (lambda: m2s.Uniform(2.5, m2s.Linear()), TypeError, r"vocab must be an int, not float"),
    "schedule forgotten": (
        lambda: m2s.Uniform(5, m2s.Linear),
        TypeError,
        r"schedule must be a schedule such as m2s.Linear\(\)",
    ),
    "p_uniform of one": (lambda: m2s.Hybrid(5, p_uniform=1.0), ValueError, r"p_uniform is 1\.0.*use m2s.Uniform"),
    "horizon": (lambda: m2s.Exponential(horizon=-1.0), ValueError, r"horizon is -1\.0.*positive"),
    "eps": (lambda: m2s.LogLinear(eps=2.0), ValueError, r"eps is 2\.0"),
    "sigma order": (lambda: m2s.Geometric(sigma_min=2.0, sigma_max=1.0), ValueError, r"sigma_min is 2\.0.*sigma_max = 1\.0"),
    "box at an end of time": (lambda: m2s.box(x, ends, uniform), ValueError, r"t\[0\] is 0, .*\(0, 1\)"),
    **{
        f"log-score given to {function.__name__}": (
            lambda function=function: function(half(-0.7, (0, 0, 3), score), x, t, uniform),
            ValueError,
            r"score\[0, 0, 3\] is -0\.7, but a score is a ratio of probabilities: is this log s\? give score\.exp\(\)",
        )
        for function in (m2s.classify, m2s.diagnose, m2s.project, m2s.affine_inverse)
    },
    "projection at an end of time": (lambda: m2s.project(score, x, ends, uniform), ValueError, r"t\[0\] is 0, .*\(0, 1\)"),
    "head in place of a process": (lambda: m2s.project(score, x, t, head), TypeError, r"process must be a process such as"),
    "process in place of a head": (
        lambda: m2s.score_entropy(uniform, output, x, x, t),
        TypeError,
        r"head must be a head such as m2s.Posterior\(process\), not Uniform",
    ),
    "earlier time of another shape": (
        lambda: m2s.diagnose(score, x, t, uniform, s=torch.tensor([0.1])),
        ValueError,
        r"s has shape \[1\].*\[2\]",
    ),
    "analytic step in a diagnosis of a rate matrix": (
        lambda: m2s.diagnose(score, x, t, m2s.RateMatrix.uniform(K, m2s.Linear()), s=t / 2),
        TypeError,
        r"the analytic step to s is for rank-one processes",
    ),
    "offset": (lambda: m2s.Posterior(uniform, offset="half"), ValueError, r"offset is 'half'.*one of 'none', 'exact'"),
    "head over nothing": (lambda: m2s.LogScore("uniform"), TypeError, r"process must be a process such as"),
    "masked loss over uniform": (
        lambda: m2s.masked_cross_entropy(head, output, x, x, t),
        TypeError,
        r"the masked objective is for m2s.Posterior over m2s.Absorbing, not for Posterior\(Uniform",
    ),
    "last layer does not fit": (
        lambda: m2s.Unprojected(torch.zeros(B, L, 8), torch.zeros(K, 7)),
        ValueError,
        r"weight has shape \[5, 7\], but hidden has shape \[2, 3, 8\]: expected \[columns, features\]",
    ),
    "last layer too small": (
        lambda: head.posterior(m2s.Unprojected(torch.zeros(B, L, 8), torch.zeros(4, 8)), x, t),
        ValueError,
        r"weight has 4 rows.*5 states",
    ),
    "reverse step forwards": (
        lambda: m2s.bayes_probabilities(score / K, x, t + 0.1, t, uniform),
        ValueError,
        r"s\[0\] is 0\.6, but it must not lie above t\[0\] = 0\.5",
    ),
    "analytic step of a rate matrix": (
        lambda: m2s.analytic_weights(score, x, t / 2, t, m2s.RateMatrix.uniform(K, m2s.Linear())),
        TypeError,
        r"the analytic predictor is for rank-one processes",
    ),
    "passes": (lambda: m2s.elbo(lambda x_t, t: output, head, x, passes=0), ValueError, r"passes is 0.*at least 1"),
    "t_min": (lambda: m2s.elbo(lambda x_t, t: output, head, x, t_min=0.7), ValueError, r"t_min is 0\.7"),
    "interval of times": (lambda: m2s.stratified_times(4, 0.5, 0.2), ValueError, r"\[0\.5, 0\.2\)"),
    "site weight": (
        lambda: m2s.Objective(lambda x_t, t: output, head)(x, t, weight=torch.ones(B)),
        ValueError,
        r"weight has shape \[2\].*\[2, 3\]",
    ),
    "projection of a large tabulated process": (
        lambda: m2s.project(torch.ones(1, 1, 300), x[:1, :1], t[:1], m2s.RateMatrix.uniform(300, m2s.Linear())),
        ValueError,
        r"up to 256 tokens.*300",
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_names_argument_and_value(case: str) -> None:
    call, error, pattern = CASES[case]
    with m2s.checked(), pytest.raises(error) as caught:
        call()
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert isinstance(caught.value, TypeError) == (error is TypeError)  # a wrong type or a wrong value, not both


def test_nan_is_checked_in_checked_mode_only() -> None:
    broken = half(torch.nan, (0, 0, 0), output)
    assert head.posterior(broken, x, t)[0, 0].isnan().all()
    with m2s.checked(), pytest.raises(ValueError, match="NaN"):
        head.posterior(broken, x, t)
    with m2s.checked(), m2s.checked(False):
        assert head.posterior(broken, x, t)[0, 0].isnan().all()


@pytest.mark.parametrize("process", [uniform, m2s.RateMatrix.uniform(K, m2s.Linear())], ids=["rank-one", "tabulated"])
def test_nan_and_infinite_scores_are_outside_the_box(process: m2s.Process) -> None:
    for value in (torch.nan, torch.inf):
        broken = half(value, (0, 1, 3), score).double()
        classes = m2s.classify(broken, x, t.double(), process)
        assert classes[0, 1] == 0 and (classes.flatten()[[0, 2, 3, 4, 5]] == 3).all()


CLASSIFIERS = (m2s.classify, m2s.diagnose, m2s.project, m2s.affine_inverse)


@pytest.mark.parametrize("function", CLASSIFIERS, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    "process", [uniform, absorbing, m2s.RateMatrix.uniform(K, m2s.Linear())], ids=["uniform", "absorbing", "tabulated"]
)
def test_log_scores_are_an_error_on_the_cpu(function: Callable, process: m2s.Process) -> None:
    """SEDD's network returns log s, all of which would count as unrealizable: an error on the CPU without checked mode too."""
    free, noisy, said = m2s.LogScore(process), torch.full((B, L), process.states - 1), torch.randn(B, L, process.states)
    log_score = free.log_score(said, noisy, t)
    for wrong in (log_score, log_score.half(), log_score.where(log_score > -1, -torch.inf)):
        with pytest.raises(ValueError, match=r"score\[\d, \d, \d\] is -.* is this log s\?"):
            function(wrong, noisy, t, process)
    function(log_score.exp(), noisy, t, process)


@pytest.mark.parametrize("function", CLASSIFIERS, ids=lambda function: function.__name__)
def test_rounding_errors_and_the_entry_at_the_current_token_are_ignored(function: Callable) -> None:
    for harmless in (half(-1e-7, (0, 0, 3), score), half(-3.0, (0, 0, 1), score), half(-1e-2, (0, 0, 3), 1e4 * score)):
        function(harmless, x, t, uniform)


def test_accelerator_scores_are_checked_in_checked_mode_only() -> None:
    """Reading a value of a tensor on `meta` raises an error."""
    away = torch.empty(B, L, K, device="meta")
    validation.score("score", away, x)
    with m2s.checked(), pytest.raises((RuntimeError, NotImplementedError)):
        validation.score("score", away, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_small_integer_dtypes(dtype: torch.dtype) -> None:
    """A vocabulary that fills the dtype, with a mask beyond it: no value wraps around."""
    vocab = 256 if dtype == torch.uint8 else 300
    tokens = torch.tensor([[0, 1, 255]])
    for process in (m2s.Uniform(vocab, m2s.Linear()), m2s.Absorbing(vocab, m2s.Linear()), m2s.Hybrid(vocab, p_uniform=0.1)):
        generator = torch.Generator().manual_seed(0)
        noisy = process.corrupt(tokens.to(dtype), t[:1], generator)
        assert torch.equal(noisy, process.corrupt(tokens, t[:1], torch.Generator().manual_seed(0)))
        logits = torch.randn(1, 3, process.states)
        for some in (m2s.Posterior(process, offset="exact"), m2s.LogScore(process)):
            loss = m2s.score_entropy(some, logits, tokens.to(dtype), tokens.to(dtype), t[:1])
            assert torch.equal(loss, m2s.score_entropy(some, logits, tokens, tokens, t[:1]))
            assert torch.equal(some.posterior(logits, tokens.to(dtype), t[:1]), some.posterior(logits, tokens, t[:1]))
        assert torch.equal(m2s.box(tokens.to(dtype), t[:1], process)[1], m2s.box(tokens, t[:1], process)[1])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize(
    "process", [uniform, absorbing, m2s.RateMatrix.uniform(K, m2s.Linear())], ids=lambda p: type(p).__name__
)
def test_empty_input_gives_empty_output(process: m2s.Process, shape: tuple[int, int]) -> None:
    none, times = torch.zeros(shape, dtype=torch.long), torch.full(shape[:1], 0.5)
    values = torch.zeros(*shape, process.states, requires_grad=True)
    assert process.corrupt(none, times).shape == shape
    for some in (m2s.Posterior(process), m2s.LogScore(process), m2s.FactorizedRate(process)):
        loss = m2s.score_entropy(some, values, none, none, times)
        assert loss.shape == shape
        loss.sum().backward()
    assert m2s.project(values.detach(), none, times, process).shape == values.shape
    assert m2s.classify(values.detach(), none, times, process).shape == shape


def test_network_receives_times_in_the_default_dtype() -> None:
    """`stratified_times` are float64; `Objective` and `elbo` convert them for a float32 network."""
    seen = []

    def network(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(t.dtype)
        return output

    m2s.Objective(network, head)(x, m2s.stratified_times(B, 1e-3, 0.999))
    m2s.elbo(network, head, x)
    assert set(seen) == {torch.get_default_dtype()}


def test_padding_columns_of_the_output_are_ignored() -> None:
    """Columns beyond the states have no effect."""
    padded = torch.cat([torch.randn(B, L, K), torch.full((B, L, 3), torch.inf)], -1)
    assert torch.equal(head.posterior(padded, x, t), head.posterior(padded[..., :K], x, t))
    assert m2s.score_entropy(head, padded, x * 0, x, t).isfinite().all()


def test_unprojected_is_accepted_wherever_an_output_is() -> None:
    hidden, weight, bias = torch.randn(B, L, 8), torch.randn(K + 3, 8), torch.randn(K + 3)
    lazy, eager = m2s.Unprojected(hidden, weight, bias), hidden @ weight.T + bias
    for some in (head, m2s.LogScore(uniform), m2s.FactorizedRate(uniform)):
        assert torch.allclose(some.log_score(lazy, x, t), some.log_score(eager, x, t), atol=1e-5)
        assert torch.allclose(
            m2s.score_entropy(some, lazy, x * 0, x, t), m2s.score_entropy(some, eager, x * 0, x, t), rtol=1e-4
        )
    half_precision = m2s.Unprojected(hidden.bfloat16(), weight.bfloat16())
    assert head.posterior(half_precision, x, t).dtype == torch.float32


@pytest.mark.parametrize("kind", [m2s.Uniform, m2s.Absorbing])
def test_missing_schedule_error_has_an_example(kind):
    with pytest.raises(TypeError) as error:
        kind(10)
    advice = re.search(r"m2s\.\w+\(10, m2s\.\w+\(\)\)", str(error.value))
    assert advice is not None and "_Scheduled" not in str(error.value)
    assert isinstance(eval(advice[0]), kind)


class Table(nn.Module):
    """A network whose embedding has the given name."""

    def __init__(self, rows: int, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Embedding(rows, 11))
        self.name = name

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        return getattr(self, self.name)(x_t)


def test_network_without_an_embedding_of_the_mask():
    head = m2s.Posterior(m2s.Absorbing(10, m2s.Linear()))
    x_0, t = torch.zeros(2, 8, dtype=torch.long), torch.full((2,), 0.9)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=r"has 10 rows: .* process.states = 11 states, 0\.\.10, the last one the mask"):
        m2s.Objective(Table(10, "embedding"), head)
    with pytest.raises(IndexError, match=r"process.states = 11 states, 0\.\.10, the last one the mask") as error:
        m2s.Objective(Table(10, "tokens"), head, generator=generator)(x_0, t)
    assert isinstance(error.value.__cause__, IndexError)
    for name in ("embedding", "tokens"):
        assert m2s.Objective(Table(11, name), head, generator=generator)(x_0, t).shape == x_0.shape


NETWORK = m2s.models.DiT(m2s.models.DiTConfig(states=K, width=8, depth=1, heads=2))


@pytest.mark.parametrize(
    "call",
    [
        lambda: m2s.sample(head, NETWORK, (2, 3)),
        lambda: m2s.Objective(head, NETWORK),
        lambda: m2s.elbo(head, NETWORK, x),
        lambda: m2s.save("nowhere", head, NETWORK),
    ],
)
def test_a_swapped_network_and_head_are_named_by_their_types(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="the network comes first and the head second") as raised:
        call()
    assert "Embedding" not in str(raised.value) and len(str(raised.value)) < 200


@pytest.mark.parametrize("call", [m2s.Objective(NETWORK, head), lambda x_0: m2s.elbo(NETWORK, head, x_0)])
def test_one_sequence_is_no_batch(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"^x_0 has shape \[3\], but it must be \[samples, positions\].*x_0\[None\]"):
        call(x[0])
    with pytest.raises(ValueError, match=r"^x_0 has shape \[2, 3, 1\], .*x_0.reshape\(len\(x_0\), -1\)"):
        call(x.unsqueeze(-1))
