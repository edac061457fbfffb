"""A network prepared for many calls: in bf16, compiled, or with its last layer left to the draw."""

import copy
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s.ops.last_layer import Output

LARGE = 4096  # states from which on the last layer is left to the draw, which multiplies it out for a few sites at a time


class InferenceModel(nn.Module):
    """A network as a sampler calls it. It shares the weights of `model` and changes none of its attributes.

    Args:
        model: The network.
        states: The number of states of the process. From 4,096 on the network returns `m2s.Unprojected`, if it can.
        bf16: Call it under autocast to bfloat16. Logits are float32 in any case.
        compiled: Compile its forward with `torch.compile`.
    """

    def __init__(self, model: nn.Module, states: int, bf16: bool = False, compiled: bool = False) -> None:
        super().__init__()
        unprojects = hasattr(model, "unprojected") and states >= LARGE
        self.model, self.bf16 = _without_last_layer(model) if unprojects else model, bf16
        call: Callable[..., Output] = torch.compile(self.model.forward, dynamic=False) if compiled else self.model
        self._call = [call]  # in a list, so that a module is not registered as a second copy of the weights

    @property
    def padding_id(self) -> int | None:
        """The id that the model reads as padding; None where it has none."""
        number: int | None = getattr(self.model, "padding_id", None)
        return number

    def new_cache(self, samples: int, length: int) -> Tensor | None:
        """Return an empty key-value cache of the model, in the dtype in which it is called; None where it has none.

        Args:
            samples: Rows of every call.
            length: The length of the sequence.

        Returns:
            The cache, [layers, 2, samples, ...], or None.
        """
        new_cache: Callable[[int, int], Tensor | None] | None = getattr(self.model, "new_cache", None)
        with torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16, enabled=self.bf16):
            return None if new_cache is None else new_cache(samples, length)

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"], condition: Int[Tensor, "B"] | None = None, **cached: Tensor
    ) -> Output:
        """Call the network.

        Args:
            x_t: Tokens, [B, L].
            t: Times, [B].
            condition: Conditions, [B], or None.
            cached: `cache` and `at` of a network with a key-value cache.

        Returns:
            Logits, [B, L, >= S], or `m2s.Unprojected`.
        """
        given = (x_t, t) if condition is None else (x_t, t, condition)
        with torch.autocast(x_t.device.type, torch.bfloat16, enabled=self.bf16):
            return self._call[0](*given, **cached)


def _without_last_layer(model: nn.Module) -> nn.Module:
    """A copy of a network that returns `m2s.Unprojected`. It shares weights and layers.

    Setting `unprojected` of the network itself for the time of a call would also change calls that other threads make.
    """
    copied = copy.copy(model)
    if "unprojected" not in vars(model):  # an adapter, such as `m2s.models.MaskAt`, which passes it on to its network
        inner = {name: child for name, child in model._modules.items() if child is not None and hasattr(child, "unprojected")}
        copied._modules = {**model._modules, **{name: _without_last_layer(child) for name, child in inner.items()}}
    copied.unprojected = True  # type: ignore[assignment]
    return copied
