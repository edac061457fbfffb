"""Checkpoints of SEDD (Lou et al. 2023): `m2s.load("louaaron/sedd-small")`, a folder of that form, or a run of its training.

SEDD's network is our DiT with the total noise sigma(t) as its clock and, under a mask, an output that is scaled by sigma. The
tensors have other names, and our vocabulary is padded. A training run is loaded with its averaged (EMA) weights.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2s.data.tokenizer import GPT2, Tokenizer
from m2s.heads import LogScore
from m2s.hub.config import limit_parameters
from m2s.hub.folder import CONFIG, WEIGHTS
from m2s.hub.tensors import read_pickle, read_safetensors
from m2s.models import DiT, DiTConfig
from m2s.process import Absorbing, Geometric, LogLinear, Schedule, Uniform

PICKLED = "pytorch_model.bin"
FILES = (PICKLED,)  # files of a repository besides config.json and model.safetensors
RUN_CONFIG, RUN_STATE = ".hydra/config.yaml", "checkpoints-meta/checkpoint.pth"
SECTIONS = {"graph", "noise", "model", "tokens"}  # of SEDD's configuration
UNUSED = {"rotary_emb.inv_freq"}  # determined by the width of an attention head

# Our names of tensors, then SEDD's: outside the blocks, and inside.
TOP_LEVEL_NAMES = {
    "embedding.weight": "vocab_embed.embedding",
    "condition.time": "sigma_map.mlp",
    "norm": "output_layer.norm_final",
    "modulation.linear": "output_layer.adaLN_modulation",
    "head": "output_layer.linear",
}
BLOCK_NAMES = {"attention.qkv": "attn_qkv", "attention.out": "attn_out", "modulation.linear": "adaLN_modulation"}


def recognize(folder: Path) -> dict[str, Any] | None:
    """Read SEDD's configuration.

    Args:
        folder: A folder.

    Returns:
        The configuration; None where the folder is not a checkpoint of SEDD.
    """
    settings: Any = None
    if (folder / CONFIG).exists():
        try:
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return None
    elif (folder / RUN_CONFIG).exists():
        settings = _read_yaml(folder / RUN_CONFIG)
    return settings if isinstance(settings, dict) and settings.keys() >= SECTIONS and "format" not in settings else None


def load(folder: Path, settings: Mapping[str, Any]) -> tuple[DiT, LogScore, dict[str, Any], Tokenizer | None]:
    """Load a checkpoint of SEDD.

    Args:
        folder: The folder.
        settings: SEDD's configuration (`recognize`).

    Returns:
        The network, its head, a description of its data, and GPT-2's tokenizer. The tokenizer is None where SEDD was trained
        with another one, or where GPT-2's merges are not on this machine.

    Raises:
        FileNotFoundError: There are no weights in the folder.
        ValueError: The configuration is not supported, or the weights do not fit it.
    """
    tokens, graph = int(_get(settings, "tokens")), _get(settings, "graph.type")
    if graph not in ("uniform", "absorb"):
        raise ValueError(f"graph.type is {graph!r}, but it must be uniform or absorb")
    schedule = _schedule(settings)
    process = Absorbing(tokens, schedule) if graph == "absorb" else Uniform(tokens, schedule)
    scaled = bool(_get(settings, "model.scale_by_sigma"))
    if scaled and graph == "uniform":
        raise ValueError("model.scale_by_sigma is set, but graph.type is uniform: SEDD defines it for absorb only")
    length, given = int(_get(settings, "model.length")), _read(folder)
    # Initial weights are replaced below and must not use up random numbers.
    with torch.random.fork_rng(devices=[]), limit_parameters([value.shape for value in given.values()]):
        model = DiT(
            DiTConfig(
                process.states,
                width=int(_get(settings, "model.hidden_size")),
                depth=int(_get(settings, "model.n_blocks")),
                heads=int(_get(settings, "model.n_heads")),
                condition_width=int(_get(settings, "model.cond_dim")),
                dropout=float(_get(settings, "model.dropout")),
                length=length,
                clock=schedule,
            )
        )
    model.load_state_dict(_renamed(model, given), assign=True)
    return model, LogScore(process, "sigma" if scaled else "none"), {"kind": "text", "length": length}, _tokenizer(tokens)


def _schedule(settings: Mapping[str, Any]) -> Schedule:
    """The noise schedule of a configuration."""
    kind = _get(settings, "noise.type")
    if kind == "loglinear":
        return LogLinear(eps=1e-3)
    if kind == "geometric":
        return Geometric(*(float(_get(settings, f"noise.{name}")) for name in ("sigma_min", "sigma_max")))
    raise ValueError(f"noise.type is {kind!r}, but it must be loglinear or geometric")


def _get(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key."""
    value: Any = settings
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"SEDD's configuration has no {key}: download the file again")
        value = value[name]
    return value


