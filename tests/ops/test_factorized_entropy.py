"""Exit rate and jump distribution in float32 against the s, r, h form in extended precision, on both backends.

The reference computes every s_y, r_y and h(s_y, r_y) in numpy's longdouble, and the gradient from s - r by the chain rule. It
shares no formula with the library but the scalars of the process.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import m2s
from m2s.ops import backend, use_backend
from m2s.ops.factorized_entropy import row_scalars
from m2s.process import RankOne

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LD = np.longdouble
pytestmark = pytest.mark.skipif(np.finfo(LD).nmant < 63, reason="longdouble is no wider than float64 here")
PROCESSES = {
    "uniform": lambda vocab: m2s.Uniform(vocab, m2s.Linear()),
    "absorbing": lambda vocab: m2s.Absorbing(vocab, m2s.Linear()),
    "hybrid": lambda vocab: m2s.Hybrid(vocab, 0.1),
}
TIMES = [1e-5, 1e-3, 0.5, 0.999, 1 - 1e-5]


def scalars(process: RankOne, t: float) -> tuple[np.longdouble, ...]:
    """alpha, m(clean), m(mask), n(clean), n(mask) for the linear schedule and for GIDD's process (SPEC section 1)."""
    one, at = LD(1), LD(t)
    if isinstance(process, m2s.Hybrid):
        big_b = 2 * LD(process.p_uniform) / (1 - LD(process.p_uniform))
        c = big_b * np.sqrt(at * (1 - at))
        slope = big_b * (1 - 2 * at) / (2 * np.sqrt(at * (1 - at)))  # c'
        alpha, clean, mask = (1 - at) / (1 + c), c / (1 + c) / process.vocab, at / (1 + c)
        speed = -1 / (1 - at) - slope / (1 + c)  # alpha' / alpha
        n_clean = slope / (1 + c) ** 2 / process.vocab - speed * clean
        return alpha, clean, mask, n_clean, 1 / (1 + c) - at * slope / (1 + c) ** 2 - speed * mask
    if isinstance(process, m2s.Absorbing):
        return one - at, LD(0), at, LD(0), 1 / (1 - at)
    return one - at, at / process.vocab, LD(0), 1 / (1 - at) / process.vocab, LD(0)


def reference(process: RankOne, row: np.ndarray, x: int, k: int, t: float) -> tuple[np.longdouble, np.ndarray, np.ndarray]:
    """Loss and gradient of one row from the definition, and n(k) r_y of all candidates."""
    alpha, clean, mask, n_clean, n_mask = scalars(process, t)
    p = np.full(process.states, clean, dtype=LD)
    if process.mask is not None:
        p[-1] = mask
    p[x] += alpha
    rate = n_mask if k == process.mask else n_clean
    if rate == 0:
        return LD(0), np.zeros(process.states, dtype=LD), np.zeros(process.states, dtype=LD)
    r, others = p / p[k], np.arange(process.states) != k
    wide = row.astype(LD)
    weight = np.where(others, np.exp(wide - wide[others].max()), 0)
    jump = weight / weight.sum()
    log_s = wide[k] + np.log(LD(process.states - 1)) + wide - wide[others].max() - np.log(weight.sum())
    s, compared = np.exp(log_s), others & (r > 0)
    log_r = np.log(np.where(compared, r, 1))
    difference = np.where(compared, log_s - log_r, 0)
    near = np.abs(difference) < 0.01  # the definition cancels there, in this precision too
    series = difference**2 * (LD(1) / 2 + difference * (LD(1) / 6 + difference * (LD(1) / 24 + difference / 120)))
    h = np.where(compared, r * np.where(near, series, np.expm1(difference) - difference), s)
    slope = np.where(others, s - r, 0)
    gradient = slope - jump * slope.sum()
    gradient[k] = slope.sum()
    return rate * h[others].sum(), rate * gradient, rate * r * others


