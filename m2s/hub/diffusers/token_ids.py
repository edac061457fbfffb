"""Ids of tokens: a network of a pipeline may have the mask elsewhere than as the last state of the process."""

import torch
from torch import Tensor

from m2s.errors import UserError
from m2s.models.mask_at import MaskAt, move_entry
from m2s.process import Process


def from_pipeline(process: Process, sample: Tensor, output: Tensor, mask: int | None) -> tuple[Tensor, Tensor]:
    """Return tokens and logits with the mask as the last state of the process.

    Args:
        process: The forward process.
        sample: Tokens in the ids of the network, [B, L].
        output: The output of the network, [B, L, V].
        mask: The id of the mask in the network's vocabulary; None: the last state of the process.

    Returns:
        Tokens, [B, L], and logits, [B, L, V].

    Raises:
        UserError: The process has no mask.
    """
    if mask is None or mask == process.mask:
        return sample.long(), output
    if process.mask is None:
        raise UserError(option="mask_token_id", value=mask, reason=f"the process {process} has no mask")
    return _adapter(process, mask).from_network(sample), move_entry(output, -1, mask, process.vocab)


def to_pipeline(process: Process, tokens: Tensor, mask: int | None) -> Tensor:
    """Return tokens in the ids of the network.

    Args:
        process: The forward process.
        tokens: Tokens in the ids of the process, [B, L].
        mask: The id of the mask in the network's vocabulary; None: the last state of the process.

    Returns:
        Tokens, [B, L].
    """
    return tokens if mask is None or mask == process.mask else _adapter(process, mask).to_network(tokens)


def _adapter(process: Process, mask: int) -> MaskAt:
    """Converts ids; its network is not used."""
    return MaskAt(torch.nn.Identity(), mask, process.vocab)
