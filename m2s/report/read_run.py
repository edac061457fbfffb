"""Read the folder of a training run: what `m2s train` wrote, and the results and samples beside it.

Results are searched in RUN/*.json and RUN/*/*.json. They are recognized by their keys, not by their names. Samples are searched
in RUN/*.npz, RUN/*.txt and RUN/*.png and one folder below. A file that cannot be read is listed in `TrainingRun.problems`.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError, safe_open

from m2s.errors import UserError, printable
from m2s.evaluation.earlier_names import with_current_names
from m2s.hub.card import position_name
from m2s.hub.folder import WEIGHTS, current
from m2s.npz import read_npz
from m2s.report.audit.result import KEYS
from m2s.report.comparison import KEYS as COMPARISON_KEYS
from m2s.training.log import NAME as LOG
from m2s.training.log import read_log
from m2s.training.run_folder import RECORD, read_record

T = TypeVar("T")

# A result is of the first kind whose keys it has.
RESULT_KEYS: dict[str, set[str]] = {
    "repair": {"changes", "measure", "audits"},
    "audit": KEYS,
    "compare": COMPARISON_KEYS,
    "bpd": {"nelbo", "integral", "prior", "reconstruction", "unit", "curve"},
    "fid": {"fid", "samples", "reference", "network"},
    "genppl": {"results", "differences"},
    "diverged": {"step", "loss", "grad_norm", "bad", "batch"},
}
FILM = "film.png"
SAMPLE_HEADING = re.compile(r"^--- sample (\d+) ---\n", re.MULTILINE)
MAX_IMAGES = 64  # shown of a file of samples
MAX_TEXTS = 4


@dataclass(frozen=True)
class Result:
    """What a command measured.

    Args:
        file: The file, relative to the folder of the run.
        kind: A key of `RESULT_KEYS`.
        value: The content of the file.
    """

    file: str
    kind: str
    value: dict[str, Any]


@dataclass(frozen=True)
class SampleFile:
    """The first samples of a file.

    Args:
        file: The file, relative to the folder of the run.
        count: Number of samples in the file.
        settings: How the samples were drawn; empty where the file does not say it.
        images: [n, L] tokens of the first images; None for text.
        texts: The first texts.
    """

    file: str
    count: int
    settings: dict[str, Any]
    images: np.ndarray | None = None
    texts: tuple[str, ...] = ()


@dataclass
class TrainingRun:
    """The folder of a training run.

    Args:
        path: The folder.
        name: Its name in the report.
        record: The content of train.json.
        config: The content of config.json; empty where there is none.
        parameters: Number of parameters of the network; None where there are no weights.
        log: The lines of log.jsonl.
        results: Results of commands.
        samples: Files of samples.
        pictures: PNG files that belong neither to a result nor to samples, without film.png.
        problems: What could not be read, one sentence each.
    """

    path: Path
    name: str
    record: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    samples: list[SampleFile] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """What a loss in bits is given per: dimension of images, character or token of text, else position."""
        data = self.config.get("data")
        return position_name(data if isinstance(data, dict) else None)

    def results_of(self, kind: str) -> list[Result]:
        """Return the results of one kind.

        Args:
            kind: A key of `RESULT_KEYS`, such as "bpd".
        """
        return [result for result in self.results if result.kind == kind]

    @property
    def film(self) -> Path | None:
        """The film strip of `m2s figure film`, where there is one."""
        return self.path / FILM if (self.path / FILM).is_file() else None

    @property
    def training(self) -> list[dict[str, Any]]:
        """The lines of the log that have a training loss."""
        return [line for line in self.log if _is_finite(line.get("bits"))]

    @property
    def validation(self) -> list[dict[str, Any]]:
        """The lines of the log that have a NELBO on held-out data."""
        return [line for line in self.log if _is_finite(line.get("validation_bits"))]

    @property
    def seconds(self) -> float:
        """The time of training, over all starts. The clock of the log restarts at zero when a run is resumed."""
        clock = [line["seconds"] for line in self.log if _is_finite(line.get("seconds"))]
        return float(sum(now for now, following in itertools.pairwise([*clock, -1.0]) if following < now))


def loss_unit(runs: Sequence[TrainingRun]) -> str:
    """Return the unit of the losses of several runs: such as "bits per dimension", or "bits per position" where units differ.

    Args:
        runs: The runs.
    """
    units = {run.unit for run in runs}
    return f"bits per {units.pop() if len(units) == 1 else 'position'}"


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def read_runs(paths: Sequence[Path]) -> list[TrainingRun]:
    """Read the folders of training runs.

    Args:
        paths: Folders that `m2s train` made.

    Returns:
        Each run once, in the order given. Runs whose folders have the same name are named by their paths.

    Raises:
        UserError: No folder was given, or one is not a run.
    """
    if not paths:
        raise UserError("no run was given: name the folders that m2s train made, such as runs/digits")
    given = {path.resolve(): path for path in reversed(paths)}
    folders = list(dict.fromkeys(path.resolve() for path in paths))
    short = [folder.name for folder in folders]
    names = [folder.name if short.count(folder.name) == 1 else str(given[folder]) for folder in folders]
    records = [_read_record(given[folder]) for folder in folders]
    return [_read_run(given[folder], name, record) for folder, name, record in zip(folders, names, records, strict=True)]


def _read_record(path: Path) -> dict[str, Any]:
    """Read the train.json that makes a folder a run."""
    file = path / RECORD
    if not file.is_file():
        reason = "there is no such folder" if not path.exists() else f"it has no {RECORD}"
        raise UserError(f"{path} is not a run, because {reason}: give folders that m2s train made")
    record = read_record(path, f"leave out {path}")
    for start in record["starts"]:
        start.pop("host", None)  # the page may be published, and the name of a machine is private
    return record


def parse_json(text: str) -> Any:
    """Parse JSON.

    Args:
        text: The text. NaN and infinities, which Python writes, are allowed.

    Returns:
        Its value, with None for a number that is not finite.
    """

    def finite(digits: str) -> float | None:
        return value if math.isfinite(value := float(digits)) else None

    return json.loads(text, parse_float=finite, parse_constant=lambda _: None)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Args:
        path: The file.

    Returns:
        Its value, with None for a number that is not finite.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON.
    """
    return parse_json(path.read_text(encoding="utf-8"))


