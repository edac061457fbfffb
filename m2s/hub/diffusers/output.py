"""What a step of `M2SScheduler` returns."""

from dataclasses import dataclass

from diffusers.utils import BaseOutput
from torch import Tensor


@dataclass
class M2SSchedulerOutput(BaseOutput):
    """The output of one step, with the fields that diffusers' pipelines read.

    Args:
        prev_sample: Tokens after the step, [B, L].
        sampled_tokens: The same tokens.
        sampled_probs: Their posterior probabilities, [B, L]; 0 for a mask.
        pred_logits: The network's output, for self-conditioning; divided by the temperature that the configuration has, as in
            diffusers' `EntropyBoundScheduler`.
        transfer_index: True where a token changed, [B, L].
        editing_transfer_index: True where a token that was not the mask changed, [B, L].
    """

    prev_sample: Tensor
    sampled_tokens: Tensor
    sampled_probs: Tensor
    pred_logits: Tensor
    transfer_index: Tensor
    editing_transfer_index: Tensor
