"""Errors of a loss and its gradients against float64 on the same operands."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.benchmark.comparison import Comparison
from m2s.benchmark.inputs import Inputs
from m2s.ops import use_backend

Call = Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]  # row weights -> weighted losses, gradients of their sum
ENTRIES = 1 << 25  # float64 logits in memory at once
GRADIENT_ROWS = 256  # rows whose gradients are compared


def accuracy(comparison: Comparison, inputs: Inputs, head: m2s.Head, x_t: Tensor, forms: dict[str, Call]) -> dict[str, Any]:
    """Measure the errors of several implementations of score entropy against float64.

    Args:
        comparison: Receives what fails.
        inputs: Inputs of the last layer.
        head: The head.
        x_t: [N] noisy tokens.
        forms: The implementations by name: row weights -> weighted losses, gradients of their sum.

    Returns:
        For each implementation: the relative error of the batch mean (`mean_error`), the same with its sign and divided by its
        standard error over rows, and relative errors of the gradients of up to 256 rows in norm.
    """
    count = len(inputs.x_0)
    truth = _losses(inputs, head, x_t)
    some = torch.arange(0, count, max(1, count // GRADIENT_ROWS), device=truth.device)[:GRADIENT_ROWS]
    gradients = _gradients(inputs, head, x_t, some)
    all_rows = torch.full_like(truth, 1 / count)
    some_rows = torch.zeros_like(truth).index_fill(0, some, 1 / len(some))

    def measure(call: Call) -> dict[str, float]:
        error = call(all_rows)[0].double() * count - truth
        _, (hidden, weight, _) = call(some_rows)
        gradient = {"hidden": hidden[some], "weight": weight}
        mean = truth.mean()
        return {
            "mean_error": float(error.mean().abs() / mean),
            "signed_error": float(error.mean() / mean),
            "signed_error_in_standard_errors": float(error.mean() / (error.std() / count**0.5)),
            **{
                f"{name}_gradient_error": float((gradient[name].double() - gradients[name]).norm() / gradients[name].norm())
                for name in gradient
            },
        }

    measured = {name: comparison.attempt(name, partial(measure, call)) for name, call in forms.items()}
    return {name: errors for name, errors in measured.items() if errors is not None}


@torch.no_grad()
def _losses(inputs: Inputs, head: m2s.Head, x_t: Tensor) -> Tensor:
    """Return the losses of all rows in float64, in chunks."""
    hidden, weight = (value.double() for value in inputs.operands)
    rows = max(1, ENTRIES // len(weight))
    parts = []
    with use_backend("reference"):
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            logits = hidden[at] @ weight.t() + inputs.bias.double()
            parts.append(m2s.score_entropy(head, logits, inputs.x_0[at], x_t[at], inputs.t[at]))
    return torch.cat(parts)


def _gradients(inputs: Inputs, head: m2s.Head, x_t: Tensor, some: Tensor) -> dict[str, Tensor]:
    """Return the gradients in float64 of the mean loss of some rows."""
    hidden, weight = inputs.operands
    leaves = hidden[some].double().requires_grad_(), weight.double().requires_grad_()
    with use_backend("reference"):
        logits = leaves[0] @ leaves[1].t() + inputs.bias.detach().double()
        value = m2s.score_entropy(head, logits, inputs.x_0[some], x_t[some], inputs.t[some]).mean()
    return dict(zip(("hidden", "weight"), torch.autograd.grad(value, leaves), strict=True))
