"""What several sections need: errors in files, settings of a run, and settings of a sampler."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from m2s.report.blocks import Picture, png_uri
from m2s.report.read_run import Result, TrainingRun

T = TypeVar("T")


class Problems(list[str]):
    """What could not be shown, one sentence for each file."""

    def attempt(self, file: Path, show: Callable[[], T]) -> T | None:
        """Return what `show` makes of a file; None where the file lacks something, and add a sentence.

        Args:
            file: The file, for the sentence.
            show: Makes a part of the report from the file. Errors of damaged or incomplete contents are caught.
        """
        try:
            return show()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
            reason = f"it is not as m2s writes it ({error})"
            if isinstance(error, KeyError | ValueError):
                reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            sentence = f"{file} is not shown in full: {reason}"
            self += [] if sentence in self else [sentence]
        return None

    def each_result(self, runs: Sequence[TrainingRun], kind: str, show: Callable[[TrainingRun, Result], T | None]) -> list[T]:
        """Return what `show` makes of every result of a kind, without those for which it is None.

        Args:
            runs: The runs.
            kind: The kind of result, as in `TrainingRun.results_of`.
            show: Makes a part of the report from a run and one of its results.
        """
        shown = [
            self.attempt(run.path / result.file, partial(show, run, result)) for run in runs for result in run.results_of(kind)
        ]
        return [value for value in shown if value is not None]

    def picture(self, path: Path, alt: str, caption: str) -> Picture | None:
        """Return a PNG file as a picture; None where it cannot be read, and add a sentence.

        Args:
            path: The PNG file.
            alt: The text in place of the picture.
            caption: The text below the picture.
        """
        return self.attempt(path, lambda: Picture(png_uri(path), alt, caption))


def config_value(run: TrainingRun, *keys: str) -> Any:
    """Return a value of the resolved configuration of a run.

    Args:
        run: The run.
        *keys: Names from the outermost to the innermost.

    Returns:
        The value; None where the configuration does not have it.
    """
    value: Any = run.record["config"]
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def result_name(run: TrainingRun, result: Result) -> str:
    """Return the name of a result: the run, and the file where the run has several results of that kind.

    Args:
        run: The run.
        result: The result.

    Returns:
        The name.
    """
    return run.name if len(run.results_of(result.kind)) == 1 else f"{run.name}, {result.file}"


def sampler_settings(settings: Any) -> str:
    """Return the settings of a sampler in words.

    Args:
        settings: What `m2s sample` stores with its samples. Anything but a dictionary gives an empty text.

    Returns:
        For example "64 steps, bayes, cosine, temperature 0.8, seed 0". Defaults are left out.
    """
    if not isinstance(settings, dict):
        return ""
    parts = [f"{settings['steps']} steps" if "steps" in settings else "", settings.get("sampler"), settings.get("grid")]
    factors = {"temperature": "temperature", "top_p": "top-p", "guidance": "guidance"}
    parts += [f"{name} {settings[key]}" for key, name in factors.items() if settings.get(key) not in (None, 1.0)]
    parts += [f"top-k {settings['top_k']}"] if settings.get("top_k") is not None else []
    parts += ["projected"] if settings.get("project") else []
    parts += [f"seed {settings['seed']}"] if "seed" in settings else []
    return ", ".join(str(part) for part in parts if part)


def device_name(run: TrainingRun, start: dict[str, Any]) -> str:
    """Return the device of a start of a run in words.

    Args:
        run: The run.
        start: An entry of `starts` of train.json.

    Returns:
        For example "2 × NVIDIA H200" or "CPU, 2 threads".
    """
    processes, threads = start.get("processes") or 1, start.get("threads")
    times = f"{processes} × " if processes > 1 else ""
    if start.get("gpu") and config_value(run, "run", "device") != "cpu":
        return f"{times}{start['gpu']}"
    return f"{times}CPU" + (f", {threads} thread{'s' if threads > 1 else ''}" if threads else "")
