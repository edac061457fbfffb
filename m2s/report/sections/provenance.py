"""How every file was made: commands, devices, versions, and the configuration of each run."""

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from m2s.report.read_run import TrainingRun
from m2s.report.sections.common import Problems, device_name, sampler_settings

TRAINING_FILES = "train.json, log.jsonl, config.json, model.safetensors"
PACKAGES = ("m2s", "git", "torch", "numpy", "python")


def collect(runs: Sequence[TrainingRun], problems: Problems) -> dict[str, Any]:
    """Collect the provenance of all files.

    Args:
        runs: The runs.
        problems: Receives what cannot be shown.

    Returns:
        `runs`: the name, the files with their provenance, and the configuration of each.
    """
    found = [problems.attempt(run.path / "train.json", partial(_provenance, run)) for run in runs]
    return {"runs": [entry for entry in found if entry is not None]}


def _provenance(run: TrainingRun) -> dict[str, Any]:
    """Return the provenance of the files of a run."""
    files = [
        _entry(TRAINING_FILES, start, f"started {start.get('started')}", device_name(run, start), _versions(start))
        for start in run.record["starts"]
    ]
    for result in run.results:
        value, versions = result.value, result.value.get("versions")
        known = _versions(versions if isinstance(versions, dict) else value)
        files.append(_entry(result.file, value, str(value.get("device") or ""), known, sampler_settings(value.get("settings"))))
    files += [_entry(samples.file, samples.settings, sampler_settings(samples.settings)) for samples in run.samples]
    return {"name": run.name, "files": files, "config": json.dumps(run.record["config"], indent=2)}


def _entry(file: str, maker: Mapping[str, Any], *details: str) -> dict[str, str]:
    """Return a file, what is known about it, and its command."""
    command = format_command(maker)
    known = [detail for detail in (*details, "" if command else "the file does not hold the command") if detail]
    return {"file": file, "details": "; ".join(known), "command": command}


def format_command(maker: Mapping[str, Any]) -> str:
    """Return the command of a result as it is typed in a shell.

    Args:
        maker: What holds the `command`, a list of words.

    Returns:
        The command, with m2s for the path of the program; empty where there is none.
    """
    words = maker.get("command")
    if not isinstance(words, list) or not words:
        return ""
    program, *arguments = map(str, words)
    is_m2s = program.replace("\\", "/").endswith(("/m2s", "/m2s/cli/__main__.py"))
    return shlex.join(["m2s" if is_m2s else program, *arguments])


def _versions(value: Mapping[str, Any]) -> str:
    """Return the versions of m2s and of what it depends on."""
    return ", ".join(f"{name} {value[name]}" for name in PACKAGES if isinstance(value.get(name), str))
