"""The affine inverse of tabulated processes in float32, and the conversions of a process that corrupts nothing."""

from collections.abc import Callable

import pytest
import torch

import m2s
from m2s.conversions.bridge import bridge_matrix
from m2s.errors import UserError
from m2s.heads import Shifted


@pytest.mark.parametrize("levels", [9, 33, 64])
@pytest.mark.parametrize("time", [1e-3, 0.1, 0.9])
def test_affine_inverse_in_float32_of_a_birth_death_process(levels: int, time: float) -> None:
    """Transition probabilities between distant levels lie below the range of float32. The score is that of the result."""
    process = m2s.RateMatrix.birth_death(torch.full((levels - 1,), 0.01), torch.full((levels - 1,), 0.01), m2s.Linear())
    x_t, t = torch.arange(levels).unsqueeze(0), torch.tensor([time])
    score = torch.rand(1, levels, levels, generator=torch.Generator().manual_seed(levels))
    found = m2s.affine_inverse(score, x_t, t, process)
    assert found.dtype == torch.float32 and found.isfinite().all()
    torch.testing.assert_close(found.sum(-1), torch.ones(1, levels), rtol=0, atol=1e-4 * float(found.abs().amax()))
    counted = process.rates_into(x_t, t) > 0  # the neighbors
    bridge = m2s.score_from_posterior(found.double(), x_t, t.double(), process)
    rounding = 1e-5 / (0.01 * time)  # the bridge divides the rounding errors of the result by the probability of a jump
    torch.testing.assert_close(bridge[counted], score.double()[counted], rtol=0, atol=rounding)


X, T, VALUES = torch.zeros(2, 3, dtype=torch.long), torch.full((2,), 0.5), torch.full((2, 3, 6), 1 / 6)
CONVERSIONS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    **{
        function.__name__: (function, (VALUES, X, T))
        for function in (
            m2s.score_from_posterior,
            m2s.score_from_leave_one_out,
            m2s.posterior_from_leave_one_out,
            m2s.leave_one_out_from_posterior,
            m2s.rate_from_score,
            m2s.score_from_rate,
            m2s.affine_inverse,
            m2s.project,
            m2s.classify,
        )
    },
    "box": (m2s.box, (X, T)),
    "bridge_matrix": (bridge_matrix, (X, T)),
    "bayes_probabilities": (m2s.bayes_probabilities, (VALUES, X, T / 2, T)),
    "analytic_weights": (m2s.analytic_weights, (VALUES, X, T / 2, T)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_next_token_prediction_has_nothing_to_convert(name: str) -> None:
    function, arguments = CONVERSIONS[name]
    with pytest.raises(TypeError, match=r"process is Shifted\(5\), but next-token prediction corrupts nothing") as caught:
        function(*arguments, Shifted(5))
    assert isinstance(caught.value, UserError) and caught.value.option == "process"
