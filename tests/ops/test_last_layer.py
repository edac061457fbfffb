"""Columns of the bias, appended to the operands of the last layer."""

import pytest
import torch

from m2s.ops.last_layer import append_bias_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16
SHAPES = [(1, 1), (7, 3), (8, 256), (9, 257), (33, 768), (0, 5)]


@pytest.mark.parametrize("extra", [2, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_append(shape, extra):
    """The rows, the rounded bias and its rounding error, or ones; zeros in all other columns."""
    rows, bias = torch.randn(shape, device=DEVICE), torch.randn(shape[0], device=DEVICE)
    found = append_bias_columns(rows, bias, extra, HALF)
    assert found.dtype == HALF and found.shape == (shape[0], shape[1] + extra)
    assert torch.equal(found[:, : shape[1]], rows.to(HALF))
    high, low = found[:, shape[1]], found[:, shape[1] + 1]
    assert torch.equal(high, bias.to(HALF))
    assert torch.equal(low, (bias - high.float()).to(HALF))
    assert not found[:, shape[1] + 2 :].any()
    ones = append_bias_columns(rows.to(HALF), None, extra, HALF)
    assert torch.equal(ones[:, : shape[1]], rows.to(HALF))
    assert (ones[:, shape[1] : shape[1] + 2] == 1).all() and not ones[:, shape[1] + 2 :].any()


def test_append_to_strided_rows():
    rows = torch.randn(5, 9, device=DEVICE)
    bias = torch.randn(9, 2, device=DEVICE)[:, 0]
    expected = append_bias_columns(rows.t().contiguous(), bias.contiguous(), 8, HALF)
    assert torch.equal(append_bias_columns(rows.t(), bias, 8, HALF), expected)
