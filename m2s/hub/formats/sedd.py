"""SEDD (Lou et al. 2023): `m2s.load("louaaron/sedd-small")`, such a folder, a run of its training, or one of its states.

SEDD's network is our DiT with the total noise sigma(t) as its clock and, under a mask, an output that is scaled by sigma. A
training run is loaded with its averaged (EMA) weights. A state, checkpoint.pth, does not hold the configuration, which is read
from the folder of its run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from m2s.heads import LogScore
from m2s.hub.folder import WEIGHTS
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, Settings, read_config, read_yaml
from m2s.hub.formats.dit import PICKLED, Vocabulary, average_by_name, build_dit, read_weights
from m2s.hub.formats.tokenizers import find_tokenizer
from m2s.hub.tensors import read_pickle, tensors_by_name
from m2s.models import DiTConfig
from m2s.process import Absorbing, Geometric, LogLinear, Schedule, Uniform

RUN_CONFIG, STATE = ".hydra/config.yaml", "checkpoint.pth"
RUN_STATE = f"checkpoints-meta/{STATE}"
STATES = (RUN_STATE, STATE)
SECTIONS = {"graph", "noise", "model", "tokens"}  # of SEDD's configuration
SUFFIX = ".pth"


def recognize(place: Path) -> dict[str, Any] | None:
    """Read SEDD's configuration.

    Args:
        place: A folder, or a state of SEDD's training, .pth.

    Returns:
        The configuration; None where the place is not a checkpoint of SEDD.

    Raises:
        FileNotFoundError: The place is a state, and the configuration of its run is not there.
    """
    settings = (read_config(place) if place.is_dir() else None) or run_settings(place)
    if settings is not None:
        return settings if is_sedd(settings) else None
    if place.suffix == SUFFIX and place.is_file():
        raise FileNotFoundError(
            f"{place} holds weights alone: SEDD writes its configuration to {RUN_CONFIG} of the run. Copy that file too, "
            "beside the weights or one folder up"
        )
    return None


def run_settings(place: Path) -> dict[str, Any] | None:
    """Read the configuration that a training run of SEDD's code wrote.

    Args:
        place: The folder of the run, a folder with a state, or a state.

    Returns:
        The configuration; None where there is none.
    """
    folder = place if place.is_dir() else place.parent
    state = (place / STATE).is_file() if place.is_dir() else place.suffix == SUFFIX
    for start in [folder, folder.parent] if state else [folder] if place.is_dir() else []:
        if (start / RUN_CONFIG).is_file():
            found = read_yaml(start / RUN_CONFIG)
            return found if isinstance(found, dict) else None
    return None


def is_sedd(settings: Mapping[str, Any]) -> bool:
    """Return whether a configuration is one of SEDD.

    Args:
        settings: The configuration. RADD's code writes similar ones, for a network of another type.
    """
    model = settings.get("model")
    return settings.keys() >= SECTIONS and not (isinstance(model, Mapping) and model.get("type") == "ddit_wot")


def load(place: Path, values: Mapping[str, Any]) -> Loaded:
    """Load a checkpoint of SEDD.

    Args:
        place: The folder or the state.
        values: SEDD's configuration (`recognize`).

    Returns:
        The network, its head, a description of its data, and GPT-2's tokenizer. The tokenizer is None where SEDD was trained
        with another one, or where GPT-2's merges are not on this machine.

    Raises:
        FileNotFoundError: There are no weights in the folder.
        ValueError: The configuration is not supported, or the weights do not fit it.
    """
    settings = Settings(values, "SEDD")
    tokens, graph = settings.integer("tokens"), settings.choice("graph.type", {"uniform": "uniform", "absorb": "absorb"})
    noise = schedule(settings)
    process = Absorbing(tokens, noise) if graph == "absorb" else Uniform(tokens, noise)
    scaled = bool(settings.get("model.scale_by_sigma"))
    if scaled and graph == "uniform":
        raise ValueError("model.scale_by_sigma is set, but graph.type is uniform: SEDD defines it for absorb only")
    length = settings.integer("model.length")
    config = DiTConfig(
        process.states,
        width=settings.integer("model.hidden_size"),
        depth=settings.integer("model.n_blocks"),
        heads=settings.integer("model.n_heads"),
        condition_width=settings.integer("model.cond_dim"),
        dropout=float(settings.get("model.dropout")),
        length=length,
        clock=noise,
    )
    vocabulary = Vocabulary(process.states, process.mask)
    model = build_dit(config, read_run(place, "SEDD"), vocabulary)
    folder = place if place.is_dir() else place.parent
    head = LogScore(process, "sigma" if scaled else "none")
    return Loaded(model, head, {"kind": "text", "length": length}, find_tokenizer(folder, vocabulary))


def schedule(settings: Settings) -> Schedule:
    """Return the noise schedule of a configuration.

    Args:
        settings: The configuration of SEDD's code.

    Raises:
        ValueError: There is no such schedule.
    """
    if settings.choice("noise.type", {"loglinear": True, "geometric": False}):
        return LogLinear(eps=1e-3)
    return Geometric(*(float(settings.get(f"noise.{name}")) for name in ("sigma_min", "sigma_max")))


def read_run(place: Path, project: str) -> dict[str, Tensor]:
    """Read tensors as SEDD's code writes them; of a training run, the averaged ones.

    Args:
        place: A folder of the hub's form, the folder of a run, or a state.
        project: Whose it is, for messages of errors.

    Returns:
        Tensors by name.

    Raises:
        FileNotFoundError: There are no weights.
        ValueError: A file is damaged.
    """
    state = next((place / name for name in STATES if (place / name).exists()), None) if place.is_dir() else place
    if state is None or any((place / name).exists() for name in (WEIGHTS, PICKLED)):
        return read_weights(place, project, (WEIGHTS, PICKLED, RUN_STATE))
    found: Any = read_pickle(state)
    try:
        averaged = average_by_name(found["model"], found["ema"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{state} is not a state of {project}'s training, which holds model and ema: {error!r}"
        raise ValueError(reason) from None
    return tensors_by_name(averaged, state)


SEDD = FORMATS.add(
    "sedd",
    CheckpointFormat(
        name="sedd",
        title="SEDD",
        layout="config.json with graph, noise, model, tokens; or .hydra/config.yaml with checkpoint.pth of a run, or that file",
        process="Absorbing or Uniform, log-linear or geometric; LogScore",
        time="sigma(t)",
        tokenizer="GPT-2's, from its merges",
        recognize=recognize,
        load=load,
        files=(PICKLED,),
        suffixes=(SUFFIX,),
    ),
)
