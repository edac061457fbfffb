"""What lies in the folder of a run: what `m2s train` left there, and the measures and samples that were put beside it.

Results are looked for in RUN/*.json and RUN/*/*.json and known by what they hold, not by their names; samples in RUN/*.npz,
RUN/*.txt and RUN/*.png and one folder below. What cannot be read is said in `problems`, and nothing else happens.
"""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError, safe_open

from m2s.errors import UserError
from m2s.hub.folder import WEIGHTS, current
from m2s.report.audit import KEYS
from m2s.training.log import NAME as LOG
from m2s.training.run_folder import RECORD

# Keys by which a result is known.
KINDS: dict[str, set[str]] = {
    "repair": {"changes", "measure", "audits"},
    "audit": KEYS,
    "bpd": {"bound", "integral", "prior", "reconstruction", "unit", "curve"},
    "fid": {"fid", "samples", "reference", "network"},
    "genppl": {"results", "differences"},
    "diverged": {"step", "loss", "grad_norm", "bad", "batch"},
}
FILM = "film.png"
HEADING = re.compile(r"^--- sample (\d+) ---\n", re.MULTILINE)
SHOWN = 64  # images of a file of samples
TEXTS = 4


@dataclass(frozen=True)
class Result:
    """What a command found: the file, relative to the run, what kind of result it is, and all that it says."""

    file: str
    kind: str
    value: dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """The first samples of a file: images [n, L], or texts."""

    file: str
    count: int
    settings: dict[str, Any]
    images: np.ndarray | None = None
    texts: tuple[str, ...] = ()