def rows(process: RankOne, x: int, k: int, t: float) -> dict[str, Tensor]:
    """Outputs from flat to one-hot at +-60, exit rates from far too small to far too large, and the optimum."""
    states, rng = process.states, torch.Generator().manual_seed(3)
    noise = torch.randn(states, generator=rng)
    alpha, clean, mask, *_ = (float(value) for value in scalars(process, t))
    p = torch.full((states,), clean, dtype=torch.float64)
    if process.mask is not None:
        p[-1] = mask
    p[x] += alpha
    optimum = torch.log(p.clamp(min=1e-30))
    left = p.sum() - p[k] if p[k] < 0.5 else p[torch.arange(states) != k].sum()
    optimum[k] = torch.log(left / p[k]) - math.log(states - 1)
    sure, wrong = torch.full((states,), -60.0), torch.full((states,), -60.0)
    sure[x], wrong[(x + 1) % process.vocab] = 60.0, 60.0
    found = {
        "zeros": torch.zeros(states),
        "randn": noise,
        "5 randn": 5 * noise,
        "sure": sure,
        "sure of another token": wrong,
        "optimum": optimum.float(),
        "near the optimum": optimum.float() + 0.01 * noise,
        "shifted": noise + 30,
    }
    for name, row in list(found.items()):
        if "optimum" not in name:
            row[k] = {"sure": -8.0, "5 randn": 12.0}.get(name, float(optimum[k]) + 0.5)
    return found


CASES = [  # the process, and what the current token is: an unmasked one is certainly clean under masking noise
    ("uniform", "x_0"),
    ("uniform", "another token"),
    ("absorbing", "x_0"),
    ("absorbing", "the mask"),
    ("hybrid", "x_0"),
    ("hybrid", "another token"),
    ("hybrid", "the mask"),
]


@pytest.mark.parametrize("backend_name", ["reference", "fused"])
@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize(("name", "current"), CASES)
@pytest.mark.parametrize("vocab", [2, 1500])
def test_extreme_outputs_and_times(vocab, name, current, t, backend_name):
    """Losses to 1e-5 of their size or 1e-6 nats, gradients to 1e-5 of the norm of their row.

    At the optimum the gradient n(k) R (J - J*) is a difference of rounded numbers: there 1e-6 of the norm of n(k) R J*.
    """
    process = PROCESSES[name](vocab)
    x = vocab // 2
    k = {"x_0": x, "another token": (x + 1) % vocab, "the mask": vocab}[current]
    given = rows(process, x, k, t)
    outputs = torch.stack(list(given.values()))
    count = len(outputs)
    x_0, x_t = torch.full((count, 1), x), torch.full((count, 1), k)
    times = torch.full((count,), t, dtype=torch.float64)
    site = process.at(x_t, times)
    columns = torch.full((count, process.states + 3), float("nan"))
    columns[:, : process.states] = outputs
    weight = torch.ones(count, dtype=torch.float64, device=DEVICE)
    with use_backend(backend_name):
        operation = backend.load_op("factorized_entropy", backend_name == "fused")
        tokens = [value.squeeze(-1).to(DEVICE) for value in (x_t, x_0)]
        prepared = operation.prepare(*tokens, row_scalars(x_0, x_t, site, vocab, process.mask).to(DEVICE))
        loss, gradient = operation.row_losses(
            columns.to(DEVICE), *prepared, process.mask is not None, vocab, weight, torch.float32
        )
    assert (gradient[:, process.states :] == 0).all()
    loss, gradient = loss.double().cpu().numpy(), gradient[:, : process.states].double().cpu().numpy()
    for i, (which, row) in enumerate(given.items()):
        value, slope, wanted = reference(process, row.numpy(), x, k, t)
        assert abs(loss[i] - value) <= 1e-5 * max(value, LD(0.1)), (which, loss[i], value)
        bar = max(1e-5 * np.linalg.norm(slope), 1e-6 * np.linalg.norm(wanted), LD(1e-11))
        assert np.linalg.norm(gradient[i] - slope) <= bar, which
