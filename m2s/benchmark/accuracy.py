"""How far a loss and its gradients are from float64 on the same operands."""

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
ENTRIES = 1 << 25  # float64 logits at once
ROWS = 256  # whose gradients are compared


def accuracy(contest: Comparison, given: Inputs, head: m2s.Head, x_t: Tensor, forms: dict[str, Call]) -> dict[str, Any]:
    """Of each form: the relative error of the batch mean; the mean signed error over rows, relative to the mean and divided by
    its own standard error; the relative error of the gradients of some rows, in norm."""
    count = len(given.x_0)
    truth = _losses(given, head, x_t)
    some = torch.arange(0, count, max(1, count // ROWS), device=truth.device)[:ROWS]
    gradients = _gradients(given, head, x_t, some)
    all_rows = torch.full_like(truth, 1 / count)
    some_rows = torch.zeros_like(truth).index_fill(0, some, 1 / len(some))

    def measure(call: Call) -> dict[str, float]:
        error = call(all_rows)[0].double() * count - truth
        _, (hidden, weight, _) = call(some_rows)
        found = {"hidden": hidden[some], "weight": weight}
        mean = truth.mean()
        return {
            "mean_error": float(error.mean().abs() / mean),
            "signed_error": float(error.mean() / mean),
            "signed_error_in_standard_errors": float(error.mean() / (error.std() / count**0.5)),
            **{
                f"{name}_gradient_error": float((found[name].double() - gradients[name]).norm() / gradients[name].norm())
                for name in found
            },
        }

    measured = {name: contest.attempt(name, partial(measure, call)) for name, call in forms.items()}
    return {name: errors for name, errors in measured.items() if errors is not None}


@torch.no_grad()
def _losses(given: Inputs, head: m2s.Head, x_t: Tensor) -> Tensor:
    hidden, weight = (value.double() for value in given.halves)
    rows = max(1, ENTRIES // len(weight))
    parts = []
    with use_backend("reference"):
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            logits = hidden[at] @ weight.t() + given.bias.double()
            parts.append(m2s.score_entropy(head, logits, given.x_0[at], x_t[at], given.t[at]))
    return torch.cat(parts)


def _gradients(given: Inputs, head: m2s.Head, x_t: Tensor, some: Tensor) -> dict[str, Tensor]:
    """Of the mean loss of some rows."""
    hidden, weight = given.halves
    leaves = hidden[some].double().requires_grad_(), weight.double().requires_grad_()
    with use_backend("reference"):
        logits = leaves[0] @ leaves[1].t() + given.bias.detach().double()
        value = m2s.score_entropy(head, logits, given.x_0[some], x_t[some], given.t[some]).mean()
    return dict(zip(("hidden", "weight"), torch.autograd.grad(value, leaves), strict=True))
