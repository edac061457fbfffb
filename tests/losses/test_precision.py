"""The losses in float32 against the direct s, r, h form in extended precision.

The reference computes every s_y, r_y and h(s_y, r_y) from the transition matrix, and the gradient from dL/ds by the chain rule.
It uses numpy's longdouble and shares no formula with the library. A few values are checked again with 60 digits of mpmath, also
where longdouble is no wider than float64.
"""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import m2s

WIDE = np.finfo(np.longdouble).nmant >= 63
LD = np.longdouble
GPT2 = 50_257
LOSS_BAR, GRADIENT_BAR, FLOOR = 1e-5, 1e-5, 1e-6
needs_wide = pytest.mark.skipif(not WIDE, reason="longdouble is no wider than float64 here; the mpmath anchors still run")


# ---------------------------------------------------------------- the reference


def kernel_scalars(process, t, exact=LD):
    """alpha, m(clean), m(mask), n(clean), n(mask) at time t in the type `exact`, from SPEC section 1, n = m' - (alpha'/alpha)
    m.
    """
    t, one = exact(t), exact(1)
    if isinstance(process, m2s.Hybrid):
        p = exact(process.p_uniform)
        root = (t * (one - t)) ** (one / 2)
        big_b = 2 * p / (1 - p)
        c, c_prime = big_b * root, big_b * (1 - 2 * t) / (2 * root)
        alpha, clean, mask = (1 - t) / (1 + c), c / (1 + c) / process.vocab, t / (1 + c)
        log_alpha_prime = -1 / (1 - t) - c_prime / (1 + c)
        clean_prime, mask_prime = c_prime / (1 + c) ** 2 / process.vocab, 1 / (1 + c) - t * c_prime / (1 + c) ** 2
        return alpha, clean, mask, clean_prime - log_alpha_prime * clean, mask_prime - log_alpha_prime * mask
    alpha, zero = one - t, exact(0)  # the linear schedule: (1-t)' / (1-t) = -1/(1-t)
    if isinstance(process, m2s.Absorbing):
        return alpha, zero, t, zero, 1 + t / (1 - t)
    clean = t / process.vocab
    return alpha, clean, zero, one / process.vocab + clean / (1 - t), zero


def mixing(process, clean, mask):
    m = np.full(process.states, clean, dtype=LD)
    if process.mask is not None:
        m[-1] = mask
    return m


def entropy(s, r):
    """h(s, r) = s - r log s + r log r - r and its slope 1 - r/s, with h(s, 0) = s."""
    positive = r > 0
    safe_s, safe_r = np.where(positive, s, 1), np.where(positive, r, 1)
    h = np.where(positive, s - r * np.log(safe_s) + r * np.log(safe_r) - r, s)
    return h, np.where(positive, 1 - r / safe_s, 1)


def direct(process, logits, x, k, t, offset="none"):
    """Loss and gradient of one site through the bridge s_y = sum_z mu_z P(y|z) / P(k|z)."""
    alpha, clean, mask, n_clean, n_mask = kernel_scalars(process, t)
    m = mixing(process, clean, mask)
    rate = n_mask if k == process.mask else n_clean
    zero = np.zeros(len(logits), dtype=LD)
    if rate == 0:
        return LD(0), zero
    vocab = process.vocab
    into = np.full(vocab, m[k])  # P(k|z)
    if k < vocab:
        into[k] += alpha
    wide = logits[:vocab].astype(LD) + (np.log(into) if offset == "exact" else 0)
    mu = np.exp(wide - wide.max())
    mu /= mu.sum()
    weight = mu / into
    s = m * weight.sum()
    s[:vocab] += alpha * weight
    r = m.copy()
    r[x] += alpha
    r = r / r[k]
    h, slope = entropy(s, r)
    others = np.arange(process.states) != k
    slope = rate * np.where(others, slope, 0)
    d_mu = ((m * slope).sum() + alpha * slope[:vocab]) / into
    zero[:vocab] = mu * (d_mu - (mu * d_mu).sum())
    return rate * h[others].sum(), zero


def direct_unconstrained(process, log_score, x, k, t):
    """Loss and gradient of one site for an unconstrained log-score."""
    alpha, clean, mask, n_clean, n_mask = kernel_scalars(process, t)
    r = mixing(process, clean, mask)
    rate = n_mask if k == process.mask else n_clean
    r[x] += alpha
    if rate == 0 or r[k] == 0:
        return LD(0), np.zeros(process.states, dtype=LD)
    r = r / r[k]
    s = np.exp(log_score.astype(LD))
    h, _ = entropy(s, r)
    others = np.arange(process.states) != k
    return rate * h[others].sum(), rate * np.where(others, s - r, 0)


