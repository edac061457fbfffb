"""Checkpoints of SEDD (Lou et al. 2023): `m2s.load("louaaron/sedd-small")`, a folder of that form, or a run of its training.

Its network is our DiT with the total noise sigma(t) for a clock and, under a mask, an output scaled by sigma; the tensors are
the same but for their names, and for the rows that pad our vocabulary. A training run is read with its averaged weights.
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
from m2s.hub.folder import CONFIG, WEIGHTS
from m2s.hub.tensors import read_pickle, read_safetensors
from m2s.models import DiT, DiTConfig
from m2s.process import Absorbing, Geometric, LogLinear, Schedule, Uniform

PICKLED = "pytorch_model.bin"
FILES = (PICKLED,)  # what a repository may hold besides our own two names
RUN_CONFIG, RUN_STATE = ".hydra/config.yaml", "checkpoints-meta/checkpoint.pth"
SECTIONS = {"graph", "noise", "model", "tokens"}  # of its configuration
UNUSED = {"rotary_emb.inv_freq"}  # follows from the width of a head

# Our names, then theirs; the first table is for what lies outside the blocks.
OUTSIDE = {
    "embedding.weight": "vocab_embed.embedding",
    "condition.time": "sigma_map.mlp",
    "norm": "output_layer.norm_final",
    "modulation.linear": "output_layer.adaLN_modulation",
    "head": "output_layer.linear",
}
INSIDE = {"attention.qkv": "attn_qkv", "attention.out": "attn_out", "modulation.linear": "adaLN_modulation"}


def recognise(folder: Path) -> dict[str, Any] | None:
    """The configuration of SEDD in a folder; None where there is none."""
    settings: Any = None
    if (folder / CONFIG).exists():
        try:
            settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            return None
    elif (folder / RUN_CONFIG).exists():
        settings = _read_yaml(folder / RUN_CONFIG)
    return settings if isinstance(settings, dict) and settings.keys() >= SECTIONS and "format" not in settings else None


def load(folder: Path, settings: Mapping[str, Any]) -> tuple[DiT, LogScore, dict[str, Any], Tokenizer | None]:
    """The network with its weights, its head, what its data are, and GPT-2's tokenizer where that is what it was trained on
    and its merges are on this machine."""
    tokens, graph = int(_get(settings, "tokens")), _get(settings, "graph.type")
    if graph not in ("uniform", "absorb"):
        raise ValueError(f"graph.type is {graph!r}, but it must be uniform or absorb")
    schedule = _schedule(settings)
    process = Absorbing(tokens, schedule) if graph == "absorb" else Uniform(tokens, schedule)
    scaled = bool(_get(settings, "model.scale_by_sigma"))
    if scaled and graph == "uniform":
        raise ValueError("model.scale_by_sigma is set, but graph.type is uniform: SEDD defines it for absorb only")
    length = int(_get(settings, "model.length"))
    with torch.random.fork_rng(devices=[]):
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
    model.load_state_dict(_renamed(model, _read(folder)), assign=True)
    return model, LogScore(process, "sigma" if scaled else "none"), {"kind": "text", "length": length}, _tokenizer(tokens)


def _schedule(settings: Mapping[str, Any]) -> Schedule:
    kind = _get(settings, "noise.type")
    if kind == "loglinear":
        return LogLinear(eps=1e-3)
    if kind == "geometric":
        return Geometric(*(float(_get(settings, f"noise.{name}")) for name in ("sigma_min", "sigma_max")))
    raise ValueError(f"noise.type is {kind!r}, but it must be loglinear or geometric")


def _get(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"SEDD's configuration does not say {key}: take the file from a copy")
        value = value[name]
    return value


def _tokenizer(tokens: int) -> Tokenizer | None:
    tokenizer = GPT2()
    if tokens != tokenizer.vocab:
        return None
    try:
        tokenizer.encode("")
    except (FileNotFoundError, ImportError):
        return None
    return tokenizer


def _read(folder: Path) -> Mapping[str, Tensor]:
    """The tensors by their names, averaged ones where a training run has left both."""
    for name in (WEIGHTS, PICKLED, RUN_STATE):
        path = folder / name
        if path.exists():
            found = read_safetensors(path) if name == WEIGHTS else read_pickle(path)
            return _averaged(found, path) if name == RUN_STATE else found
    raise FileNotFoundError(f"{folder} holds a configuration of SEDD, but none of {WEIGHTS}, {PICKLED} and {RUN_STATE}")


def _averaged(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The average lists the parameters without their names, in the order in which the model names them."""
    try:
        names = [name for name in state["model"] if name not in UNUSED]
        return dict(zip(names, state["ema"]["shadow_params"], strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no state of SEDD's training, which holds model and ema: {error!r}") from None


def their_name(name: str) -> str:
    """What SEDD calls a tensor of our DiT."""
    found = re.match(r"blocks\.\d+\.", name)
    block = found.group() if found else ""
    inner = name.removeprefix(block)
    for ours, theirs in (INSIDE if block else OUTSIDE).items():
        if inner.startswith(ours):
            return block + theirs + inner.removeprefix(ours)
    return name


def _renamed(model: DiT, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`given` under our names, in float32, its vocabulary padded with zeros."""
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
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"the weights do not fit the network that SEDD's configuration describes: {shown}")
    return weights


def _read_yaml(path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(f"reading {path} needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Take it from a copy") from None