@dataclass
class Run:
    path: Path
    name: str
    record: dict[str, Any]  # train.json
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    parameters: int | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    samples: list[Samples] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)  # beside the film and what belongs to a result
    problems: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Result]:
        return [result for result in self.results if result.kind == kind]

    @property
    def film(self) -> Path | None:
        return self.path / FILM if (self.path / FILM).is_file() else None

    @property
    def training(self) -> list[dict[str, Any]]:
        return [line for line in self.log if _finite(line.get("bits"))]

    @property
    def validation(self) -> list[dict[str, Any]]:
        return [line for line in self.log if _finite(line.get("validation_bits"))]

    @property
    def seconds(self) -> float:
        """Of training, over all starts: the clock of the log begins anew with each."""
        clock = [line["seconds"] for line in self.log if _finite(line.get("seconds"))]
        return float(sum(now for now, then in itertools.pairwise([*clock, -1.0]) if then < now))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Every run once, in the order given, under names that tell them apart."""
    if not paths:
        raise UserError("no run was given: name the folders that m2s train made, such as runs/digits")
    unique = {path.resolve(): path for path in reversed(paths)}
    folders = list(dict.fromkeys(path.resolve() for path in paths))
    short = [folder.name for folder in folders]
    names = [folder.name if short.count(folder.name) == 1 else str(unique[folder]) for folder in folders]
    records = [_record(unique[folder]) for folder in folders]
    return [_read(unique[folder], name, record) for folder, name, record in zip(folders, names, records, strict=True)]


def _record(path: Path) -> dict[str, Any]:
    """The train.json that makes a folder a run."""
    file = path / RECORD
    if not file.is_file():
        what = "there is no such folder" if not path.exists() else f"it holds no {RECORD}"
        raise UserError(f"{path} is no run, for {what}: give folders that m2s train made")
    try:
        record = read_json(file)
        if not isinstance(record, dict) or not all(isinstance(record[key], dict) for key in ("config", "data")):
            raise ValueError("its configuration is missing")
        for start in record["starts"]:
            start.pop("host", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {error}): leave out {path}") from error
    return record


def parsed(text: str) -> Any:
    """What JSON says, with None for a number that is not finite."""

    def real(digits: str) -> float | None:
        return value if math.isfinite(value := float(digits)) else None

    return json.loads(text, parse_float=real, parse_constant=lambda _: None)


def read_json(path: Path) -> Any:
    return parsed(path.read_text(encoding="utf-8"))


def _read(path: Path, name: str, record: dict[str, Any]) -> Run:
    run = Run(path, name, record)
    if (file := current(path)).is_file():
        run.config = _attempt(run, file, _read_config) or {}
    if (file := path / WEIGHTS).is_file():
        run.parameters = _attempt(run, file, _parameters)
    if (file := path / LOG).is_file():
        _attempt(run, file, lambda file: _read_log(run, file))
    for file in _files(path, "json"):
        if file.name not in (RECORD, "config.json"):
            _attempt(run, file, lambda file: _read_result(run, file))
    taken = {path / Path(result.file).parent for result in run.results if result.kind in ("audit", "repair")} - {path}
    for file in _files(path, "npz"):
        if file.parent not in taken:
            _attempt(run, file, lambda file: _read_samples(run, file))
    for file in _files(path, "txt"):
        if file.parent not in taken:
            _attempt(run, file, lambda file: _read_texts(run, file))
    told = {path / result.file for result in run.results} | {path / samples.file for samples in run.samples}
    made = {file.with_suffix(".png") for file in told} | {path / FILM}
    run.pictures += [file for file in _files(path, "png") if file not in made and file.parent not in taken]
    return run


def _files(path: Path, ending: str) -> list[Path]:
    """In order; not what begins with a dot, and not the parts of samples that are still being drawn."""
    found = [*sorted(path.glob(f"*.{ending}")), *sorted(path.glob(f"*/*.{ending}"))]
    return [
        file
        for file in found
        if file.is_file() and not any(part.startswith(".") or part.endswith(".parts") for part in file.relative_to(path).parts)
    ]


def _attempt(run: Run, file: Path, read: Any) -> Any:
    try:
        return read(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, SafetensorError) as error:
        run.problems.append(f"{file} cannot be read ({type(error).__name__}: {error})")
    return None


def _read_config(file: Path) -> dict[str, Any]:
    value = read_json(file)
    if not isinstance(value, dict):
        raise ValueError("it does not hold a configuration")
    return value


def _parameters(file: Path) -> int:
    with safe_open(file, framework="np") as opened:
        return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118


def _read_log(run: Run, file: Path) -> None:
    bad = []
    for place, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = parsed(line)
            if not isinstance(values["step"], int):
                raise ValueError
            run.log.append(values)
        except (ValueError, KeyError, TypeError):
            bad.append(place)
    if bad:
        run.problems.append(f"{file}: no record in line {', '.join(map(str, bad))}")


def _read_result(run: Run, file: Path) -> None:
    value = read_json(file)
    kind = next((kind for kind, keys in KINDS.items() if isinstance(value, dict) and value.keys() >= keys), None)
    if kind is None:
        run.problems.append(f"{file} is left out: it is no result that m2s writes")
    else:
        run.results.append(Result(str(file.relative_to(run.path)), kind, value))


def _read_samples(run: Run, file: Path) -> None:
    with np.load(file, allow_pickle=False) as opened:
        settings = parsed(str(opened["settings"])) if "settings" in opened else {}
        if "command" in opened:
            settings["command"] = parsed(str(opened["command"]))
        tokens = opened["tokens"]
    data = settings.get("data") or {}
    name = str(file.relative_to(run.path))
    if data.get("kind") == "image":
        run.samples.append(Samples(name, len(tokens), settings, tokens[:SHOWN]))
    elif file.with_suffix(".txt").is_file():
        texts = HEADING.split(file.with_suffix(".txt").read_text(encoding="utf-8"))[2::2]
        run.samples.append(Samples(name, len(tokens), settings, texts=tuple(text.strip("\n") for text in texts[:TEXTS])))
    else:
        run.problems.append(f"{file} holds tokens but no text to show: m2s sample --out {file.with_suffix('.txt')} writes it")


def _read_texts(run: Run, file: Path) -> None:
    """Samples as text that have no tokens beside them; any other text is none of ours."""
    if file.with_suffix(".npz").is_file():
        return
    before, *parts = HEADING.split(file.read_text(encoding="utf-8"))
    if parts and not before:
        texts = tuple(text.strip("\n") for text in parts[1::2][:TEXTS])
        run.samples.append(Samples(str(file.relative_to(run.path)), len(parts) // 2, {}, texts=texts))