def _tokenizer(tokens: int) -> Tokenizer | None:
    """GPT-2's tokenizer, where the vocabulary is GPT-2's and its merges are on this machine."""
    tokenizer = GPT2()
    if tokens != tokenizer.vocab:
        return None
    try:
        tokenizer.encode("")
    except (FileNotFoundError, ImportError):
        return None
    return tokenizer


def _read(folder: Path) -> Mapping[str, Tensor]:
    """The tensors, by SEDD's names; of a training run the averaged ones."""
    for name in (WEIGHTS, PICKLED, RUN_STATE):
        path = folder / name
        if path.exists():
            found = read_safetensors(path) if name == WEIGHTS else read_pickle(path)
            found = _averaged(found, path) if name == RUN_STATE else found
            if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
                raise ValueError(f"{path} does not hold tensors by name: download it again")
            return found
    raise FileNotFoundError(f"{folder} holds a configuration of SEDD, but none of {WEIGHTS}, {PICKLED} and {RUN_STATE}")


def _averaged(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The averaged weights of a training run. SEDD stores them as a list, in the order of the model's parameters."""
    try:
        names = [name for name in state["model"] if name not in UNUSED]
        return dict(zip(names, state["ema"]["shadow_params"], strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a state of SEDD's training, which holds model and ema: {error!r}") from None


def their_name(name: str) -> str:
    """Return SEDD's name of a tensor of our DiT.

    Args:
        name: The name in `DiT.state_dict()`.

    Returns:
        The name in SEDD's checkpoint.
    """
    found = re.match(r"blocks\.\d+\.", name)
    block = found.group() if found else ""
    inner = name.removeprefix(block)
    for ours, theirs in (BLOCK_NAMES if block else TOP_LEVEL_NAMES).items():
        if inner.startswith(ours):
            return block + theirs + inner.removeprefix(ours)
    return name


def _renamed(model: DiT, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names, in float32, with the vocabulary padded with zeros."""
    weights, faults = {}, []
    for name, ours in model.state_dict().items():
        theirs, shape = their_name(name), list(ours.shape)
        if shape[0] == model.config.rows and name.split(".")[0] in ("embedding", "head"):
            shape[0] = model.config.states
        if theirs not in given:
            faults.append(f"{theirs} is missing")
        elif list(given[theirs].shape) != shape:
            faults.append(f"{theirs} has shape {list(given[theirs].shape)}, expected {shape}")
        else:
            weights[name] = torch.zeros_like(ours)
            weights[name][: shape[0]] = given[theirs]
    known = {their_name(name) for name in model.state_dict()} | UNUSED
    faults += [f"{name} is unexpected" for name in given if name not in known]
    if faults:
        listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"the weights do not fit the network that SEDD's configuration describes: {listed}")
    return weights


def _read_yaml(path: Path) -> Any:
    """The contents of a YAML file. PyYAML is optional."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(f"reading {path} needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Copy the file again") from None
