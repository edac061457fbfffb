"""The last layer with operands in bf16: against the same operands in float64."""

import pytest
import torch

import m2s
from m2s.belief.output import _HalfOperands, last_layer

ROWS, WIDTH, COLUMNS = 40, 24, 65


@pytest.mark.parametrize("biased", [False, True])
def test_bf16_operands_are_added_up_in_float32(biased: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=rng).bfloat16().requires_grad_()
    weight = torch.randn(COLUMNS, WIDTH, generator=rng).requires_grad_()
    bias = (10 * torch.randn(COLUMNS, generator=rng)).requires_grad_() if biased else None
    upstream = torch.randn(ROWS, COLUMNS, generator=rng)
    logits = _HalfOperands.apply(hidden, weight, bias)
    logits.backward(upstream)
    assert logits.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32

    wide, rounded, narrow = hidden.detach().double(), weight.detach().bfloat16().double(), upstream.bfloat16().double()
    exact = wide @ rounded.t() + (bias.detach().double() if biased else 0)
    torch.testing.assert_close(logits.detach().double(), exact, rtol=0, atol=2e-4 if biased else 1e-5)  # 2^-17 of the bias
    torch.testing.assert_close(weight.grad.double(), narrow.t() @ wide, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), narrow @ rounded, rtol=2**-8, atol=1e-5)
    if biased:
        torch.testing.assert_close(bias.grad.double(), narrow.sum(0), rtol=1e-5, atol=1e-5)


def test_on_a_cpu_hidden_states_in_bf16_are_widened() -> None:
    hidden, weight = torch.randn(3, 5, 8).bfloat16(), torch.randn(11, 8)
    assert torch.equal(last_layer(hidden, weight, None), hidden.float() @ weight.t())
    output = m2s.Unprojected(hidden, weight)
    with pytest.raises(ValueError, match="weight has 11 rows, but the process has 12 states"):
        m2s.Posterior(m2s.Uniform(12, m2s.Linear())).posterior(
            output, torch.zeros(3, 5, dtype=torch.long), torch.full((3,), 0.5)
        )
