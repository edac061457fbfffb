"""An adapter for denoisers of the package transformers, which take token ids and return an output with logits."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s import validation
from m2s.errors import UserError
from m2s.modes import evaluation_mode

CANVAS = "decoder_input_ids"  # the argument for noisy tokens, where there is another one for a clean prompt


class TransformersNetwork(nn.Module):
    """A network of transformers, called as those of this library: model(x_t, t, condition) -> logits [B, L, V].

    The network is given tokens alone, so that its output does not depend on the time. One with an encoder for a clean prompt,
    such as DiffusionGemma, reads `prompt`, or the prompts of the samples as `condition`.

    Args:
        network: Called as network(input_ids=...), or with `decoder_input_ids` too. It returns logits, an object with `logits`,
            or a tuple that begins with them.
        shift: The logits at position i predict the token at i + 1, as in Dream and other networks that were autoregressive.
            Those of the first position are then used twice, as in Dream's code.
        prompt: Token ids of the prompt, [P], for a network with an encoder.

    Raises:
        UserError: There is a prompt, and the network has no encoder; or it has one, and there is none.
    """

    network: Callable[..., Any]

    def __init__(self, network: Callable[..., Any], shift: bool = False, prompt: Int[Tensor, "P"] | None = None) -> None:
        super().__init__()
        validation.boolean("shift", shift)
        self.network, self.shift = network, shift
        called: Callable[..., Any] = network.forward if isinstance(network, nn.Module) else network
        self.has_encoder = CANVAS in inspect.signature(called).parameters
        if prompt is not None and not self.has_encoder:
            hint = "give it to m2s.sample as clamp, at the positions it has in the text"
            raise UserError(option="prompt", reason="the network has no encoder", hint=hint)
        if prompt is not None:
            validation.tensor("prompt", prompt)
        self.prompt: Tensor | None
        self.register_buffer("prompt", None if prompt is None else prompt.long().reshape(1, -1), persistent=False)

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Tensor | None = None, condition: Int[Tensor, "B P"] | None = None
    ) -> Float[Tensor, "B L V"]:
        """Call the network.

        Args:
            x_t: Token ids of the network, [B, L].
            t: Times, which are ignored.
            condition: Token ids of a prompt for each sample, [B, P], for a network with an encoder; None: `prompt`.

        Returns:
            Logits, [B, L, V].

        Raises:
            UserError: A condition is given to a network without an encoder, or there is no prompt for one with an encoder.
        """
        logits = self._logits(x_t, condition)
        return torch.cat([logits[:, :1], logits[:, :-1]], 1) if self.shift else logits

    def _logits(self, x_t: Tensor, condition: Tensor | None) -> Tensor:
        """The logits as the network returns them, [B, L, V]."""
        if not self.has_encoder:
            if condition is not None:
                raise UserError(option="condition", reason="the network has no encoder that could read it")
            output = self.network(input_ids=x_t.long())
        else:
            prompt = self.prompt if condition is None else condition.long()
            if prompt is None:
                raise UserError(option="prompt", reason="the network has an encoder", hint="give prompt, or condition [B, P]")
            output = self.network(input_ids=prompt.expand(len(x_t), -1), decoder_input_ids=x_t.long())
        logits: Tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
        return logits

    @torch.no_grad()
    def check_bidirectional(self, first: int, second: int, condition: Tensor | None = None) -> None:
        """Check that a position sees the positions after it, by two calls that differ in the last token.

        Args:
            first: A token id.
            second: Another token id.
            condition: A prompt, [1, P], where the network needs one.

        Raises:
            UserError: The last token changes the logits after it alone, as in a causal network.
        """
        device = next((weight.device for weight in self.parameters()), None)
        ids = torch.full((2, 4), first, device=device)
        ids[1, -1] = second
        condition = None if condition is None else condition.expand(2, -1)
        with evaluation_mode(self):
            one, two = self._logits(ids, condition)
        changed = (one != two).any(-1)
        if bool(changed[-1]) and not bool(changed[:-1].any()):
            hint = "build it with bidirectional attention (is_causal=False), as its authors do for diffusion"
            raise UserError(option="model", reason="a position does not see the tokens after it: it is causal", hint=hint)
