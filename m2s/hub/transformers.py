"""`m2s.from_transformers`: a masked or uniform denoiser of the package transformers as a checkpoint."""

from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from m2s import validation
from m2s.data.tokenizer import HuggingFace, Tokenizer
from m2s.errors import UserError
from m2s.heads import Head, Posterior
from m2s.hub.checkpoint import Checkpoint
from m2s.models.mask_at import MaskAt
from m2s.models.transformers_network import TransformersNetwork
from m2s.process import Process

SHIFTED = ("dream",)  # model types whose logits predict the next position


def from_transformers(
    model: nn.Module,
    process: Process,
    head: Head | None = None,
    *,
    mask: int | None = None,
    shift: bool | None = None,
    prompt: Int[Tensor, "P"] | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    length: int | None = None,
) -> Checkpoint:
    """Use a denoiser of transformers: LLaDA, Dream, DiffusionGemma, BERT, or any that returns logits for token ids.

    The mask becomes the last state, wherever it is in the vocabulary of the network: the columns of the logits are reordered,
    and `checkpoint.model.to_network` converts samples to the ids of the network. Columns that belong to no token are ignored.

    Args:
        model: The network, which is called with token ids alone.
        process: The process that it was trained on: `m2s.Absorbing(K, schedule)` or `m2s.Uniform(K, schedule)`. K is the number
            of clean tokens: the first K ids of the network that are not the mask.
        head: What the logits mean; None: the posterior under masks, and the leave-one-out distribution under uniform noise.
        mask: The id of the mask in the vocabulary of the network; None: `model.config.mask_token_id`.
        shift: The logits at position i predict the token at i + 1; None: where `model.config.model_type` is Dream.
        prompt: Token ids of a clean prompt, for a network with an encoder (DiffusionGemma).
        tokenizer: A tokenizer of m2s, or the path or name of one of transformers. It must have the clean tokens of the process;
            the mask is left out.
        length: The number of tokens of a text; None: samples need a length.

    Returns:
        The checkpoint: `.sample()`, `.evaluate()`, `m2s.audit(checkpoint)`. It cannot be saved, since the class of the network
        belongs to another package.

    Raises:
        UserError: The mask is missing, the network is causal, or the vocabularies differ.

    Example:
        >>> process = m2s.Absorbing(126_348, m2s.Linear())  # LLaDA: 126,349 ids, of which 126,336 is the mask
        >>> checkpoint = m2s.from_transformers(llada, process, mask=126_336, length=128)
        >>> text = checkpoint.model.to_network(checkpoint.sample(4, steps=64))
    """
    validation.instance("model", model, nn.Module, "a network of transformers")
    validation.instance("process", process, Process, "a process such as m2s.Absorbing(30_521, m2s.Linear())")
    settings = getattr(model, "config", None)
    if head is None:
        head = Posterior(process, offset="none" if process.mask is not None else "exact")
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    if head.process is not process:
        raise UserError(option="head", value=head, reason=f"the process is {process}", hint="make the head of that process")
    if shift is None:
        shift = str(getattr(settings, "model_type", "")).lower() in SHIFTED
    network = TransformersNetwork(model, shift, prompt)
    found = _mask_id(process, settings, mask)
    if not network.has_encoder or network.prompt is not None:
        first, second = [token for token in range(3) if token != found][:2]
        network.check_bidirectional(first, second)
    adapted = network if found is None else MaskAt(network, found, process.vocab)
    data: dict[str, Any] = {"kind": "text", "length": length}
    return Checkpoint(adapted.eval(), head, _tokenizer(tokenizer, process, found), data, {})


def _mask_id(process: Process, settings: Any, mask: int | None) -> int | None:
    """The id of the mask in the vocabulary of the network; None for a process without one."""
    if process.mask is None:
        if mask is not None:
            raise UserError(option="mask", value=mask, reason=f"{process} has no mask", hint="leave it out")
        return None
    found = getattr(settings, "mask_token_id", None) if mask is None else mask
    if not isinstance(found, int) or found < 0:
        hint = "give the id of the mask in the network's vocabulary"
        raise UserError(option="mask", reason="neither it nor model.config.mask_token_id is given", hint=hint)
    return found


def _tokenizer(given: Tokenizer | str | Path | None, process: Process, mask: int | None) -> Tokenizer | None:
    """The tokenizer, without the mask."""
    if given is None or isinstance(given, Tokenizer):
        found = given
    else:
        found = HuggingFace(str(given))
        if mask is not None and mask < found.vocab:
            found = HuggingFace(str(given), mask=mask)
    if found is not None and found.vocab != process.vocab:
        hint = f"give a process of {found.vocab:,} tokens"
        raise UserError(option="tokenizer", reason=f"it has {found.vocab:,} clean tokens, and the process {process}", hint=hint)
    return found
