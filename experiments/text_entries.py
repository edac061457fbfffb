"""Entries of experiments/text.py: their rows, and the settings that these have in common.

Rows of `owt-fast`, `methods` and `long` train for a number of seconds, those of the others for a number of steps. The seconds
are those of training steps alone. Compilation, validations and states are not counted; a row reports them apart.
experiments/text_row.py measures the speed of a row in a short run and turns the seconds into a number of steps, which the
cosine decay of the learning rate needs. Rows read the same batches in the same order, so a faster method sees more of the same
stream.
"""

import json
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

SHORT = {
    "batch": 64,
    "steps": 900,
    "seed": 1,
    "optimizer.lr": 5e-4,
    "optimizer.warmup": 200,
    "optimizer.ema": 0.99,
    "log_every": 25,
    "validate_every": 150,
    "validation_passes": 2,
    "save_every": 900,
}
RECIPE = {
    "m2s-offset-0.1": {"method": "m2s-offset", "importance": 0.1},
    "m2s-offset": {"method": "m2s-offset"},
    "mdlm": {"method": "mdlm"},
    "mdlm-0.1": {"method": "mdlm", "importance": 0.1},
    "ar": {"method": "ar"},
    "sedd-0.1": {"method": "sedd", "importance": 0.1},
    "m2s-offset-0.03": {"method": "m2s-offset", "importance": 0.03},
    "m2s-offset-0.1-lr1.5e-3": {"method": "m2s-offset", "importance": 0.1, "optimizer.lr": 1.5e-3},
}
HEADS = {
    "m2s-0.1": {"method": "m2s", "importance": 0.1},
    "m2s": {"method": "m2s"},
    "sedd": {"method": "sedd"},
    **{f"{name}-0.1": {"method": name, "importance": 0.1} for name in ("neural-ctmc", "gidd", "md4", "duo")},
}
REPEATED = ("m2s-offset-0.1", "sedd-0.1", "mdlm-0.1", "mdlm")
SEEDS = {f"{name}-seed{seed}": {**RECIPE[name], "seed": seed} for seed in (2, 3) for name in REPEATED}
MUON = {"importance": 0.1, "optimizer.kind": "muon", "optimizer.lr": 1e-3, "optimizer.beta2": 0.95}
FAST = {**MUON, "network.gates": "one", "network.embedding_std": 1.0}
OPTIMIZER = {
    "m2s-offset-fast": {"method": "m2s-offset", **FAST},
    "m2s-offset-fast-lr3e-3": {"method": "m2s-offset", **FAST, "optimizer.lr": 3e-3},
    "mdlm-fast": {"method": "mdlm", **FAST},
    "m2s-offset-muon": {"method": "m2s-offset", **MUON},
    "sedd-fast": {"method": "sedd", **FAST},
    "ar-fast": {"method": "ar", **FAST, "importance": None},
}
FAST_3E3 = {**FAST, "optimizer.lr": 3e-3}
OFFSET_3E3 = {"method": "m2s-offset", **FAST_3E3}
HALF_BATCH = {  # the same tokens, also at each validation
    "batch": 32,
    "steps": 1800,
    "optimizer.warmup": 400,
    "optimizer.ema": 0.995,
    "log_every": 50,
    "validate_every": 300,
    "save_every": 1800,
}
RATES = {
    "mdlm-3e-3": {"method": "mdlm", **FAST_3E3},
    "sedd-3e-3": {"method": "sedd", **FAST_3E3},
    "ar-3e-3": {"method": "ar", **FAST_3E3, "importance": None},
    "m2s-offset-6e-3": {**OFFSET_3E3, "optimizer.lr": 6e-3},
    "m2s-3e-3": {"method": "m2s", **FAST_3E3},
    "gidd-3e-3": {"method": "gidd", **FAST_3E3},
    "md4-3e-3": {"method": "md4", **FAST_3E3},
    "m2s-offset-3e-3-uniform-t": {**OFFSET_3E3, "importance": None},
    "m2s-offset-3e-3-noised": {**OFFSET_3E3, "head.loss": "noised"},
    "m2s-offset-3e-3-qk-norm": {**OFFSET_3E3, "network.qk_norm": True},
    "mdlm-6e-3": {"method": "mdlm", **FAST_3E3, "optimizer.lr": 6e-3},
    "sedd-6e-3": {"method": "sedd", **FAST_3E3, "optimizer.lr": 6e-3},
    "m2s-offset-3e-3-importance-0.03": {**OFFSET_3E3, "importance": 0.03},
    "m2s-offset-3e-3-importance-0.3": {**OFFSET_3E3, "importance": 0.3},
    "m2s-offset-adamw": {"method": "m2s-offset", **FAST, "optimizer.kind": "adamw", "optimizer.lr": 5e-4},
    "mdlm-3e-3-uniform-t": {"method": "mdlm", **FAST_3E3, "importance": None},
    "m2s-offset-2e-3": {**OFFSET_3E3, "optimizer.lr": 2e-3},
    "m2s-offset-3e-3-importance-1": {**OFFSET_3E3, "importance": 1.0},
    "duo-3e-3": {"method": "duo", **FAST_3E3},
    "m2s-offset-3e-3-decay-0.1": {**OFFSET_3E3, "optimizer.weight_decay": 0.1},
    "m2s-offset-3e-3-batch-32": {**OFFSET_3E3, **HALF_BATCH},
    "sedd-3e-3-uniform-t": {"method": "sedd", **FAST_3E3, "importance": None},
}
QK_NORM = {"network.qk_norm": True}
RATE_SEEDS = {  # the first ones show the differences between seeds, the others whether QK-norm helps every method
    **{
        f"{method}-3e-3-seed{seed}": {"method": method, **FAST_3E3, "seed": seed}
        for seed in (2, 3)
        for method in ("m2s-offset", "mdlm", "sedd")
    },
    **{f"{method}-3e-3-qk-norm": {"method": method, **FAST_3E3, **QK_NORM} for method in ("mdlm", "sedd")},
    **{f"m2s-offset-3e-3-qk-norm-seed{seed}": {**OFFSET_3E3, **QK_NORM, "seed": seed} for seed in (2, 3)},
}
ENTRIES = {
    "recipe": Entry(SHORT, RECIPE),
    "heads": Entry(SHORT, HEADS),
    "seeds": Entry(SHORT, SEEDS),
    "optimizer": Entry(SHORT, OPTIMIZER),
    "rates": Entry(SHORT, RATES),
    "rate-seeds": Entry(SHORT, RATE_SEEDS),
    **BUDGETED,
}


def as_json(text: str) -> Any:
    """Return the value of a setting: JSON if possible, else the text.

    Args:
        text: The value on the command line.
    """
    try:
        return json.loads(text)
    except ValueError:
        return text
