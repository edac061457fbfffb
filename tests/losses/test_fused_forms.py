"""The fused form of every training loss is the loss itself: values and gradients, through the last layer.

In float64 the torch code of the row losses runs. In float32 the kernels run, without a GPU in Triton's interpreter.
"""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import m2s
from m2s.heads import Head, NextToken
from m2s.heads.next_token import Shifted
from m2s.losses import gidd_clipped, weighted_sum
from m2s.losses.registry import LOSSES, Loss, fused_spec, has_fused_form
from m2s.ops import linear_loss, use_backend
from m2s.ops.last_layer import Unprojected

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSES = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "log-linear": lambda vocab: m2s.Uniform(vocab, m2s.LogLinear()),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Cosine()),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, 0.3),
    "masks": lambda vocab: m2s.Hybrid(vocab, 0.0),
}
EXACT = functools.partial(m2s.Posterior, offset="exact")
RANK_ONE = list(PROCESSES)
HEADS = {  # by the name of the loss: kinds of heads, and processes
    "score-entropy": ([m2s.Posterior, EXACT, m2s.LogScore, m2s.FactorizedRate], RANK_ONE),
    "masked": ([m2s.Posterior], ["absorbing", "masks"]),
    "noised": ([EXACT], ["uniform", "log-linear"]),
    "gidd": ([m2s.Posterior, EXACT], RANK_ONE),
    "gidd-clipped": ([EXACT], RANK_ONE),
    "udlm": ([m2s.Posterior, EXACT], ["uniform", "log-linear"]),
    "path-kl": ([m2s.FactorizedRate], RANK_ONE),
    "likelihood": ([NextToken], ["shifted"]),
}
CASES = {
    f"{loss}, {process}, {number}": (loss, kind, process)
    for loss, (kinds, processes) in HEADS.items()
    for number, kind in enumerate(kinds)
    for process in processes
}


def parts(case: str, vocab: int, max_weight: float = 1.0) -> tuple[Loss, Head]:
    """The loss and the head of a case."""
    name, kind, process = CASES[case]
    loss = LOSSES[name].function
    if loss is gidd_clipped:
        loss = functools.partial(loss, max_weight=max_weight)
    return loss, kind(Shifted(vocab) if process == "shifted" else PROCESSES[process](vocab))


