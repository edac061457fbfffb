"""GIDD (von Rutte et al. 2025): `dvruette/gidd-small-p_unif-0.1` on the hub, or a folder of its training.

Its network is our DiT with t itself as its clock, in [0, 1]. It predicts the leave-one-out distribution of the clean token. A
folder of its training has rows up to a multiple of 128; those past the tokenizer's tokens are left out here, also from the
softmax, in which the authors have them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from m2s.heads import Posterior
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, Settings, read_config, read_yaml
from m2s.hub.formats.dit import INV_FREQ, PICKLED, Vocabulary, build_dit, read_weights, without_compiled
from m2s.hub.formats.tokenizers import FILE, find_tokenizer, mask_in, tokens_in
from m2s.models import DiTConfig
from m2s.process import Absorbing, Exponential, Hybrid, LogLinear, Process

RUN_CONFIG, RUN_WEIGHTS = "config.yaml", "model.pt"
HUB = {"timestep_cond_dim", "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_seq_len", "p_uniform"}
NAMES = {  # our names of settings: those of the hub, and those of a folder
    "width": ("hidden_size", "model.hidden_size"),
    "depth": ("num_hidden_layers", "model.n_blocks"),
    "heads": ("num_attention_heads", "model.n_heads"),
    "condition_width": ("timestep_cond_dim", "model.cond_dim"),
    "length": ("max_seq_len", "model.max_seq_len"),
}
BUFFERS = (INV_FREQ, "rotary_emb.cos_cached", "rotary_emb.sin_cached")
BIAS = "logit_bias"  # a buffer that is added to the logit of the current token, and is zero in all releases
MULTIPLE = 128


def recognize(place: Path) -> dict[str, Any] | None:
    """Read GIDD's configuration.

    Args:
        place: A folder.

    Returns:
        The configuration; None where the folder is of another format.
    """
    if not place.is_dir():
        return None
    settings = read_config(place)
    if settings is not None:
        return settings if settings.keys() >= HUB else None
    if not (place / RUN_CONFIG).is_file() or not (place / RUN_WEIGHTS).is_file():
        return None
    settings = read_yaml(place / RUN_CONFIG)
    model = settings.get("model") if isinstance(settings, dict) else None
    return settings if isinstance(model, Mapping) and {"max_seq_len", "cond_dim", "n_blocks"} <= model.keys() else None


def load(folder: Path, values: Mapping[str, Any]) -> Loaded:
    """Load a checkpoint of GIDD.

    Args:
        folder: The folder.
        values: GIDD's configuration (`recognize`).

    Returns:
        The network, its head, a description of its data, and its tokenizer.

    Raises:
        FileNotFoundError: There are no weights in the folder.
        ValueError: The configuration is not supported, or the weights do not fit it.
    """
    settings, hub = Settings(values, "GIDD"), values.keys() >= HUB
    if not hub:
        settings.choice("model.type", {"diffusion": True})
    given = read_weights(folder, "GIDD") if hub else read_weights(folder, "GIDD", (RUN_WEIGHTS,))
    given = without_compiled(given)
    if BIAS in given and bool(given[BIAS].any()):
        raise ValueError(f"{BIAS} is not zero: m2s has no network that adds it")
    vocabulary = _vocabulary(folder, given, settings.integer("vocab_size") if hub else None)
    process = _process(settings, vocabulary.clean, hub)
    sizes: dict[str, Any] = {name: settings.integer(theirs[not hub]) for name, theirs in NAMES.items()}
    dropout = float(settings.get("attention_dropout" if hub else "model.dropout", 0.0))
    config = DiTConfig(vocabulary.size, dropout=dropout, clock=Exponential(1.0), **sizes)
    model = build_dit(config, given, vocabulary, (*BUFFERS, BIAS))
    head = Posterior(process, offset="none" if isinstance(process, Absorbing) else "exact")
    return Loaded(model, head, {"kind": "text", "length": config.length}, find_tokenizer(folder, vocabulary))


def _process(settings: Settings, clean: int, hub: bool) -> Process:
    """GIDD's noise, or that of MDLM, which its code trains as a baseline."""
    choices = {"gidd": True, "mdlm": False}
    if hub or settings.choice("model.diffusion_process", choices):
        return Hybrid(clean, p_uniform=float(settings.get("p_uniform" if hub else "model.p_uniform")))
    return Absorbing(clean, LogLinear(eps=1e-4))


def _vocabulary(folder: Path, given: Mapping[str, Tensor], size: int | None) -> Vocabulary:
    """The token ids: those of the tokenizer, and rows up to a multiple of 128."""
    rows = len(given["vocab_embed.embedding"]) if "vocab_embed.embedding" in given else size or 0
    tokens = tokens_in(folder)
    if not tokens:
        if rows % MULTIPLE == 0:
            raise ValueError(
                f"the vocabulary has {rows:,} rows with padding, and how many are tokens is in {FILE}, which the authors' code "
                f"writes beside the weights: copy it into {folder} (reading it needs the package tokenizers)"
            )
        tokens = rows
    if tokens > rows:
        raise ValueError(f"{folder / FILE} has {tokens:,} tokens, but the checkpoint has {rows:,} rows: it is of another model")
    mask = mask_in(folder)
    return Vocabulary(tokens, tokens - 1 if mask is None else mask, rows)


FORMATS.add(
    "gidd",
    CheckpointFormat(
        name="gidd",
        title="GIDD",
        layout="config.json with timestep_cond_dim and p_uniform, on the hub; or config.yaml and model.pt of its training",
        process="Hybrid; Posterior with the exact offset. Its MDLM baseline: Absorbing, log-linear; Posterior",
        time="t in [0, 1]",
        tokenizer="tokenizer.json beside the weights, or GPT-2's from its merges",
        recognize=recognize,
        load=load,
        files=(PICKLED, RUN_CONFIG, RUN_WEIGHTS),
    ),
)
