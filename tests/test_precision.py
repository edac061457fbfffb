"""The losses in float32 against the direct s, r, h form in extended precision.

The reference builds every s_y, r_y and h(s_y, r_y) from the kernel, and the gradient from dL/ds by the chain rule, in numpy's longdouble (mpmath
where that is no wider than float64); it shares no formula with the library. A few anchors are checked once more in 60 digits.
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
    """alpha, m(clean), m(mask), n(clean), n(mask) at time t in the type `exact`, from SPEC section 1, n = m' - (alpha'/alpha) m."""
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


def direct_free(process, log_score, x, k, t):
    """Loss and gradient of one site for a free log-score."""
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
