"""Which derivatives an operation has, and clear errors for the others.

The losses over the vocabulary and the Triton kernels have hand-written backward passes. These give first derivatives. Plain
torch serves for the rest:

- The losses of logits compute a second derivative (`create_graph=True`) from their differentiable form.
- The Triton kernels have none. Their backward pass raises an error, because a gradient without a graph would count as a
  constant.
- Inside a `torch.func` transform (grad, vjp, jvp, vmap, hessian, ...) and in forward-mode differentiation every operation uses
  its differentiable form (`m2s.transforms.is_transformed`).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def wants_graph() -> bool:
    """Return, inside a backward pass, whether it was called with `create_graph=True`.

    Autograd enables gradients in a backward pass only then. A compiled backward pass answers False: it raises its own error.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def first_derivative_only(operation: str) -> None:
    """Raise an error, inside a backward pass, if it was called with `create_graph=True`.

    Args:
        operation: Name of the operation, the beginning of the message.

    Raises:
        RuntimeError: A graph of the gradient is wanted. The message names the backend that has one.
    """
    if wants_graph():
        raise RuntimeError(
            f"{operation} has first derivatives only, but create_graph=True asks for second ones: compute the forward pass "
            'inside m2s.ops.use_backend("reference")'
        )


def constant_inputs(operation: str, *inputs: Tensor) -> None:
    """Raise an error if an input that an operation treats as a constant requires a gradient.

    Args:
        operation: Name of the operation, the beginning of the message.
        inputs: Inputs without a gradient: times, weights of the positions, and what is computed from them.

    Raises:
        RuntimeError: One of them requires a gradient, and gradients are enabled.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise RuntimeError(
            f"{operation} has no gradient with respect to times and weights, but one of them requires a gradient: compute the "
            'forward pass inside m2s.ops.use_backend("reference"), or detach them'
        )


def gradient_by_autograd(function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor) -> Tensor:
    """Compute, inside a backward pass, the gradient of a plain torch function; with a graph if one is wanted.

    Args:
        function: The function, written in operations that autograd differentiates any number of times.
        x: Its argument, as the forward pass saved it: connected to what it was computed from.
        upstream: Gradient of the result.

    Returns:
        The gradient, with the shape of `x`. With `create_graph=True` it can be differentiated in `x` and `upstream`.
    """
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if graph else x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x, upstream, create_graph=graph)
    return gradient