def problem(
    head: Head, shape: tuple[int, int], t: torch.Tensor, padding: int, scale: float, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Tokens and times, weights with zeros, and the leaves of a last layer of a padded vocabulary, in float64.

    A third of the positions keep their token, and as many are masked where there is a mask.
    """
    rng = torch.Generator().manual_seed(seed)
    process = head.process
    x_0 = torch.randint(process.vocab, shape, generator=rng)
    x_t = process.corrupt(x_0, t, rng)
    if process.has_transitions:
        third = torch.randint(3, shape, generator=rng)
        x_t = x_t.where(third != 0, x_0)
        x_t = x_t if process.mask is None else x_t.masked_fill(third == 1, process.mask)
    weight = torch.rand(shape, generator=rng, dtype=torch.float64)
    weight = weight.where(torch.rand(shape, generator=rng) < 0.8, 0)
    columns, width = process.states + padding, 4
    shapes = ((*shape, width), (columns, width), (columns,))
    leaves = [torch.randn(one, generator=rng, dtype=torch.float64) for one in shapes]
    leaves[1] *= scale
    leaves[2][process.states :] = 50.0  # columns that a softmax must not see
    return [x_0, x_t, t], weight, [leaf.requires_grad_() for leaf in leaves]


def truth(loss: Loss, head: Head, tokens: list[torch.Tensor], weight: torch.Tensor, leaves: list[torch.Tensor]):
    """The losses of the logits, and the gradients of their weighted sum, by autograd."""
    hidden, last, bias = leaves
    losses = loss(head, hidden @ last.t() + bias, *tokens)
    return losses.detach(), torch.autograd.grad((losses * weight).sum(), leaves)


def assert_equal_gradients(found, wanted, near: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        size = max(1.0, float(torch.linalg.vector_norm(other)))
        assert float(torch.linalg.vector_norm(one - other)) <= near * size


def test_every_fused_form_is_tested() -> None:
    assert {name for name, entry in LOSSES.items() if entry.fused} == set(HEADS)
    assert all(has_fused_form(*parts(case, 5)) for case in CASES)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15, deadline=None)
@given(
    vocab=st.integers(2, 40),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    padding=st.integers(0, 7),
    scale=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    ends=st.sampled_from([(0.05, 0.95), (1e-3, 0.01), (0.99, 0.999)]),
    max_weight=st.sampled_from([0.2, 1.0, 50.0, math.inf]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_in_float64(case, vocab, shape, padding, scale, ends, max_weight, seed):
    """Per position and as a weighted sum, for all shapes, padded vocabularies, masks and times."""
    loss, head = parts(case, vocab, max_weight)
    t = torch.linspace(*ends, shape[0], dtype=torch.float64)
    tokens, weight, leaves = problem(head, shape, t, padding, scale, seed)
    expected, slopes = truth(loss, head, tokens, weight, leaves)
    spec, (x_0, x_t, _) = fused_spec(loss, head, *tokens), tokens
    with use_backend("reference"):
        losses = linear_loss.per_position(Unprojected(*leaves), x_t, x_0, spec)
        general = torch.autograd.grad((losses * weight).sum(), leaves)
        value, terms = linear_loss.weighted_sum(Unprojected(*leaves), x_t, x_0, spec, weight)
        summed = torch.autograd.grad(value, leaves)
    near = 1e-10  # the forms of GIDD and UDLM cancel a few digits at these times
    assert ((losses - expected).abs() <= near * expected.clamp(min=1)).all()
    assert ((terms - weight * expected).abs() <= near * expected.clamp(min=1)).all()
    assert_equal_gradients(general, slopes, near)
    assert_equal_gradients(summed, slopes, near)


@pytest.mark.parametrize(("vocab", "padding"), [(2, 3), (33, 0)])
@pytest.mark.parametrize("case", CASES)
def test_kernels(case, vocab, padding):
    """The weighted sum of training by the kernels in float32, against the loss of the same logits in float64."""
    pytest.importorskip("triton")
    loss, head = parts(case, vocab)
    t = torch.tensor([0.01, 0.3, 0.7, 0.99], dtype=torch.float64)
    tokens, weight, leaves = problem(head, (4, 3), t, padding, 1.0, vocab)
    rounded = [leaf.detach().float() for leaf in leaves]
    expected, slopes = truth(loss, head, tokens, weight, [leaf.double().requires_grad_() for leaf in rounded])
    here = [leaf.to(DEVICE).requires_grad_() for leaf in rounded]
    with use_backend("fused"):
        output, on_device = Unprojected(*here), [value.to(DEVICE) for value in tokens]
        value, terms = weighted_sum(loss, head, output, *on_device, weight.to(DEVICE))
        gradients = torch.autograd.grad(value, here)
    difference = (terms.double().cpu() - weight * expected).abs()
    assert (difference <= 1e-5 * (weight * expected).clamp(min=0.1)).all()
    assert_equal_gradients([gradient.double().cpu() for gradient in gradients], slopes, 2e-5)


def test_a_form_that_a_head_lacks_is_none() -> None:
    """A tabulated process and an ordinal head have no fused form."""
    tabulated = m2s.RateMatrix.gaussian(5, m2s.Linear())
    assert not has_fused_form(LOSSES["path-kl"].function, m2s.FactorizedRate(tabulated))
    for name in ("gidd", "gidd-clipped", "udlm"):
        assert not has_fused_form(LOSSES[name].function, m2s.Ordinal(m2s.Uniform(5, m2s.Linear())))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("gidd", m2s.LogScore(m2s.Uniform(5, m2s.Linear()))),
        ("gidd-clipped", m2s.Posterior(m2s.RateMatrix.gaussian(5, m2s.Linear()))),
        ("udlm", m2s.Posterior(m2s.Hybrid(5, 0.1))),
        ("path-kl", m2s.Posterior(m2s.Uniform(5, m2s.Linear()))),
        ("likelihood", m2s.Posterior(m2s.Uniform(5, m2s.Linear()))),
    ],
)
def test_other_heads_are_errors(name, head):
    """A fused form is for the heads of its loss alone."""
    with pytest.raises(TypeError, match=r"is for m2s\."):
        has_fused_form(LOSSES[name].function, head)
