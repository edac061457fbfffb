"""MDLM, UDLM and DUO on the hub: `kuleshov-group/mdlm-owt`, `kuleshov-group/udlm-lm1b`, `s-sahoo/duo`, or such a folder.

Their network is our DiT with the total noise sigma(t) as its clock, under the prefix "backbone.". Without time conditioning it
is given sigma = 0 at every time. MDLM's substitution rules, no logit of the mask and unmasked tokens that are copied, are those
of `Posterior` under `Absorbing`. UDLM and DUO predict the clean token at uniform noise, which is the leave-one-out distribution
(`offset="exact"`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from m2s.heads import Posterior
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, Settings, read_config
from m2s.hub.formats.dit import INV_FREQ, PICKLED, Vocabulary, build_dit, read_weights, without_prefix
from m2s.hub.formats.tokenizers import find_mask, find_tokenizer
from m2s.models import DiTConfig
from m2s.process import Absorbing, LogLinear, Schedule, Uniform

NETWORK = {"hidden_dim", "cond_dim", "n_blocks", "n_heads", "vocab_size", "model_length"}
PREFIX = "backbone."
KINDS = {"mdlm": "MDLM", "udlm": "UDLM", "duo": "DUO"}
DEFAULT_TIME = {"mdlm": False, "udlm": True, "duo": True}  # time_conditioning, where the configuration leaves it out


def recognize_kind(kind: str, place: Path) -> dict[str, Any] | None:
    """Read a configuration of the hub.

    Args:
        kind: The model type: "mdlm", "udlm" or "duo".
        place: A folder.

    Returns:
        The configuration; None where the place is of another kind.
    """
    settings = read_config(place) if place.is_dir() else None
    if settings is None or not settings.keys() >= NETWORK:
        return None
    return settings if str(settings.get("model_type")).lower() == kind else None


def network_config(
    settings: Settings, states: int, clock: Schedule | None, time_conditioning: bool, **options: Any
) -> DiTConfig:
    """Return the configuration of our DiT for a configuration of the hub.

    Args:
        settings: The configuration, with the keys `NETWORK`.
        states: The number of states.
        clock: The schedule whose sigma(t) the network sees.
        time_conditioning: Whether it depends on the time.
        **options: Other fields of `DiTConfig`.
    """
    return DiTConfig(
        states,
        width=settings.integer("hidden_dim"),
        depth=settings.integer("n_blocks"),
        heads=settings.integer("n_heads"),
        condition_width=settings.integer("cond_dim"),
        dropout=float(settings.get("dropout", 0.0)),
        length=settings.integer("model_length"),
        clock=clock,
        constant_time=not time_conditioning,
        **options,
    )


def load(folder: Path, values: Mapping[str, Any]) -> Loaded:
    """Load a checkpoint of MDLM, UDLM or DUO.

    Args:
        folder: The folder.
        values: Its configuration (`recognize_kind`).

    Returns:
        The network, its head, a description of its data, and its tokenizer.

    Raises:
        FileNotFoundError: There are no weights in the folder.
        ValueError: The configuration is not supported, or the weights do not fit it.
    """
    kind = str(values["model_type"]).lower()
    settings = Settings(values, KINDS[kind])
    size, noise = settings.integer("vocab_size"), LogLinear(eps=1e-3)
    if settings.get("causal", False):
        raise ValueError("causal is true: it is an autoregressive network, and m2s loads the diffusion models of this project")
    conditioned = bool(settings.get("time_conditioning", DEFAULT_TIME[kind]))
    classes = settings.integer("cfg_num_classes") if settings.get("cfg", False) else None
    options: dict[str, Any] = {} if classes is None else {"classes": classes, "label_after_silu": True}
    vocabulary = Vocabulary(size, find_mask(folder, size) if kind == "mdlm" else None)
    config = network_config(settings, size, noise, conditioned, **options)
    given = without_prefix(read_weights(folder, KINDS[kind]), PREFIX)
    model = build_dit(config, given, vocabulary, (INV_FREQ,))
    head = Posterior(Absorbing(vocabulary.clean, noise)) if kind == "mdlm" else Posterior(Uniform(size, noise), offset="exact")
    return Loaded(model, head, {"kind": "text", "length": config.length}, find_tokenizer(folder, vocabulary))


FORMATS.add(
    "mdlm",
    CheckpointFormat(
        name="mdlm",
        title="MDLM, on the hub",
        layout='config.json with model_type "mdlm"; model.safetensors or pytorch_model.bin with "backbone." tensors',
        process="Absorbing, log-linear; Posterior",
        time="sigma(t), or 0 where time_conditioning is off",
        tokenizer="GPT-2's from its merges, or tokenizer.json in the folder",
        recognize=partial(recognize_kind, "mdlm"),
        load=load,
        files=(PICKLED,),
    ),
)
FORMATS.add(
    "udlm",
    CheckpointFormat(
        name="udlm",
        title="UDLM, on the hub",
        layout='config.json with model_type "udlm"; the rest as for MDLM',
        process="Uniform, log-linear; Posterior with the exact offset",
        time="sigma(t), or 0 where time_conditioning is off",
        tokenizer="tokenizer.json of bert-base-uncased, copied into the folder",
        recognize=partial(recognize_kind, "udlm"),
        load=load,
        files=(PICKLED,),
    ),
)
FORMATS.add(
    "duo",
    CheckpointFormat(
        name="duo",
        title="DUO, on the hub",
        layout='config.json with model_type "duo"; the rest as for MDLM',
        process="Uniform, log-linear; Posterior with the exact offset",
        time="sigma(t)",
        tokenizer="GPT-2's from its merges, with one more token, [PAD]",
        recognize=partial(recognize_kind, "duo"),
        load=load,
        files=(PICKLED,),
    ),
)
