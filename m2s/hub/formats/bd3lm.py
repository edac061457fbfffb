"""BD3-LM (Arriola et al. 2025) with one block: `kuleshov-group/bd3lm-owt-block_size1024-pretrain`, or a folder of that form.

Where the block is as long as the sequence, its attention has no mask, and it is MDLM. Smaller blocks are denoised one after the
other, given the clean blocks before them. That is another model, which m2s does not have.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2s.heads import Posterior
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, Settings
from m2s.hub.formats.dit import INV_FREQ, PICKLED, Vocabulary, build_dit, read_weights, without_prefix
from m2s.hub.formats.lightning import check_block
from m2s.hub.formats.mdlm import PREFIX, network_config, recognize_kind
from m2s.hub.formats.tokenizers import find_mask, find_tokenizer
from m2s.process import Absorbing, Linear

BUFFERS = (INV_FREQ, "sampling_eps_min", "sampling_eps_max")  # ends of the times in training


def recognize(place: Path) -> dict[str, Any] | None:
    """Read BD3-LM's configuration.

    Args:
        place: A folder.

    Returns:
        The configuration; None where the folder is of another format.
    """
    return recognize_kind("bd3lm", place)


def load(folder: Path, values: Mapping[str, Any]) -> Loaded:
    """Load a checkpoint of BD3-LM whose block is the sequence.

    Args:
        folder: The folder.
        values: Its configuration (`recognize`).

    Returns:
        The network, its head, a description of its data, and its tokenizer.

    Raises:
        FileNotFoundError: There are no weights in the folder.
        ValueError: The block is shorter than the sequence, or the weights do not fit the configuration.
    """
    settings = Settings(values, "BD3-LM")
    if settings.get("cross_attn", True):
        check_block(settings.integer("block_size"), settings.integer("model_length"))
    if settings.get("causal", False):
        raise ValueError("causal is true: it is an autoregressive network, and m2s loads the diffusion models of this project")
    size, adaptive, noise = settings.integer("vocab_size"), bool(settings.get("adaln", True)), Linear()
    vocabulary = Vocabulary(size, find_mask(folder, size))
    conditioned = bool(settings.get("time_conditioning", False)) or not adaptive
    config = network_config(settings, size, noise if adaptive else None, conditioned, time=adaptive)
    model = build_dit(config, without_prefix(read_weights(folder, "BD3-LM"), PREFIX), vocabulary, BUFFERS)
    head = Posterior(Absorbing(vocabulary.clean, noise))
    return Loaded(model, head, {"kind": "text", "length": config.length}, find_tokenizer(folder, vocabulary))


FORMATS.add(
    "bd3lm",
    CheckpointFormat(
        name="bd3lm",
        title="BD3-LM with one block, on the hub",
        layout='config.json with model_type "bd3lm" and block_size = model_length; the rest as for MDLM',
        process="Absorbing, linear; Posterior",
        time="0, or sigma(t) where time_conditioning is on",
        tokenizer="GPT-2's, from its merges",
        recognize=recognize,
        load=load,
        files=(PICKLED,),
    ),
)
