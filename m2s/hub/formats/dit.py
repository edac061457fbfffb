"""The transformer that SEDD, MDLM, UDLM, DUO, GIDD, RADD and BD3-LM share, as our DiT: names of tensors and the vocabulary.

Their networks differ in what they are given in place of the time, and in norms with or without bias. The tensors are the same.
The rows of the embedding and of the last layer are in the order of their token ids, with the mask anywhere and padding at the
end. Ours have the clean tokens, then the mask, then our own padding.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2s.hub.config import limit_parameters
from m2s.hub.folder import WEIGHTS
from m2s.hub.tensors import TensorFaults, read_pickle, read_safetensors, tensors_by_name
from m2s.models import DiT, DiTConfig

PICKLED = "pytorch_model.bin"
COMPILED = "_orig_mod."  # torch.compile puts it into names
INV_FREQ = "rotary_emb.inv_freq"  # a buffer, determined by the width of an attention head

# Our names of tensors, then theirs: outside the blocks, and inside.
TOP_LEVEL_NAMES = {
    "embedding.weight": "vocab_embed.embedding",
    "condition.time": "sigma_map.mlp",
    "condition.label": "cond_map.embedding_table",
    "norm": "output_layer.norm_final",
    "modulation.linear": "output_layer.adaLN_modulation",
    "head": "output_layer.linear",
}
BLOCK_NAMES = {"attention.qkv": "attn_qkv", "attention.out": "attn_out", "modulation.linear": "adaLN_modulation"}


@dataclass(frozen=True)
class Vocabulary:
    """The token ids of another project.

    Args:
        size: The number of ids, with the mask and without padding.
        mask: The id of the mask; None for a model without a mask.
        rows: The rows of their embedding and last layer, padding included; None: `size`.
    """

    size: int
    mask: int | None = None
    rows: int | None = None

    @property
    def clean(self) -> int:
        """The number of clean tokens."""
        return self.size - (self.mask is not None)

    @property
    def padded(self) -> int:
        """The number of their rows."""
        return self.size if self.rows is None else self.rows

    def order(self) -> Tensor:
        """Return the ids in our order: clean tokens, and the mask last."""
        ids = torch.arange(self.size)
        if self.mask is None:
            return ids
        return torch.cat([ids[: self.mask], ids[self.mask + 1 :], ids[self.mask : self.mask + 1]])


def their_name(name: str) -> str:
    """Return their name of a tensor of our DiT.

    Args:
        name: The name in `DiT.state_dict()`.

    Returns:
        The name in their checkpoint.
    """
    found = re.match(r"blocks\.\d+\.", name)
    block = found.group() if found else ""
    inner = name.removeprefix(block)
    for ours, theirs in (BLOCK_NAMES if block else TOP_LEVEL_NAMES).items():
        if inner.startswith(ours):
            return block + theirs + inner.removeprefix(ours)
    return name


def read_weights(folder: Path, project: str, names: Sequence[str] = (WEIGHTS, PICKLED)) -> dict[str, Tensor]:
    """Read the tensors of a folder, by their names.

    Args:
        folder: The folder.
        project: Whose it is, for the message of an error.
        names: The names of files, the first that exists is read: .safetensors, or a pickle of tensors alone.

    Returns:
        Tensors by name.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or holds other objects.
    """
    for name in names:
        path = folder / name
        if path.exists():
            found = read_safetensors(path) if path.suffix == ".safetensors" else read_pickle(path)
            return tensors_by_name(found, path)
    listed = " or ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
    raise FileNotFoundError(f"{folder} holds a configuration of {project}, but none of {listed}")


def without_prefix(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return tensors with a prefix removed from names that have it.

    Args:
        weights: Tensors by name.
        prefix: The prefix, such as "backbone.". A name without it stays, and is reported as unexpected.

    Returns:
        Tensors by name.
    """
    return {name.removeprefix(prefix): value for name, value in weights.items()}


def without_compiled(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors with the names that they have without torch.compile.

    Args:
        weights: Tensors by name.

    Returns:
        Tensors by name.
    """
    return {name.replace(COMPILED, ""): value for name, value in weights.items()}


def build_dit(
    config: DiTConfig, given: Mapping[str, Tensor], vocabulary: Vocabulary, unused: Iterable[str] = (INV_FREQ,)
) -> DiT:
    """Build our DiT with their weights, in float32.

    Args:
        config: Its configuration.
        given: Their tensors by name.
        vocabulary: Their token ids.
        unused: Names that may be present and are not parameters, such as buffers.

    Returns:
        The network.

    Raises:
        ValueError: Tensors are missing or unexpected, or have another shape. The message lists them.
    """
    # Initial weights are replaced below and must not use up random numbers.
    with torch.random.fork_rng(devices=[]), limit_parameters([value.shape for value in given.values()]):
        model = DiT(config)
    model.load_state_dict(_renamed(model, given, vocabulary, set(unused)), assign=True)
    return model


def _renamed(model: DiT, given: Mapping[str, Tensor], vocabulary: Vocabulary, unused: set[str]) -> dict[str, Tensor]:
    """The weights under our names, in float32, with rows in our order and the vocabulary padded with zeros."""
    weights, faults, order = {}, TensorFaults(), vocabulary.order()
    for name, ours in model.state_dict().items():
        theirs, shape = their_name(name), list(ours.shape)
        has_vocabulary = name.split(".")[0] in ("embedding", "head")
        if has_vocabulary:
            shape[0] = vocabulary.padded
        if theirs not in given:
            faults.missing.append(theirs)
        elif list(given[theirs].shape) != shape:
            faults.other.append(f"{theirs} has shape {list(given[theirs].shape)}, expected {shape}")
        elif not given[theirs].dtype.is_floating_point:
            faults.other.append(f"{theirs} has dtype {given[theirs].dtype}, expected a floating-point one")
        elif has_vocabulary:
            weights[name] = torch.zeros_like(ours)
            weights[name][: len(order)] = given[theirs][order]
        else:
            weights[name] = given[theirs].float().contiguous()
    known = {their_name(name) for name in model.state_dict()} | unused
    faults.unexpected += [name for name in given if name not in known]
    if faults:
        raise ValueError(f"the weights do not fit the network that the configuration describes: {faults}")
    return weights


def average_by_name(state: Any, ema: Any) -> dict[str, Any]:
    """Return averaged weights, which a training run stores as a list in the order of the network's parameters.

    Args:
        state: The network's state: tensors by name, in that order, with the buffer `rotary_emb.inv_freq`.
        ema: The state of the average, whose "shadow_params" is the list.

    Returns:
        The averaged tensors by name.

    Raises:
        KeyError: There is no list.
        TypeError: An argument has another type.
        ValueError: The list has another length.
    """
    names = [name for name in state if not name.endswith(INV_FREQ)]
    return dict(zip(names, ema["shadow_params"], strict=True))
