"""Golden vectors of the lab: results of the library, with which the tests of web/ compare its TypeScript.

python tests/report/lab_golden.py     # writes web/tests/golden/simplex.json
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import m2s
from m2s.io import write_json
from m2s.report.toy import DATA_DISTRIBUTION, terminal_distribution

FILE = Path(__file__).parents[2] / "web" / "tests" / "golden" / "simplex.json"
FACTORS = ((1.0, 1.0, 1.0), (1.0, 2.5, 1.0), (0.3, 1.0, 4.0), (0.05, 12.0, 0.6))
STEPS = (1, 2, 5, 12)
FIRST_TIME = 0.999
LIMIT_STEP = 0.1  # of the integrator, as on the page


def vectors() -> dict[str, Any]:
    """All golden vectors."""
    generator = torch.Generator().manual_seed(0)
    return {
        "sites": [
            _site(states, generator, boundary=example == 4)
            for states in (3, 3, 3, 3, 3, 3, 3, 2, 5, 17)
            for example in range(5)
        ],
        "chains": [_chain(factors, steps, projected) for factors in FACTORS for steps in STEPS for projected in (False, True)],
        "limits": [
            {"distribution": DATA_DISTRIBUTION, "y": 1, "factor": factor, "generated": generated}
            for factor, generated in zip((0.25, 1.0, 3.0), _limits((0.25, 1.0, 3.0)), strict=True)
        ],
    }


def _site(states: int, generator: torch.Generator, boundary: bool) -> dict[str, Any]:
    """One site: a leave-one-out distribution with its score, and that score with a random error, or one of class 2."""
    process = m2s.Uniform(states, m2s.Linear())

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    k = torch.randint(states, (1,), generator=generator)
    t = 0.01 + 0.98 * uniform(1)
    s = t * uniform(1)
    nu = torch.softmax(3 * uniform(1, states), -1)
    exact = m2s.score_from_leave_one_out(nu, k, t, process)
    size = 1.5 * uniform(1)  # small errors leave some scores realizable
    score = (exact * torch.exp(size * (2 * uniform(1, states) - 1))).scatter(-1, k[:, None], 1.0)
    if boundary:
        signed = (nu * 0).scatter(-1, k[:, None], 1 + 5e-7).scatter(-1, (k[:, None] + 1) % states, -5e-7)
        score = m2s.score_from_posterior(signed, k, t, process)
    found = m2s.diagnose(score, k, t, process, s)
    projected = m2s.project(score, k, t, process)
    return {
        "k": int(k),
        "t": float(t),
        "s": float(s),
        "rho": float(process.rho(t)),
        "nu": nu[0].tolist(),
        "posterior": m2s.posterior_from_leave_one_out(nu, k, t, process)[0].tolist(),
        "exact": exact[0].tolist(),
        "bridge": m2s.score_from_posterior(projected, k, t, process)[0].tolist(),
        "score": score[0].tolist(),
        "signed": m2s.affine_inverse(score, k, t, process)[0].tolist(),
        "projected": projected[0].tolist(),
        "class": int(found.classes),
        "outside": int(found.outside),
        "lowest": float(found.lowest),
        "weights": m2s.analytic_weights(score, k, s, t, process)[0].tolist(),
    }


def _chain(factors: tuple[float, ...], steps: int, projected: bool) -> dict[str, Any]:
    """The distribution that `steps` analytic steps generate with the exact score multiplied by factors."""
    process = m2s.Uniform(3, m2s.Linear())
    p, x_t = torch.tensor([DATA_DISTRIBUTION], dtype=torch.float64).expand(3, 3), torch.arange(3)
    q = torch.full((3,), 1 / 3, dtype=torch.float64)
    for step in range(steps):
        t = torch.full((3,), FIRST_TIME * (1 - step / steps), dtype=torch.float64)
        s = torch.full((3,), FIRST_TIME * (1 - (step + 1) / steps), dtype=torch.float64)
        score = m2s.score_from_leave_one_out(p, x_t, t, process) * torch.tensor(factors, dtype=torch.float64)
        score = score.scatter(-1, x_t[:, None], 1.0)
        if projected:
            score = m2s.score_from_posterior(m2s.project(score, x_t, t, process), x_t, t, process)
        weights = m2s.analytic_weights(score, x_t, s, t, process).clamp(min=0)
        q = q @ (weights / weights.sum(-1, keepdim=True))
    return {"factors": factors, "steps": steps, "projected": projected, "generated": q.tolist()}


def _limits(factors: tuple[float, ...]) -> list[list[list[float]]]:
    """The distributions of Figure 1 (b), without and with projection, for each factor on the score of token 1."""
    process, p = m2s.Uniform(3, m2s.Linear()), torch.tensor(DATA_DISTRIBUTION, dtype=torch.float64)
    return terminal_distribution(p, np.array(factors), 1, process, LIMIT_STEP).transpose(0, 1).tolist()


if __name__ == "__main__":
    write_json(FILE, vectors())
