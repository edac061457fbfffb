"""RADD (Ou et al. 2025): `JingyangOu/radd-lambda-dce`, a folder of that form, a run of its training, or one of its states.

Its network is our DiT without time, with a bias in every norm. Its output is log mu of the clean tokens. The code continues
that of SEDD: files and averaged weights are as there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2s.heads import Posterior
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, Settings, read_config
from m2s.hub.formats.dit import PICKLED, Vocabulary, build_dit
from m2s.hub.formats.sedd import SUFFIX, read_run, run_settings, schedule
from m2s.hub.formats.tokenizers import find_tokenizer
from m2s.models import DiTConfig
from m2s.process import Absorbing

SECTIONS = {"noise", "model", "tokens"}
NETWORK = "ddit_wot"  # its type in the configuration: a transformer without time


def recognize(place: Path) -> dict[str, Any] | None:
    """Read RADD's configuration.

    Args:
        place: A folder, or a state of its training, .pth.

    Returns:
        The configuration; None where the place is of another format.
    """
    settings = (read_config(place) if place.is_dir() else None) or run_settings(place)
    model = (settings or {}).get("model")
    if settings is None or not settings.keys() >= SECTIONS or not isinstance(model, Mapping):
        return None
    return settings if model.get("type") == NETWORK else None


def load(place: Path, values: Mapping[str, Any]) -> Loaded:
    """Load a checkpoint of RADD.

    Args:
        place: The folder or the state.
        values: RADD's configuration (`recognize`).

    Returns:
        The network, its head, a description of its data, and GPT-2's tokenizer. The tokenizer is None where its merges are not
        on this machine.

    Raises:
        FileNotFoundError: There are no weights in the folder.
        ValueError: The configuration is not supported, or the weights do not fit it.
    """
    settings = Settings(values, "RADD")
    process = Absorbing(settings.integer("tokens"), schedule(settings))
    config = DiTConfig(
        process.states,
        width=settings.integer("model.hidden_size"),
        depth=settings.integer("model.n_blocks"),
        heads=settings.integer("model.n_heads"),
        dropout=float(settings.get("model.dropout")),
        length=settings.integer("model.length"),
        time=False,
        norm_bias=True,
    )
    vocabulary = Vocabulary(process.states, process.mask)
    model = build_dit(config, read_run(place, "RADD"), vocabulary)
    folder = place if place.is_dir() else place.parent
    return Loaded(model, Posterior(process), {"kind": "text", "length": config.length}, find_tokenizer(folder, vocabulary))


FORMATS.add(
    "radd",
    CheckpointFormat(
        name="radd",
        title="RADD",
        layout="config.json with noise, model and tokens, where model.type is ddit_wot; or a run or state as for SEDD",
        process="Absorbing, log-linear; Posterior",
        time="none",
        tokenizer="GPT-2's, from its merges",
        recognize=recognize,
        load=load,
        files=(PICKLED,),
        suffixes=(SUFFIX,),
    ),
)