def errors(head, rows, x, k, t, reference):
    """The worst errors of loss and gradient over `rows`, relative to max(size, 1e-6)."""
    output = rows.clone().requires_grad_()
    loss = m2s.score_entropy(head, output, x, k, t)
    loss.sum().backward()
    assert loss.dtype == output.dtype and loss.isfinite().all() and output.grad.isfinite().all()
    worst_loss = worst_gradient = 0.0
    for i in range(len(rows)):
        value, gradient = reference(rows[i].numpy(), int(x[i]), int(k[i]), float(t[i]))
        size = np.linalg.norm(gradient.astype(LD))
        worst_loss = max(worst_loss, float(abs(LD(loss[i].item()) - value) / max(abs(value), FLOOR)))
        miss = np.linalg.norm(output.grad[i].numpy().astype(LD) - gradient)
        worst_gradient = max(worst_gradient, float(miss / max(size, FLOOR)))
    return worst_loss, worst_gradient


# ---------------------------------------------------------------- random and extreme outputs


X, K_OTHER, OTHER = 4_000, 17, 9_999


def grid_rows(vocab: int, x: int, k: int, seed: int) -> dict[str, Tensor]:
    """Logits from uniform to one-hot at +-60."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(vocab, generator=generator)
    other = next(y for y in (OTHER % vocab, 0, 1, 2) if y not in (x, k) or vocab == 2)

    def hot(*tokens: int, up: float = 60.0, down: float = -60.0) -> Tensor:
        return torch.full((vocab,), down).index_fill(0, torch.tensor(tokens), up)

    two = noise.clone()
    two[x] += 12
    two[k] += 11
    leads = hot(k)
    leads[x] = 48.0
    few = noise * 0.1
    few[torch.tensor([x, k, other])] += torch.tensor([6.0, 14.0, 9.0])
    return {
        "zeros": torch.zeros(vocab),
        "randn": noise,
        "5 randn": 5 * noise,
        "hot at x_0": hot(x),
        "hot at x_t": hot(k),
        "hot elsewhere": hot(other),
        "all but x_0": hot(x, up=-60.0, down=60.0),
        "two compete": two,
        "x_t leads x_0": leads,
        "three compete": few,
        "hot pair": hot(x, other),
    }


@needs_wide
@pytest.mark.parametrize("offset", ["none", "exact"])
@pytest.mark.parametrize("same", [True, False], ids=["k = x_0", "k != x_0"])
@pytest.mark.parametrize("t", [1e-3, 1e-2, 0.5, 0.99, 0.999])
def test_uniform_loss_with_the_vocabulary_of_gpt2(t: float, same: bool, offset: str) -> None:
    process = m2s.Uniform(GPT2, m2s.Linear())
    k = X if same else K_OTHER
    rows = torch.stack(list(grid_rows(GPT2, X, k, 0).values()))
    times = torch.full((len(rows),), t)
    x_0, x_t = torch.full((len(rows),), X), torch.full((len(rows),), k)

    def reference(logits, x, k, t):
        return direct(process, logits, x, k, t, offset)

    loss, gradient = errors(m2s.Posterior(process, offset=offset), rows, x_0, x_t, times, reference)
    assert loss < LOSS_BAR and gradient < GRADIENT_BAR


PROCESSES = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "hybrid 0.1": lambda vocab: m2s.Hybrid(vocab, p_uniform=0.1),
    "hybrid 0.9": lambda vocab: m2s.Hybrid(vocab, p_uniform=0.9),
}


def random_examples(process: m2s.Process, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of all scales with a few raised or lowered, x_0, x_t (equal for a third), and t, dense at both ends."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    vocab = process.vocab
    x_0 = torch.randint(vocab, (count,), generator=generator)
    other = torch.randint(process.states, (count,), generator=generator)
    last = torch.full_like(x_0, process.states - 1)
    choice = torch.randint(3, (count,), generator=generator)
    x_t = torch.where(choice == 0, x_0, torch.where(choice == 1, other, last))
    near = 10 ** (-5 * uniform(count))
    end = torch.randint(3, (count,), generator=generator)
    t = torch.where(end == 0, near, torch.where(end == 1, 1 - near, uniform(count))).clamp(1e-5, 1 - 1e-5)
    scale = 10 ** (2.5 * uniform(count, 1) - 1) * (uniform(count, 1) > 0.3)
    rows = scale * torch.randn(count, vocab, generator=generator)
    for tokens in (x_0, x_t.clamp(max=vocab - 1), torch.randint(vocab, (count,), generator=generator)):
        lift = (60 * uniform(count, 1) - 20) * (uniform(count, 1) < 0.6)
        rows = rows.scatter_add(-1, tokens.unsqueeze(-1), lift)
    rows = torch.nn.functional.pad(rows.clamp(-60, 60), (0, process.states - vocab))
    return rows, x_0, x_t, t


@needs_wide
@pytest.mark.parametrize("offset", ["none", "exact"])
@pytest.mark.parametrize("vocab", [2, 3, 17, 256])
@pytest.mark.parametrize("name", PROCESSES)
def test_posterior_loss_on_random_examples(name: str, vocab: int, offset: str) -> None:
    process = PROCESSES[name](vocab)
    rows = random_examples(process, 150, vocab)

    def reference(logits, x, k, t):
        return direct(process, logits, x, k, t, offset)

    loss, gradient = errors(m2s.Posterior(process, offset=offset), *rows, reference)
    assert loss < LOSS_BAR and gradient < GRADIENT_BAR


@needs_wide
@pytest.mark.parametrize("vocab", [2, 17, 256])
@pytest.mark.parametrize("name", PROCESSES)
def test_unconstrained_loss_on_random_examples(name: str, vocab: int) -> None:
    process = PROCESSES[name](vocab)
    rows, x_0, x_t, t = random_examples(process, 150, vocab)

    def reference(log_score, x, k, t):
        return direct_unconstrained(process, log_score, x, k, t)

    loss, gradient = errors(m2s.LogScore(process), rows.clamp(-20, 20), x_0, x_t, t, reference)
    assert loss < LOSS_BAR and gradient < GRADIENT_BAR


@needs_wide
@pytest.mark.parametrize("name", PROCESSES)
def test_all_losses_with_the_vocabulary_of_gpt2(name: str) -> None:
    process = PROCESSES[name](GPT2)
    rows, x_0, x_t, t = random_examples(process, 12, 1)
    heads = {
        "none": m2s.Posterior(process),
        "exact": m2s.Posterior(process, offset="exact"),
        "unconstrained": m2s.LogScore(process),
    }
    for kind, head in heads.items():

        def reference(values, x, k, t, kind=kind):
            return (
                direct_unconstrained(process, values, x, k, t)
                if kind == "unconstrained"
                else direct(process, values, x, k, t, kind)
            )

        loss, gradient = errors(head, rows.clamp(-20, 20) if kind == "unconstrained" else rows, x_0, x_t, t, reference)
        assert loss < LOSS_BAR and gradient < GRADIENT_BAR, kind


@needs_wide
def test_unconstrained_loss_near_its_minimum() -> None:
    """log s = log r + small: the terms are r d^2 / 2, far below r itself."""
    process = m2s.Uniform(256, m2s.Linear())
    t = torch.tensor([1e-3, 0.1, 0.9])
    x_0, x_t = torch.tensor([3, 3, 3]), torch.tensor([7, 7, 3])
    rows = process.rows(x_0, t.double())
    log_ratio = torch.log(rows / rows.gather(-1, x_t.unsqueeze(-1)))
    output = (log_ratio + 1e-3 * torch.randn(3, 256, generator=torch.Generator().manual_seed(0))).float()

    def reference(log_score, x, k, t):
        return direct_unconstrained(process, log_score, x, k, t)

    loss, gradient = errors(m2s.LogScore(process), output, x_0, x_t, t, reference)
    # log s itself is rounded to float32: at log r = 12 that alone moves d = 1e-3 by 5e-7, but the reference sees the same
    # rounded number
    assert loss < LOSS_BAR and gradient < GRADIENT_BAR


@pytest.mark.parametrize("name", PROCESSES)
def test_loss_and_gradient_are_finite_for_extreme_logits(name: str) -> None:
    process = PROCESSES[name](GPT2)
    ends = torch.tensor([1e-5, 1e-4, 1e-3, 0.3, 0.999, 0.9999, 1 - 1e-5])
    for k in (X, K_OTHER, process.states - 1):
        for row in grid_rows(GPT2, X, min(k, GPT2 - 1), 0).values():
            output = torch.nn.functional.pad(row, (0, process.states - GPT2)).repeat(len(ends), 1).requires_grad_()
            x_0, x_t = torch.full((len(ends),), X), torch.full((len(ends),), k)
            for offset in ("none", "exact"):
                loss = m2s.score_entropy(m2s.Posterior(process, offset=offset), output, x_0, x_t, ends)
                (gradient,) = torch.autograd.grad(loss.sum(), output)
                assert loss.isfinite().all() and gradient.isfinite().all() and (loss >= 0).all()


@pytest.mark.parametrize("t", [1e-3, 0.5, 0.999])
@pytest.mark.parametrize("name", PROCESSES)
def test_loss_agrees_with_sixty_digits(name: str, t: float) -> None:
    """The library, and the longdouble reference where it is wide enough, against mpmath at K = 5 for three values of k."""
    process = PROCESSES[name](5)
    logits = torch.tensor([0.25, -3.0, 7.5, 1.0, 0.0])
    t_exact = float(torch.tensor(t))
    for k in (1, 2, process.states - 1):
        if name == "absorbing" and k < 5:
            continue
        with mpmath.workdps(60):
            alpha, clean, mask, n_clean, n_mask = kernel_scalars(process, t_exact, mpmath.mpf)
            m = [clean] * 5 + ([mask] if process.mask is not None else [])
            weights = [mpmath.exp(mpmath.mpf(float(v))) for v in logits]
            mu = [w / mpmath.fsum(weights) for w in weights]
            kernel = [[m[y] + (alpha if y == z else 0) for y in range(process.states)] for z in range(5)]
            score = [mpmath.fsum(mu[z] * kernel[z][y] / kernel[z][k] for z in range(5)) for y in range(process.states)]
            ratio = [kernel[2][y] / kernel[2][k] for y in range(process.states)]
            terms = [
                s - r * mpmath.log(s) + r * mpmath.log(r) - r if r > 0 else s
                for y, (s, r) in enumerate(zip(score, ratio, strict=True))
                if y != k
            ]
            value = float((n_mask if k == process.mask else n_clean) * mpmath.fsum(terms))
        output = torch.nn.functional.pad(logits, (0, process.states - 5)).unsqueeze(0)
        loss = m2s.score_entropy(m2s.Posterior(process), output, torch.tensor([2]), torch.tensor([k]), torch.tensor([t]))
        assert abs(loss.item() - value) < LOSS_BAR * max(value, FLOOR)
        if WIDE:
            reference, _ = direct(process, output[0].numpy(), 2, k, t_exact)
            assert math.isclose(float(reference), value, rel_tol=1e-12, abs_tol=1e-15)


# ---------------------------------------------------------------- the autograd functions


@pytest.mark.parametrize("head", ["none", "exact", "unconstrained"])
@pytest.mark.parametrize("name", PROCESSES)
def test_gradient_agrees_with_finite_differences(name: str, head: str) -> None:
    process = PROCESSES[name](6)
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(2, 4, process.states, dtype=torch.float64, generator=generator).requires_grad_()
    x_0 = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 1]])
    x_t = torch.tensor([[0, 2, 2, 0], [4, 0, 5, 1]])
    if process.mask is not None:
        x_t[:, 1::2] = process.mask
    t = torch.tensor([0.2, 0.85], dtype=torch.float64)
    choice = m2s.LogScore(process) if head == "unconstrained" else m2s.Posterior(process, offset=head)
    assert torch.autograd.gradcheck(lambda values: m2s.score_entropy(choice, values, x_0, x_t, t), output)


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    output = torch.randn(3, 5, 33, generator=generator).to(dtype)
    x_0 = torch.randint(33, (3, 5), generator=generator)
    x_t = torch.where(torch.rand(3, 5, generator=generator) < 0.5, x_0, torch.randint(33, (3, 5), generator=generator))
    return output, x_0, x_t, torch.tensor([0.1, 0.5, 0.9])


HEADS = {
    "posterior": lambda process: m2s.Posterior(process),
    "exact": lambda process: m2s.Posterior(process, offset="exact"),
    "unconstrained": lambda process: m2s.LogScore(process),
}


@pytest.mark.parametrize("name", HEADS)
def test_strides_and_padding_do_not_change_the_loss(name: str) -> None:
    head = HEADS[name](m2s.Uniform(33, m2s.Linear()))
    output, x_0, x_t, t = example()
    loss = m2s.score_entropy(head, output, x_0, x_t, t)
    strided = output.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    assert not strided.is_contiguous()
    again = m2s.score_entropy(head, strided, x_0, x_t, t)
    assert torch.equal(loss, again.detach())  # with and without gradient, contiguous or not
    again.sum().backward()
    dense = output.clone().requires_grad_()
    m2s.score_entropy(head, dense, x_0, x_t, t).sum().backward()
    assert torch.equal(strided.grad, dense.grad)
    padded = torch.nn.functional.pad(output, (0, 7), value=100.0).requires_grad_()
    m2s.score_entropy(head, padded, x_0, x_t, t).sum().backward()
    assert torch.equal(padded.grad[..., :33], dense.grad) and (padded.grad[..., 33:] == 0).all()


@pytest.mark.parametrize("name", HEADS)
def test_repeated_and_weighted_backward(name: str) -> None:
    head = HEADS[name](m2s.Uniform(33, m2s.Linear()))
    output, x_0, x_t, t = example()
    output.requires_grad_()
    loss = m2s.score_entropy(head, output, x_0, x_t, t)
    weight = torch.linspace(-1, 2, loss.numel()).reshape(loss.shape)
    (plain,) = torch.autograd.grad(loss.sum(), output, retain_graph=True)
    (weighted,) = torch.autograd.grad((weight * loss).sum(), output, retain_graph=True)
    (again,) = torch.autograd.grad(loss.sum(), output)
    expected = plain * weight.unsqueeze(-1)
    assert ((weighted - expected).norm(dim=-1) <= 1e-6 * expected.norm(dim=-1)).all()
    assert torch.equal(plain, again)
    two = m2s.score_entropy(head, output, x_0, x_t, t).sum() + m2s.score_entropy(head, output, x_0, x_t, t).sum()
    torch.testing.assert_close(torch.autograd.grad(two, output)[0], 2 * plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", HEADS)
def test_half_precision_inputs_give_a_float32_loss(name: str) -> None:
    head = HEADS[name](m2s.Uniform(33, m2s.Linear()))
    output, x_0, x_t, t = example(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = m2s.score_entropy(head, output.requires_grad_(), x_0, x_t, t)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, m2s.score_entropy(head, output.float(), x_0, x_t, t))
    loss.sum().backward()
    assert output.grad is not None and output.grad.dtype == torch.bfloat16 and output.grad.isfinite().all()


@pytest.mark.parametrize("head", ["none", "exact", "unconstrained"])
def test_unmasked_sites_have_zero_loss_and_gradient(head: str) -> None:
    """For absorbing processes: exactly 0, also with logits of scale 1e4 and with masked sites in the same example."""
    process = m2s.Absorbing(9, m2s.Linear())
    output = (1e4 * torch.randn(1, 4, 10, generator=torch.Generator().manual_seed(0))).requires_grad_()
    x_0 = torch.tensor([[0, 1, 2, 3]])
    x_t = torch.tensor([[0, 9, 2, 9]])
    choice = m2s.LogScore(process) if head == "unconstrained" else m2s.Posterior(process, offset=head)
    values = output / 1e3 if head == "unconstrained" else output
    loss = m2s.score_entropy(choice, values, x_0, x_t, torch.tensor([0.4]))
    loss.sum().backward()
    assert (loss[0, ::2] == 0).all() and (output.grad[0, ::2] == 0).all()
    assert (loss[0, 1::2] > 0).all() and output.grad.isfinite().all()


@pytest.mark.parametrize("method", sorted(m2s.methods.METHODS))
def test_autocast_around_the_objective_reaches_only_the_network(method: str) -> None:
    """Frameworks put the module that they wrap under autocast. Corruption, loss and gradient are those of the same output."""
    parts = m2s.methods.METHODS[method].build(vocab=7)
    x_0 = torch.randint(7, (16, 12))
    found = []
    for enabled in (False, True):
        torch.manual_seed(1)
        output = torch.randn(16, 12, parts.head.process.states).requires_grad_()
        objective = m2s.Objective(lambda x_t, t, output=output: output, parts.head, parts.loss)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.bfloat16 if enabled else torch.float32)
            loss = objective(x_0)
        loss.sum().backward()
        found.append((loss, output.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
