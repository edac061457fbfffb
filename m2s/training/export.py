"""A checkpoint of an earlier state of a run, for example to audit a network at a quarter of its training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from m2s import hub
from m2s.errors import UserError
from m2s.training import state


def export_state(run: Path, step: int, out: Path) -> Path:
    """Save the averaged weights of a state of a run as a checkpoint, which `m2s.load` and all commands read.

    A run keeps its newest states (`--keep`). The checkpoint in the folder of the run is that of the newest one.

    Args:
        run: The folder of the run.
        step: The training step of the state.
        out: The folder of the new checkpoint.

    Returns:
        `out`.

    Raises:
        UserError: There is no intact state of that step.

    Example:
        >>> export_state(Path("runs/sedd"), 1200, Path("runs/sedd-1200"))
    """
    folder = run / "state"
    try:
        found = state.read(folder, step)
    except (OSError, ValueError) as error:
        known = ", ".join(map(str, state.steps(folder))) or "none"
        raise UserError(f"{run} has no intact state of step {step} ({error}): its states are of the steps {known}") from error
    checkpoint = hub.load(run)
    checkpoint.model.float()
    found.load({f"ema/{name}": weight.data for name, weight in checkpoint.model.named_parameters()})
    extra: dict[str, Any] = checkpoint.config.get("extra") or {}
    extra = {key: value for key, value in extra.items() if not key.startswith("validation_")}  # of the newest state
    extra |= {"step": step, **found.info["validation"]}
    return replace(checkpoint, config={**checkpoint.config, "extra": extra}).save(out)
