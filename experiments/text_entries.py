"""Entries of experiments/text.py that train for a number of seconds: `owt-fast`, `methods` and `long`.

The seconds are those of training steps alone. Compilation, validations and states are not counted; a row reports them apart.
experiments/text.py measures the speed of a row in a short run and turns the seconds into a number of steps, which the cosine
decay of the learning rate needs. Rows read the same batches in the same order, so a faster method sees more of the same stream.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A table of text experiments.

    Args:
        settings: Options of `m2s train PRESET` that all rows have in common.
        rows: Further options of each row, by its name.
        passes: Times drawn for each window in the final NELBO.
        preset: The preset.
        seconds: Seconds of training steps of each row; None: `settings` has the number of steps.
    """

    settings: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    passes: int = 4
    preset: str = "owt"
    seconds: float | None = None


MINUTE = 60.0
LOGGED = {"batch": 64, "seed": 1, "log_every": 50, "validation_passes": 1}
AR = {"method": "ar", "importance": None}  # an autoregressive loss has no times
GIDD = {"method": "gidd"}
# DUO's softened tokens are one normal number for each token of the vocabulary at each position, in the first half of a run.
DUO = {"method": "duo", "micro_batch": 16}
OLD = {  # the settings of the preset owt, with the batch and the shorter warmup and average of the short tables
    "importance": None,
    "network.gates": "zero",
    "network.embedding_std": 0.02,
    "optimizer.kind": "adamw",
    "optimizer.lr": 5e-4,
    "optimizer.beta2": 0.999,
}
BAR = {
    "m2s-offset-old": {"method": "m2s-offset", **OLD},
    "m2s-offset": {"method": "m2s-offset"},
    "sedd": {"method": "sedd"},
    "mdlm": {"method": "mdlm"},
    "ar": AR,
}
METHODS = {
    "m2s-offset": {"method": "m2s-offset"},
    "sedd": {"method": "sedd"},
    "mdlm": {"method": "mdlm"},
    "m2s": {"method": "m2s"},
    "gidd-0.1": {**GIDD, "process.p_uniform": 0.1},
    "gidd-0.2": {**GIDD, "process.p_uniform": 0.2},
    "gidd-0": {**GIDD, "process.p_uniform": 0.0},
    "gidd-uniform": {**GIDD, "process.kind": "uniform"},  # the process, head and loss of m2s-offset
    "sedd-absorb": {"method": "sedd-absorb"},
    "neural-ctmc": {"method": "neural-ctmc"},
    "duo": DUO,
    "ar": AR,
}
LONG = {name: METHODS[name] for name in ("m2s-offset", "m2s", "sedd", "mdlm")}
BUDGETED = {
    "owt-fast": Entry({**LOGGED, "validate_every": 2000}, BAR, preset="owt-fast", seconds=20 * MINUTE),
    "methods": Entry({**LOGGED, "validate_every": 1000}, METHODS, preset="owt-fast", seconds=6 * MINUTE),
    "long": Entry({**LOGGED, "validate_every": 2000}, LONG, preset="owt-fast", seconds=20 * MINUTE),
}
