"""GELU after a linear layer: values and gradients against float64."""

import pytest
import torch
from torch import Tensor

from m2s.ops.gelu import ROWS, linear_gelu, naive

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def with_gradients(inputs: list[Tensor], upstream: Tensor, dtype: torch.dtype, fused: bool) -> list[Tensor]:
    """The result, and the gradients of x, weight and bias."""
    x, weight, bias = (value.detach().to(DEVICE, dtype).requires_grad_() for value in inputs)
    result = linear_gelu(x, weight, bias, fused)
    result.backward(upstream.to(result))
    return [result.detach(), x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 3, 4, 5), (1, ROWS + 1, 3, 130), (2, ROWS, 2, 7), (1, 3, 2, 1030)], ids=str
)
def test_values_and_gradients(shape):
    batch, length, width, wide = shape
    inputs = [3 * torch.randn(batch, length, width), torch.randn(wide, width), torch.randn(wide)]
    upstream = torch.randn(batch, length, wide)
    exact, found = (with_gradients(inputs, upstream, *how) for how in ((torch.float64, False), (torch.float32, True)))
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).norm() < 1e-5 * other.norm()


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_inputs():
    """gelu(h) is h or 0 there, with slope 1 or 0, and nothing overflows."""
    x = torch.tensor([[-1e15], [-50.0], [-20.0], [0.0], [20.0], [50.0], [1e15]])
    result, gradient, *_ = with_gradients([x, torch.ones(1, 1), torch.zeros(1)], torch.ones(7, 1), torch.float32, True)
    torch.testing.assert_close(result.cpu(), x.clamp_min(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient.cpu(), torch.tensor([[0, 0, 0, 0.5, 1, 1, 1]]).T, rtol=0, atol=1e-6)


def test_naive_is_the_formula():
    x, weight, bias = torch.randn(2, 3, 4).double(), torch.randn(5, 4).double(), torch.randn(5).double()
    h = x @ weight.T + bias
    expected = h / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    torch.testing.assert_close(naive.linear_gelu(x, weight, bias), expected)
