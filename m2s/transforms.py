"""Whether a function transform of torch is active: `torch.func` (grad, vjp, jvp, vmap, hessian, ...) or forward-mode AD.

Also whether tensors have values at all.
"""

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Return whether a `torch.func` transform or forward-mode differentiation is active.

    Hand-written backward passes and kernels have no rules for these, and values of a batched tensor cannot be read.
    `torch.compile` traces the transforms by itself, so the answer is False while it does.
    """
    if torch.compiler.is_compiling():
        return False
    # torch has no public function for this; `torch.autograd.Function.apply` asks the same.
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def is_fake() -> bool:
    """Return whether new tensors have shapes but no values: inside torch's FakeTensorMode."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
