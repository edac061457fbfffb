"""MD4's transformer for text (Shi et al. 2024): the work folder of its training, with checkpoints of orbax.

MD4 has released code, and no weights. Its training does not store its configuration. Write it beside the folder `checkpoints`:
`open("config.json", "w").write(config.to_json_best_effort())`. The arrays are read without JAX (`m2s.hub.orbax`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2s.heads import Posterior
from m2s.hub.config import limit_parameters
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, Settings, read_config
from m2s.hub.formats.dit import Vocabulary
from m2s.hub.formats.tokenizers import find_tokenizer
from m2s.hub.orbax import read_orbax
from m2s.hub.tensors import TensorFaults
from m2s.models.md4 import ACTIVATIONS, MD4Transformer, MD4TransformerConfig
from m2s.process import Absorbing, Cosine, Linear, Rescaled

KEYS = {"noise_schedule", "feature_dim", "num_heads", "mlp_type", "time_features", "vocab_size", "data_shape"}
CHECKPOINTS, ITEM, AVERAGE, RAW = "checkpoints", "train_state", "ema_params.classifier.", "params.classifier."
EPS = 1e-4  # of the schedules in MD4's code
# Our names of parameters, then MD4's; kernels are transposed.
NAMES = {
    "embedding.weight": "Transformer_0.Embed_0.embedding",
    "condition.time.0": "CondEmbedding_0.dense0",
    "condition.time.2": "CondEmbedding_0.Dense_0",
    "modulation": "Transformer_0.Dense_0",
    "head": "Transformer_0.Dense_1",
}
BLOCK_NAMES = {
    "out": "attention.wo",
    "gate": "feed_forward.w1",
    "down": "feed_forward.w2",
    "up": "feed_forward.w3",
    "modulation": "Dense_0",
}


def recognize(place: Path) -> dict[str, Any] | None:
    """Read MD4's configuration.

    Args:
        place: A folder.

    Returns:
        The configuration; None where the folder is of another format.
    """
    settings = read_config(place) if place.is_dir() else None
    if settings is None or not settings.keys() >= KEYS or not (place / CHECKPOINTS).is_dir():
        return None
    return settings


def load(folder: Path, values: Mapping[str, Any]) -> Loaded:
    """Load the last checkpoint of a training of MD4.

    Args:
        folder: The work folder.
        values: MD4's configuration (`recognize`).

    Returns:
        The network with its averaged weights, its head, a description of its data, and GPT-2's tokenizer. The tokenizer is None
        where its merges are not on this machine.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ImportError: tensorstore is not installed.
        ValueError: The configuration is not supported, or the weights do not fit it.
    """
    settings = Settings(values, "MD4")
    settings.choice("task_type", {"text": True}, "text")
    settings.choice("model_type", {"md4": True}, "md4")
    settings.choice("time_features", {"t": True})
    settings.choice("cond_type", {"adaln": True, "adaln_zero": True}, "adaln")
    settings.choice("outside_embed", {False: True}, False)
    schedule = settings.choice("noise_schedule", {"linear": Linear(), "cosine": Cosine()})
    shape, clean = settings.get("data_shape"), settings.integer("vocab_size")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise ValueError(f"data_shape is {shape!r}, but it must be [length]: the U-Net for images is not loaded")
    given = _read(folder)
    feature, heads = settings.integer("feature_dim"), settings.integer("num_heads")
    config = MD4TransformerConfig(
        clean + 1,
        width=feature * heads,
        depth=settings.integer("n_layers"),
        heads=heads,
        hidden=_hidden(given),
        condition_width=feature,
        gate=settings.choice("mlp_type", {name: name for name in ACTIVATIONS}),
        length=shape[0],
    )
    with torch.random.fork_rng(devices=[]), limit_parameters([value.shape for value in given.values()]):
        model = MD4Transformer(config)
    model.load_state_dict(_renamed(model, given), assign=True)
    head = Posterior(Absorbing(clean, Rescaled(schedule, EPS)))
    vocabulary = Vocabulary(clean + 1, clean)
    return Loaded(model, head, {"kind": "text", "length": shape[0]}, find_tokenizer(folder, vocabulary))


def _read(folder: Path) -> dict[str, Tensor]:
    """The arrays of the last step by name, averaged ones where there are any."""
    steps = sorted(int(path.name) for path in (folder / CHECKPOINTS).iterdir() if path.name.isdecimal() and path.is_dir())
    if not steps or not (folder / CHECKPOINTS / str(steps[-1]) / ITEM).is_dir():
        raise FileNotFoundError(f"{folder / CHECKPOINTS} holds no step with {ITEM}: copy a complete folder, such as 1000000/")
    item = folder / CHECKPOINTS / str(steps[-1]) / ITEM
    return read_orbax(item, AVERAGE) or read_orbax(item, RAW)


def _hidden(given: Mapping[str, Tensor]) -> int:
    """The hidden features of the MLPs, which MD4 computes from the width."""
    first = given.get("Transformer_0.TransformerBlock_0.feed_forward.w1.kernel")
    if first is None or first.ndim != 2:
        raise ValueError("the checkpoint has no matrix Transformer_0.TransformerBlock_0.feed_forward.w1.kernel")
    return first.shape[1]


def _parts(name: str) -> list[str]:
    """MD4's names of the arrays that make up a parameter of ours: three for queries, keys and values, else one."""
    found = re.match(r"blocks\.(\d+)\.", name)
    start = f"Transformer_0.TransformerBlock_{found[1]}." if found else ""
    inner, _, kind = name[len(found.group()) if found else 0 :].rpartition(".")
    if not found and name in NAMES:
        return [NAMES[name]]
    suffix = "kernel" if kind == "weight" else "bias"
    if inner == "qkv":
        return [f"{start}attention.{part}.{suffix}" for part in ("wq", "wk", "wv")]
    return [f"{start}{(BLOCK_NAMES if found else NAMES)[inner]}.{suffix}"]


def _renamed(model: MD4Transformer, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names."""
    weights, faults, known = {}, TensorFaults(), set()
    for name, ours in model.state_dict().items():
        parts = _parts(name)
        known.update(parts)
        shape = list(ours.shape)
        shape[0] //= len(parts)
        for part in parts:
            value = given.get(part)
            wanted = shape if part.endswith("embedding") else shape[::-1]
            if value is None:
                faults.missing.append(part)
            elif list(value.shape) != wanted:
                faults.other.append(f"{part} has shape {list(value.shape)}, expected {wanted}")
        if not faults:
            arrays = [given[part] if part.endswith("embedding") else given[part].t() for part in parts]
            weights[name] = torch.cat(arrays).contiguous()
    faults.unexpected += [name for name in given if name not in known]
    if faults:
        raise ValueError(f"the weights do not fit the network that the configuration describes: {faults}")
    return weights


FORMATS.add(
    "md4",
    CheckpointFormat(
        name="md4",
        title="MD4, its transformer for text",
        layout="config.json that you write (`config.to_json_best_effort()`) beside checkpoints/STEP/train_state of orbax",
        process="Absorbing, linear or cosine, rescaled by 1e-4; Posterior",
        time="t in [0, 1]",
        tokenizer="GPT-2's, from its merges",
        recognize=recognize,
        load=load,
    ),
)