def _read_run(path: Path, name: str, record: dict[str, Any]) -> TrainingRun:
    """Read everything in the folder of a run."""
    run = TrainingRun(path, name, record)
    if (file := current(path)).is_file():
        run.config = _try_read(run, file, _read_config) or {}
    if (file := path / WEIGHTS).is_file():
        run.parameters = _try_read(run, file, _read_parameter_count)
    if (file := path / LOG).is_file():
        _try_read(run, file, lambda file: _read_log(run, file))
    for file in _files(path, "json"):
        if file.name not in (RECORD, "config.json"):
            _try_read(run, file, lambda file: _read_result(run, file))
    # The folders of audits, repairs and comparisons hold files of their own, which the sections of those results show.
    owners = [result.file for result in run.results if result.kind in ("audit", "repair", "compare")]
    taken = {path / Path(file).parent for file in owners} - {path}
    for file in _files(path, "npz"):
        if file.parent not in taken:
            _try_read(run, file, lambda file: _read_samples(run, file))
    for file in _files(path, "txt"):
        if file.parent not in taken:
            _try_read(run, file, lambda file: _read_texts(run, file))
    shown = {path / result.file for result in run.results} | {path / samples.file for samples in run.samples}
    belonging = {file.with_suffix(".png") for file in shown} | {path / FILM}
    run.pictures += [file for file in _files(path, "png") if file not in belonging and file.parent not in taken]
    return run


