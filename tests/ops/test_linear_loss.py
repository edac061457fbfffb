"""Row losses on both backends against the definition in float64 with autograd, alone and together with the last layer.

Without a GPU the kernels run in Triton's interpreter, in float32: rounding of the operands to bf16 is not tested there.
"""

import math

import pytest
import torch

import m2s
from m2s.losses import weighted_sum
from m2s.ops import backend, last_layer_chunks, linear_loss, use_backend
from m2s.ops.factorized_entropy import row_scalars as factorized_scalars
from m2s.ops.last_layer import Unprojected
from m2s.ops.posterior_entropy import row_scalars as posterior_scalars
from m2s.ops.score_entropy import row_scalars as score_scalars

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROCESSES = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "uniform-loglinear": lambda vocab: m2s.Uniform(vocab, m2s.LogLinear()),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, 0.2),
}
SHAPES = [(2, 5), (3, 1), (257, 7), (1001, 3)]


def sites(name, vocab, count, kind, seed=0):
    """Noisy and clean tokens at times across the interval, a third of them unchanged, and their row scalars."""
    generator = torch.Generator().manual_seed(seed)
    process = PROCESSES[name](vocab)
    t = torch.linspace(2e-3, 0.998, count, dtype=torch.float64)
    x_0 = torch.randint(vocab, (count, 1), generator=generator)
    x_t = process.corrupt(x_0, t, generator)
    x_t[::3] = torch.where(torch.tensor(name == "absorbing"), process.vocab, x_0[::3])
    site = process.at(x_t, t)
    if kind == "posterior_entropy":
        head = m2s.Posterior(process, offset="exact" if seed % 2 else "none")
        scalars = posterior_scalars(head.offset_at_current_token(x_t, t), site)
    elif kind == "score_entropy":
        head, scalars = m2s.LogScore(process), score_scalars(x_0, x_t, site)
    elif kind == "factorized_entropy":
        head, scalars = m2s.FactorizedRate(process), factorized_scalars(x_0, x_t, site, vocab, process.mask)
    else:
        head = m2s.Posterior(process)
        rate = -process.schedule.alpha_prime(t) / process.schedule.beta(t)
        scalars = torch.where(x_t.squeeze(-1) == process.vocab, rate, 0).unsqueeze(0)
    return head, x_0, x_t, t, scalars


def cases():
    """Row loss, process, vocabulary and number of rows."""
    for vocab, count in SHAPES:
        for name in PROCESSES:
            if name != "absorbing":  # that is cross_entropy
                yield "posterior_entropy", name, vocab, count
            yield "score_entropy", name, vocab, count
            yield "factorized_entropy", name, vocab, count
        yield "cross_entropy", "absorbing", vocab, count
    yield "posterior_entropy", "uniform", 50257, 2
    yield "posterior_entropy", "hybrid", 50257, 1
    yield "score_entropy", "uniform", 50257, 1
    yield "factorized_entropy", "uniform", 50257, 2
    yield "factorized_entropy", "hybrid", 50257, 1
    yield "cross_entropy", "absorbing", 50257, 1


def exact(kind, head, logits, x_0, x_t, t, weight):
    """The losses by the definition, and the gradient of their weighted sum, in float64 with autograd."""
    logits = logits.double().requires_grad_()
    if kind == "cross_entropy":
        found = m2s.masked_cross_entropy(head, logits[:, None], x_0, x_t, t)
    else:
        log_score = head.log_score(logits[:, None], x_t, t)
        process = head.process
        row = process.rows(x_0, t)
        ratio = row / row.gather(-1, x_t.unsqueeze(-1))
        at_current = torch.zeros_like(ratio, dtype=torch.bool).scatter(-1, x_t.unsqueeze(-1), True)
        score = torch.where(at_current, 1, log_score.exp())
        logs = torch.where(at_current | (ratio == 0), 0, log_score - torch.log(torch.where(ratio == 0, 1, ratio)))
        terms = torch.where(ratio == 0, score, score - ratio - ratio * logs)
        found = (process.rates_into(x_t, t) * torch.where(at_current, 0, terms)).sum(-1)
    found = found.squeeze(-1)
    (gradient,) = torch.autograd.grad((found * weight).sum(), logits)
    return found.detach(), gradient


