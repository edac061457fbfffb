"""Lightning checkpoints (.ckpt) of the code of MDLM, UDLM, DUO and BD3-LM, with their averaged (EMA) weights.

The hyperparameters in such a file are objects of omegaconf and of a tokenizer. They are read without these packages and without
running code (`m2s.hub.pickles`). The average is a list of tensors in the order of the network's parameters.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from m2s.heads import Head, LogScore, Posterior
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, Settings
from m2s.hub.formats.dit import INV_FREQ, Vocabulary, average_by_name, build_dit, without_compiled, without_prefix
from m2s.hub.formats.tokenizers import find_mask, find_tokenizer
from m2s.hub.pickles import StoredTensor, plain, read_stubbed, read_tensors
from m2s.models import DiTConfig
from m2s.process import Absorbing, Geometric, Linear, LogLinear, Schedule, Uniform

SUFFIX = ".ckpt"
PREFIX = "backbone."
BUFFERS = {"limiting_distribution", "sampling_eps_min", "sampling_eps_max"}  # of the training code, outside the network
EMBEDDING, LABELS = "vocab_embed.embedding", "cond_map.embedding_table.weight"
SUPPORTED = "MDLM (subs), SEDD (sedd), UDLM and DUO are loaded"


class _Choices(NamedTuple):
    """What the configurations of the four projects say in different places."""

    uniform: bool  # noise over all tokens, without a mask
    score: bool  # the network predicts a score (SEDD)
    time_conditioning: bool
    schedule: Schedule


def recognize(place: Path) -> dict[str, Any] | None:
    """Read the configuration in a Lightning checkpoint.

    Args:
        place: The checkpoint, .ckpt, or a folder with one of them.

    Returns:
        "file", the name of the checkpoint, and "config", the configuration; None where there is no .ckpt.

    Raises:
        ValueError: There are several, or the file is damaged or has no configuration.
    """
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place] if place.suffix == SUFFIX else []
    if not files:
        return None
    if len(files) > 1:
        raise ValueError(
            f"{place} holds {len(files)} checkpoints ({files[0].name}, {files[1].name}, ...): give the path of one"
        )
    state = read_stubbed(files[0])
    hyperparameters = state.get("hyper_parameters") if isinstance(state, dict) else None
    config = plain(hyperparameters.get("config")) if isinstance(hyperparameters, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError(
            f"{files[0]} has no hyper_parameters with a config, which the code of MDLM, UDLM, DUO and BD3-LM writes: it is of "
            "another project"
        )
    return {"file": files[0].name, "config": config}


def load(place: Path, values: Mapping[str, Any]) -> Loaded:
    """Load a Lightning checkpoint.

    Args:
        place: The checkpoint, or its folder.
        values: "file" and "config" (`recognize`).

    Returns:
        The network with its averaged weights, its head, a description of its data, and its tokenizer.

    Raises:
        ValueError: The configuration is not supported, or the weights do not fit it.
    """
    folder = place if place.is_dir() else place.parent
    settings = Settings(values["config"], "the checkpoint")
    if "block_size" in values["config"] and settings.get("algo.cross_attn", False):
        check_block(settings.integer("block_size"), settings.integer("model.length"))
    chosen = _choices(settings)
    stored = _weights(folder / values["file"])
    size = _rows(stored, EMBEDDING)
    mask = None if chosen.uniform else find_mask(folder, size, settings.get("data.tokenizer_name_or_path", None))
    vocabulary = Vocabulary(size, mask)
    adaptive = "sigma_map.mlp.0.weight" in stored  # BD3-LM trains networks without the layers for the time too
    config = DiTConfig(
        size,
        width=settings.integer("model.hidden_size"),
        depth=settings.integer("model.n_blocks"),
        heads=settings.integer("model.n_heads"),
        condition_width=settings.integer("model.cond_dim"),
        dropout=float(settings.get("model.dropout", 0.0)),
        length=settings.integer("model.length"),
        time=adaptive,
        clock=chosen.schedule if adaptive else None,
        constant_time=adaptive and not chosen.time_conditioning,
        classes=_rows(stored, LABELS) - 1 if LABELS in stored else None,
        label_after_silu=LABELS in stored,
    )
    model = build_dit(config, read_tensors(folder / values["file"], stored), vocabulary, (INV_FREQ,))
    head: Head
    if chosen.uniform:
        head = Posterior(Uniform(size, chosen.schedule), offset="exact")
    else:
        process = Absorbing(vocabulary.clean, chosen.schedule)
        head = LogScore(process, "sigma") if chosen.score else Posterior(process)
    return Loaded(model, head, {"kind": "text", "length": config.length}, find_tokenizer(folder, vocabulary))


def check_block(block: int, length: int) -> None:
    """Check that a network of block diffusion denoises all positions at once.

    Args:
        block: The number of positions of a block.
        length: The number of positions.

    Raises:
        ValueError: A block is shorter.
    """
    if block < length:
        raise ValueError(
            f"block_size is {block}, but it must be the length, {length}: a network that generates block after block gives no "
            "posterior of all positions"
        )


def _choices(settings: Settings) -> _Choices:
    """What the network was trained for."""
    section = "algo." if isinstance(settings.get("algo", None), Mapping) else ""
    settings.choice(f"{section}backbone", {"dit": "dit", "hf_dit": "dit"}, "dit")
    parameterization = settings.get(f"{section}parameterization", None)
    uniform = settings.get("diffusion", None) == "uniform" or str(settings.get("algo.name", "")).startswith(("duo", "distill"))
    if uniform and settings.get(f"{section}subs_masking", False):
        raise ValueError("subs_masking is set for uniform noise: m2s supports it for masking noise only")
    kinds = {"mean": True, "d3pm": True} if uniform else {"subs": False, "sedd": False, "score": False}
    if parameterization not in kinds:
        raise ValueError(f"parameterization is {parameterization!r}, and only {SUPPORTED}")
    conditioned = bool(settings.get(f"{section}time_conditioning"))
    score = parameterization in ("sedd", "score")
    if score and not conditioned:
        raise ValueError("time_conditioning is off, but the score of SEDD is scaled by the noise of its time")
    return _Choices(uniform, score, conditioned, _schedule(settings))


def _schedule(settings: Settings) -> Schedule:
    """The noise schedule. BD3-LM masks a token with probability t exactly; the others with probability (1 - eps) t."""
    kind = settings.choice("noise.type", {"loglinear": "log", "log-linear": "log", "geometric": "geometric"})
    if kind == "geometric":
        return Geometric(*(float(settings.get(f"noise.{name}")) for name in ("sigma_min", "sigma_max")))
    return Linear() if "block_size" in settings.values else LogLinear(float(settings.get("noise.eps", 1e-3)))


def _weights(path: Path) -> dict[str, Any]:
    """The tensors of the network by name, not read yet: averaged ones where there are any."""
    state = read_stubbed(path)
    given = state.get("state_dict")
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{path} has no state_dict: it was not written by Lightning")
    given = {name: value for name, value in without_compiled(given).items() if name not in BUFFERS}
    outside = [name for name in given if not name.startswith(PREFIX)]
    if outside:
        raise ValueError(f"{path} has tensors outside the network, which is unexpected: {', '.join(outside[:4])}"[:400])
    network = without_prefix(given, PREFIX)
    if state.get("ema") is not None:
        try:
            network = average_by_name(network, state["ema"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the average (ema) of {path} is not a list of the {len(network):,} parameters: {error!r}"
            ) from None
    missing = [name for name, value in network.items() if not isinstance(value, StoredTensor)]
    if missing or EMBEDDING not in network:
        raise ValueError(f"{path} has no tensor {(missing or [EMBEDDING])[0]}")
    return network


def _rows(stored: Mapping[str, StoredTensor], name: str) -> int:
    """The number of rows of a matrix."""
    shape = stored[name].shape
    if len(shape) != 2:
        raise ValueError(f"{name} has shape {list(shape)}, expected a matrix")
    return shape[0]


FORMATS.add(
    "lightning",
    CheckpointFormat(
        name="lightning",
        title="MDLM, UDLM, DUO, SEDD and BD3-LM, a Lightning checkpoint",
        layout="one .ckpt with hyper_parameters, state_dict and ema, or a folder with one",
        process="as on the hub; SEDD as LogScore; BD3-LM where its block is the length",
        time="sigma(t), or 0 where time_conditioning is off",
        tokenizer="GPT-2's from its merges, or tokenizer.json beside the file",
        recognize=recognize,
        load=load,
        suffixes=(SUFFIX,),
    ),
)