def _files(path: Path, suffix: str) -> list[Path]:
    """Return files with a suffix in order, without hidden ones and without shards of samples that are being drawn."""
    found = [*sorted(path.glob(f"*.{suffix}")), *sorted(path.glob(f"*/*.{suffix}"))]
    return [
        file
        for file in found
        if file.is_file() and not any(part.startswith(".") or part.endswith(".parts") for part in file.relative_to(path).parts)
    ]


def _try_read(run: TrainingRun, file: Path, read: Callable[[Path], T]) -> T | None:
    """Return what `read` makes of a file; where its contents are damaged, None, and add a problem.

    An error of the disk is raised. It may be gone the next time, and a page without the file would look complete.
    """
    try:
        return read(file)
    except (
        FileNotFoundError,
        PermissionError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        BadZipFile,
        SafetensorError,
        RecursionError,
    ) as error:
        run.problems.append(printable(f"{file} cannot be read ({type(error).__name__}: {error})"))
    return None


def _read_config(file: Path) -> dict[str, Any]:
    """Read config.json."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise ValueError("it does not hold a configuration")
    for name in ("model", "head", "data"):
        if not isinstance(value.get(name) or {}, dict):
            raise ValueError(f"{name!r} is a {type(value[name]).__name__}, expected an object")
    return value


def _read_parameter_count(file: Path) -> int:
    """Count the parameters from the header of a safetensors file."""
    with safe_open(file, framework="np") as opened:
        return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118


def _read_log(run: TrainingRun, file: Path) -> None:
    """Read log.jsonl; lines that are not records, such as a last one that was cut off, are problems."""
    lines = read_log(file)
    run.log += [parse_json(line.data.decode("utf-8")) for line in lines if line.record is not None]
    if bad := [str(line.number) for line in lines if line.record is None]:
        run.problems.append(f"{file}: no record in line {', '.join(bad)}")


def _read_result(run: TrainingRun, file: Path) -> None:
    """Read a result and recognize its kind."""
    value = with_current_names(read_json(file))
    kind = next((kind for kind, keys in RESULT_KEYS.items() if isinstance(value, dict) and value.keys() >= keys), None)
    if kind is None:
        run.problems.append(f"{file} is left out: it is not a result that m2s writes")
    else:
        run.results.append(Result(str(file.relative_to(run.path)), kind, value))


def _read_samples(run: TrainingRun, file: Path) -> None:
    """Read the .npz of `m2s sample`: images from it, texts from the .txt beside it."""
    opened = read_npz(file, ["tokens"], optional=["settings", "command"])
    settings = parse_json(str(opened["settings"])) if "settings" in opened else {}
    if "command" in opened:
        settings["command"] = parse_json(str(opened["command"]))
    tokens = opened["tokens"]
    data = settings.get("data") or {}
    name = str(file.relative_to(run.path))
    if data.get("kind") == "image":
        run.samples.append(SampleFile(name, len(tokens), settings, tokens[:MAX_IMAGES]))
    elif file.with_suffix(".txt").is_file():
        texts = SAMPLE_HEADING.split(file.with_suffix(".txt").read_text(encoding="utf-8"))[2::2]
        first = tuple(text.strip("\n") for text in texts[:MAX_TEXTS])
        run.samples.append(SampleFile(name, len(tokens), settings, texts=first))
    else:
        run.problems.append(f"{file} holds tokens but no text to show: m2s sample --out {file.with_suffix('.txt')} writes it")


def _read_texts(run: TrainingRun, file: Path) -> None:
    """Read samples as text without tokens beside them. A text file of another kind is ignored."""
    if file.with_suffix(".npz").is_file():
        return
    before, *parts = SAMPLE_HEADING.split(file.read_text(encoding="utf-8"))
    if parts and not before:
        texts = tuple(text.strip("\n") for text in parts[1::2][:MAX_TEXTS])
        run.samples.append(SampleFile(str(file.relative_to(run.path)), len(parts) // 2, {}, texts=texts))