@pytest.mark.parametrize(
    ("kind", "name", "vocab", "count"), [pytest.param(*case, id="-".join(map(str, case))) for case in cases()]
)
def test_rows_against_the_definition(kind, name, vocab, count):
    """Losses to 1e-5 of their size or 1e-6 nats, gradients to 1e-5 of the norm of their row.

    Columns past the states hold NaN and do not matter.
    """
    head, x_0, x_t, t, scalars = sites(name, vocab, count, kind, seed=vocab % 5)
    states = head.process.states
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(count, states, generator=generator) - (math.log(vocab) if kind == "score_entropy" else 0)
    weight = torch.rand(count, generator=generator, dtype=torch.float64)
    weight[0] = 0
    expected_loss, slope = exact(kind, head, logits, x_0, x_t, t, weight)
    wide = torch.full((count, states + 5), float("nan"))
    wide[:, :states] = logits
    given = [value.to(DEVICE) for value in (wide, x_t.reshape(-1), x_0.reshape(-1), scalars)]
    for name in ("reference", "fused"):
        with use_backend(name):
            operation = backend.load_op(kind, name == "fused")
            rest = (*operation.prepare(*given[1:]), head.process.mask is not None, vocab)
            value, none = operation.row_losses(given[0], *rest, None, torch.float32)
            loss, gradient = operation.row_losses(given[0].clone(), *rest, weight.to(DEVICE), torch.float32)
        assert none is None
        # with and without a gradient the kernel is compiled separately, and multiply-adds may be contracted differently
        torch.testing.assert_close(value, loss, rtol=0 if DEVICE == "cpu" else 1e-9, atol=0)
        loss, gradient = loss.double().cpu(), gradient.double().cpu()
        assert ((loss - expected_loss).abs() <= 1e-5 * expected_loss.clamp(min=1e-1)).all(), (name, loss, expected_loss)
        assert (gradient[:, states:] == 0).all()
        size = torch.linalg.vector_norm(slope, dim=-1).clamp(min=1e-6)
        assert (torch.linalg.vector_norm(gradient[:, :states] - slope, dim=-1) <= 1e-5 * size).all(), name
        if DEVICE == "cuda":  # Triton's interpreter has no bf16
            with use_backend(name):
                _, half = operation.row_losses(given[0].clone(), *rest, weight.to(DEVICE), torch.bfloat16)
            torch.testing.assert_close(half.double().cpu(), gradient, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("name", ["uniform", "absorbing", "hybrid", "hybrid-masks"])
@pytest.mark.parametrize("head", [m2s.Posterior, m2s.LogScore, m2s.FactorizedRate])
def test_score_entropy_of_hidden_states(name, head):
    """m2s.score_entropy and the weighted sum of training give the same for hidden states as for logits."""
    process = m2s.Hybrid(30, 0.0) if name == "hybrid-masks" else PROCESSES[name](30)
    head = head(process)
    generator = torch.Generator().manual_seed(3)
    x_0 = torch.randint(30, (3, 4), generator=generator)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    x_t = process.corrupt(x_0, t, generator)
    parts = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 4, 8), (32, 8), (32,))]
    weight = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    given = [value.to(DEVICE) for value in (x_0, x_t, t)]
    output = Unprojected(*(value.to(DEVICE) for value in parts))
    plain = m2s.score_entropy(head, output, *given)
    wanted = torch.autograd.grad((plain * weight.to(DEVICE)).sum(), parts)
    with use_backend("fused"):
        found = m2s.score_entropy(head, output, *given)
        general = torch.autograd.grad((found * weight.to(DEVICE)).sum(), parts, retain_graph=True)
        value, terms = weighted_sum(m2s.score_entropy, head, output, *given, weight.to(DEVICE))
        summed = torch.autograd.grad(value, parts)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms, plain * weight.to(DEVICE), rtol=1e-5, atol=1e-6, check_dtype=False)
    for one, two, three in zip(wanted, general, summed, strict=True):
        size = float(torch.linalg.vector_norm(one))
        assert float(torch.linalg.vector_norm(two - one)) <= 2e-5 * size
        assert float(torch.linalg.vector_norm(three - one)) <= 2e-5 * size


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two rows."""
    monkeypatch.setattr(last_layer_chunks, "CHUNK", 300)  # two rows of 150 columns


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["posterior_entropy", "score_entropy", "factorized_entropy", "cross_entropy"])
@pytest.mark.parametrize("name", ["reference", "fused"])
def test_last_layer_and_loss(kind, bias, name, small_chunks):
    """Values and gradients as autograd finds them through the logits, in several chunks."""
    head, x_0, x_t, t, scalars = sites("absorbing" if kind == "cross_entropy" else "hybrid", 140, 11, kind)
    generator = torch.Generator().manual_seed(2)
    parts = [torch.randn(shape, generator=generator) for shape in ((11, 8), (150, 8), (150,))]
    leaves = [(value if i == 0 else value / 2).to(DEVICE).requires_grad_() for i, value in enumerate(parts)]
    hidden, weight, shift = leaves
    output = Unprojected(hidden, weight, shift if bias else None)
    row_weight = torch.rand(11, generator=generator, dtype=torch.float64).to(DEVICE)
    double = [value.detach().double().requires_grad_() for value in leaves]
    logits = double[0] @ double[1].t() + (double[2] if bias else 0)
    expected_loss, slope = exact(kind, head, logits[:, : head.process.states].detach().cpu(), x_0, x_t, t, row_weight.cpu())
    slope = torch.nn.functional.pad(slope, (0, 150 - slope.shape[-1])).to(DEVICE)
    wanted = torch.autograd.grad((logits * slope).sum(), double[: 2 + bias])
    rest = (
        x_t.squeeze(-1).to(DEVICE),
        x_0.squeeze(-1).to(DEVICE),
        linear_loss.RowLossSpec(kind, scalars.to(DEVICE), head.process),
    )
    with use_backend(name):
        value, terms = linear_loss.weighted_sum(output, *rest, row_weight)
        assert not terms.requires_grad
        gradients = torch.autograd.grad(3 * value, leaves[: 2 + bias])
        general = linear_loss.per_position(output, *rest)
        general_gradients = torch.autograd.grad((general * row_weight).sum(), leaves[: 2 + bias])
    torch.testing.assert_close(terms.cpu(), expected_loss * row_weight.cpu(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(general.cpu(), expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(value, terms.sum())
    for found, again, exact_gradient in zip(gradients, general_gradients, wanted, strict=True):
        size = float(torch.linalg.vector_norm(exact_gradient))
        assert float(torch.linalg.vector_norm(found.double() / 3 - exact_gradient)) <= 1e-5 * size
        assert float(torch.linalg.vector_norm(again.double() - exact_gradient)) <= 1e-5 * size


def test_rows_are_independent():
    """A row has the same bits alone and among others."""
    _head, x_0, x_t, _t, scalars = sites("uniform", 1001, 6, "posterior_entropy")
    logits = torch.randn(6, 1001)
    given = (x_t.reshape(-1), x_0.reshape(-1), scalars)
    weight = torch.ones(6, dtype=torch.float64)
    with use_backend("fused"):
        operation = backend.load_op("posterior_entropy", True)
        logits, weight, *given = (value.to(DEVICE) for value in (logits, weight, *given))
        prepared = operation.prepare(*given)
        together = operation.row_losses(logits.clone(), *prepared, False, 1001, weight, torch.float32)
        one_row = (value[..., 4:5] for value in prepared)
        alone = operation.row_losses(logits[4:5], *one_row, False, 1001, weight[4:5], torch.float32)
    assert torch.equal(alone[0], together[0][4:5])
    assert torch.equal(alone[1], together[1][4:5])


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_weight_zero_excludes_a_row(name):
    """Also where the loss is infinite: padding must not spoil a batch."""
    head, x_0, x_t, _t, scalars = sites("uniform", 5, 3, "score_entropy")
    logits = torch.zeros(3, 5)
    logits[1] = 200.0
    weight = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    hidden, layer = torch.eye(3).to(DEVICE).requires_grad_(), logits.t().contiguous().to(DEVICE).requires_grad_()
    rows = linear_loss.RowLossSpec("score_entropy", scalars.to(DEVICE), head.process)
    with use_backend(name):
        value, terms = linear_loss.weighted_sum(
            Unprojected(hidden, layer), x_t.squeeze(-1).to(DEVICE), x_0.squeeze(-1).to(DEVICE), rows, weight.to(DEVICE)
        )
        gradients = torch.autograd.grad(value, (hidden, layer))
    assert terms[1] == 0 and value.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][1] == 0).all()


@pytest.mark.parametrize("name", ["uniform", "absorbing", "hybrid"])
def test_one_weight_for_all_positions_of_one_example(name):
    """It is expanded without a copy. The memory after it holds NaN, which nothing may read."""
    process = PROCESSES[name](7)
    head, x_0, t = m2s.Posterior(process), torch.randint(7, (1, 9), device=DEVICE), torch.tensor([0.6], device=DEVICE)
    x_t = process.corrupt(x_0, t)
    weight = torch.tensor([0.7] + [math.nan] * 20, dtype=torch.float64, device=DEVICE)[:1].unsqueeze(-1).expand(1, 9)
    hidden, last = torch.randn(1, 9, 5, device=DEVICE), torch.randn(8, 5, device=DEVICE)
    found = {}
    for kind in ("reference", "fused"):
        parts = hidden.clone().requires_grad_(), last.clone().requires_grad_()
        with use_backend(kind):
            weighted_sum(m2s.score_entropy, head, Unprojected(*parts), x_0, x_t, t, weight)[0].backward()
        found[kind] = [part.grad for part in parts]
    for one, other in zip(found["fused"], found["reference"], strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()
