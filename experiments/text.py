"""Train text models under one budget and measure the NELBO on held-out documents: the text tables of RESULTS.md.

    m2s data prepare texts/enwiki-sample.txt --out packed/enwiki --tokenizer gpt2
    python experiments/text.py out/recipe --data packed/enwiki      # on a GPU; finished rows are skipped
    python experiments/text.py out/recipe --table                   # writes experiments/results/text-recipe.json

An entry is a named table: its rows, and the settings that they have in common. A row runs `m2s train owt` with these
settings. Then it evaluates the NELBO with all terms on the held-out windows, with the averaged weights, as `m2s evaluate bpd`
does. All rows of an entry train on the same batches. OUT/ROW.json is written when a row is finished. The file of a failed row
holds the error. The next call repeats failed rows after all others. Rows of experiments/results/text-ENTRY.json with the same
settings and data count as finished.

The rows of some entries (experiments/text_entries.py) train for a number of seconds in place of a number of steps. The speed of
such a row is that of the same method and optimizer in the tables of `--speeds`. Without one a short run measures it.
OUT/budgets/ROW.json has the number of steps that follows, so that an interrupted row resumes.

The loss in the trace is the mean over `log_every` steps in nats per token. The gradient norm is that of the loss summed over
tokens and averaged over sequences. Tokens per second is the median over the intervals of the trace, without compilation.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import math
import shlex
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the imports below, also where this file is loaded by its path
from text_entries import BUDGETED, Entry
from text_speed import measured_speeds, speed, speed_of_halves

import m2s
from m2s.cli.evaluate.bpd import finite
from m2s.data import Tokens
from m2s.data.files import BadData
from m2s.distributed import World
from m2s.errors import UserError, suggest
from m2s.evaluation.bpd import Shard, dataset_nelbo, example_sizes, summarize
from m2s.evaluation.earlier_names import with_current_names
from m2s.io import output_folder, write_json
from m2s.presets import PRESETS
from m2s.provenance import command, provenance
from m2s.training import Config, train
from m2s.training.config import replace, resolve
from m2s.training.log import NAME as LOG
from m2s.training.log import read_log

RESULTS = Path(__file__).parent / "results"
TERMS = {"nats": "bits", "integral": "integral", "prior": "prior", "reconstruction": "reconstruction"}
BATCH_SIZE = 32  # windows per network call in the final NELBO
PROBE = {"steps": 80, "log_every": 4, "validate_every": 0, "validation_samples": 16, "save_every": 80}
STATES = 4  # that a row with a budget saves, evenly spaced, so that its network can be audited at earlier steps


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


@dataclass(frozen=True)
class Experiment:
    """Everything that the rows of an entry have in common, and the methods that compute a row.

    Args:
        out: Folder of the rows.
        data: Folder of the prepared text.
        entry: The table.
        settings: Options of `m2s train PRESET` that all rows have in common.
        described: Description of the data, from `describe`.
        device: Device of all computations.
        speeds: Tokens per second that earlier tables measured, by method and optimizer.
    """

    out: Path
    data: Path
    entry: Entry
    settings: dict[str, Any]
    described: dict[str, Any]
    device: torch.device
    speeds: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    @property
    def held_out(self) -> Shard:
        """The held-out windows."""
        windows = Tokens(self.data, "validation", self.settings["data.length"])
        return Shard(windows, self.described["validation_windows"])

    def config(self, name: str, options: dict[str, Any]) -> Config:
        """Return the training configuration of a row."""
        windows = self.described["validation_windows"]
        settings = {"keep": 1, "validation_samples": windows, **self.settings, "out": self.out / "runs" / name, **options}
        settings |= {"data.folder": str(self.data), "device": str(self.device)}
        settings["validation_samples"] = min(settings["validation_samples"], windows)
        config = PRESETS[self.entry.preset]
        for key, value in settings.items():
            config = replace(config, key, value)
        return config

    def budget(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Turn the seconds of a row into steps. A file keeps the result, so that the row resumes with the same steps.

        The rate is that of earlier tables (`--speeds`). For other rows it is the median of each half of a short run, for DUO's
        first half is slower. The number of steps is a multiple of the number of states.
        """
        path = self.out / "budgets" / f"{name}.json"
        if path.exists():
            return read(path)
        assert self.entry.seconds is not None
        start = time.monotonic()
        config = self.config(name, {**options, "out": self.out / "runs" / f"{name}-probe"})
        rate = self.speeds.get((config.method, config.optimizer.kind))
        if rate is None:
            rate = self.probe(name, {**options, **PROBE, "out": config.run.out})
        step = config.run.batch * config.data.length
        steps = max(STATES, int(self.entry.seconds * rate / step) // STATES * STATES)
        found = {"seconds": self.entry.seconds, "tokens_per_second": rate, "steps": steps}
        write_json(output_folder(path.parent) / path.name, {**found, "probe_seconds": time.monotonic() - start})
        return read(path)

    def probe(self, name: str, options: dict[str, Any]) -> float:
        """Return the tokens per second of a short run, which is removed."""
        shutil.rmtree(options["out"], ignore_errors=True)
        train(self.config(name, options))
        rate = speed_of_halves(loss_records(options["out"]))
        shutil.rmtree(options["out"])
        return rate

    def measure(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate a row, and return it."""
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # an uncompiled row would be slower than the others
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        budget = None if self.entry.seconds is None else self.budget(name, options)
        if budget is not None:
            steps = budget["steps"]
            options = {**options, "steps": steps, "save_every": steps // STATES, "keep": STATES}
        config = self.config(name, options)
        before = logged_seconds(config.run.out)  # of earlier starts, where the row was interrupted
        start = time.monotonic()
        train(config)
        trained = time.monotonic()
        checkpoint = m2s.load(config.run.out, self.device)
        world, bf16, held_out = World(0, 1, self.device), self.device.type == "cuda", self.held_out
        found = dataset_nelbo(
            checkpoint.model,
            checkpoint.head,
            held_out,
            self.entry.passes,
            seed=0,
            batch_size=BATCH_SIZE,
            bf16=bf16,
            world=world,
        )
        assert checkpoint.tokenizer is not None
        nelbo = summarize(found, example_sizes(held_out, checkpoint.tokenizer))
        records, logged = read_records(config.run.out), loss_records(config.run.out)
        return {
            "row": name,
            "train": command_line({"method": options["method"], **self.settings, **options}, self.entry.preset),
            "tokens": logged[-1]["tokens"],
            "parameters": sum(weight.numel() for weight in checkpoint.model.parameters()),
            "nelbo": {term: {unit: value[unit] for unit in ("nats", "bits_per_byte")} for term, value in nelbo.items()},
            "validation": [self.point(record, config.run.batch) for record in records if "loss" not in record],
            "trace": {key: [record[key] for record in logged] for key in ("tokens", "loss", "grad_norm", "grad_norm_max")},
            "tokens_per_second": speed(logged),
            "seconds": {"train": before + trained - start, "nelbo": time.monotonic() - trained},
            **({} if budget is None else {"budget": self.spent(budget, logged, before + trained - start)}),
            **provenance(self.device),
        }

    def spent(self, budget: dict[str, Any], records: list[dict[str, Any]], train_seconds: float) -> dict[str, Any]:
        """Return the budget of a row with what it has used: seconds of training steps and all others, and epochs."""
        tokens = records[-1]["tokens"]
        training = tokens / speed_of_halves(records)
        used = {"training_seconds": training, "other_seconds": train_seconds - training}
        return {**budget, **used, "epochs": tokens / self.described["train_tokens"]}

    def point(self, record: dict[str, Any], batch: int) -> dict[str, float]:
        """Return a validation of the trainer: NELBO, its terms and standard error in nats per token, and bits per byte."""
        nats = {key: record[f"validation_{name}"] * math.log(2) for key, name in {**TERMS, "error": "error"}.items()}
        tokens = record["step"] * batch * self.settings["data.length"]
        return {"tokens": tokens, **nats, "bits_per_byte": record["validation_bits"] / self.described["bytes_per_token"]}


def command_line(options: dict[str, Any], preset: str = "owt") -> str:
    """Return the command that trains with these options.

    Args:
        options: Options of `m2s train PRESET`.
        preset: The preset.
    """
    given = {key.replace("_", "-"): value for key, value in options.items() if value is not None}
    words = [f"--{key}" if value is True else f"--{key} {shlex.quote(str(value))}" for key, value in given.items()]
    return " ".join([f"m2s train {preset}", *words])


def read_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of the log of a run; none where there is no log.

    Args:
        run: The folder of the run.
    """
    return [line.record for line in read_log(run / LOG) if line.record is not None] if (run / LOG).exists() else []


def loss_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of the log that have a training loss.

    Args:
        run: The folder of the run.
    """
    return [record for record in read_records(run) if "loss" in record]


def logged_seconds(run: Path) -> float:
    """Return the seconds of all starts of a run, from its log. The clock restarts when a run resumes.

    Args:
        run: The folder of the run.
    """
    clock = [record["seconds"] for record in read_records(run)]
    return float(sum(now for now, following in itertools.pairwise([*clock, -1.0]) if following < now))


def describe(data: Path, length: int, limit: int | None) -> dict[str, Any]:
    """Describe the data: sources, sizes, and the cross entropy of held-out tokens under the unigram distribution.

    Args:
        data: Folder of the prepared text.
        length: Tokens per window.
        limit: Use at most this many held-out windows.
    """
    windows, held_out = (Tokens(data, split, length) for split in ("train", "validation"))
    count = min(len(held_out), limit or len(held_out))
    part = Shard(held_out, count)
    tokens = part[torch.arange(count)]
    counts = sum(np.bincount(shard, minlength=windows.vocab) for shard in windows._shards) + 1  # add-one smoothing
    unigram = -np.log(counts / counts.sum())[tokens.numpy()].mean()
    size = float(example_sizes(part, windows.tokenizer)["byte"].sum())
    return {
        "sources": [{key: source[key] for key in ("name", "sha256")} for source in windows.meta["sources"]],
        "tokenizer": windows.meta["tokenizer"]["kind"],
        "validation_fraction": windows.meta.get("validation_fraction"),
        "train_tokens": windows.meta["splits"]["train"]["tokens"],
        "validation_windows": count,
        "bytes_per_token": size / tokens.numel(),
        "unigram_nats": float(unigram),
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


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Args:
        path: The file.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return dict(with_current_names(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): remove it to compute its rows again") from error


def read_rows(out: Path, entry: Entry) -> dict[str, dict[str, Any]]:
    """Return the rows that have a file in the folder, in the order of the entry.

    Args:
        out: Folder of the rows.
        entry: The table.
    """
    return {name: read(out / f"{name}.json") for name in entry.rows if (out / f"{name}.json").exists()}


def known_rows(options: argparse.Namespace, shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of the results file, if it has the same settings and data.

    Args:
        options: Command line options.
        shared: Settings and description of the data.
    """
    path = options.results / f"text-{options.entry}.json"
    found = read(path) if path.exists() else {}
    equal = all(found.get(key) == value for key, value in shared.items())
    return {row["row"]: row for row in found["rows"]} if found and equal else {}


def check_settings(out: Path, shared: dict[str, Any]) -> None:
    """Raise an error unless the entry.json of the folder has the same settings and data.

    Args:
        out: Folder of the rows.
        shared: Settings and description of the data.

    Raises:
        UserError: The settings or the data differ.
    """
    path = out / "entry.json"
    if path.exists() and (existing := read(path)) != shared:
        key = next(key for key in shared if existing.get(key) != shared[key])
        raise UserError(
            f"{path} has {key} {existing.get(key)}, but now it is {shared[key]}: use another folder, or the same settings"
        )


def run(options: argparse.Namespace, started: float) -> bool:
    """Compute the rows that are not finished.

    Args:
        options: Command line options.
        started: `time.monotonic()` at the start of the process.

    Returns:
        Whether no row failed.
    """
    entry = ENTRIES[options.entry]
    changes = {key: as_json(value) for key, _, value in (pair.partition("=") for pair in options.set)}
    settings = {"data.length": PRESETS[entry.preset].data.length, **entry.settings, **changes}
    data = describe(options.data, settings["data.length"], options.limit)
    shared: dict[str, Any] = {"entry": options.entry, "settings": settings, "passes": entry.passes, "data": data}
    if entry.seconds is not None:
        entry = dataclasses.replace(entry, seconds=options.budget or entry.seconds)
        shared |= {"preset": entry.preset, "seconds": entry.seconds}
    shared = json.loads(json.dumps(shared))
    check_settings(options.out, shared)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speeds = measured_speeds(options.speeds, provenance(device)["device"])
    experiment = Experiment(options.out, options.data, entry, settings, data, device, speeds)
    for name in options.rows:
        resolve(experiment.config(name, entry.rows[name]))  # raise for invalid options before anything is written
    done = {**known_rows(options, shared), **read_rows(options.out, entry)}
    todo = [name for name in options.rows if name not in done]
    todo += [name for name in options.rows if "error" in done.get(name, {})]
    write_json(output_folder(options.out) / "entry.json", shared)
    for number, name in enumerate(todo):
        if time.monotonic() - started > options.seconds:
            print(f"{options.seconds:g} s have passed, not started: {', '.join(todo[number:])}")
            break
        print(f"{name} ({number + 1} of {len(todo)}), at {time.monotonic() - started:.0f} s", flush=True)
        try:
            row = experiment.measure(name, entry.rows[name])
        except Exception as error:
            row = {"row": name, "error": f"{type(error).__name__}: {error}"}
            print(f"{name} failed: {row['error']}", file=sys.stderr, flush=True)
            if device.type == "cuda":  # a failed graph capture leaves its stream current
                torch.cuda.set_stream(torch.cuda.default_stream())
        write_json(options.out / f"{name}.json", finite(row))
        if not options.keep and "error" not in row:
            shutil.rmtree(options.out / "runs" / name, ignore_errors=True)
    return not any("error" in row for row in read_rows(options.out, entry).values())


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the Markdown table: final NELBO, validations during training, gradient norms and speed.

    Args:
        rows: The rows, finished or failed.
    """
    finished = [row for row in rows if "error" not in row]
    points = sorted({point["tokens"] for row in finished for point in row["validation"][:-1]})
    columns = ["row", "NELBO, nats per token", "bits per byte", *(f"{tokens / 1e6:.1f} M" for tokens in points)]
    columns += ["gradient norm: median", "maximum", "tokens/s", "seconds"]
    budgeted = any("budget" in row for row in finished)
    columns += ["of them training", "M tokens", "epochs"] if budgeted else []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| `{row['row']}` | failed: {row['error'].splitlines()[0]} |" + " |" * (len(columns) - 2))
            continue
        nats, trace = row["nelbo"]["nelbo"]["nats"], row["trace"]
        cells = [f"`{row['row']}`", f"{nats['value']:.3f} ± {nats['rows_error']:.3f}"]
        cells += [f"{row['nelbo']['nelbo']['bits_per_byte']['value']:.3f}"]
        found = {point["tokens"]: f"{point['nats']:.3f}" for point in row["validation"][:-1]}
        cells += [found.get(tokens, "-") for tokens in points]
        cells += [f"{statistics.median(trace['grad_norm']):,.0f}", f"{max(trace['grad_norm_max']):,.0f}"]
        cells += [f"{row['tokens_per_second'] or math.nan:,.0f}", f"{row['seconds']['train']:.0f}"]
        if budgeted:
            budget = row["budget"]
            cells += [f"{budget['training_seconds']:.0f}", f"{row['tokens'] / 1e6:.1f}", f"{budget['epochs']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_table(options: argparse.Namespace) -> None:
    """Print the table of the rows in the folder and in the results file, and write the results file.

    Args:
        options: Command line options.

    Raises:
        UserError: The folder has no rows.
    """
    entry, path = ENTRIES[options.entry], options.out / "entry.json"
    if not path.exists():
        raise UserError(f"{options.out} has no rows: compute them with python experiments/text.py {options.out} --data FOLDER")
    shared = read(path)
    found = {**known_rows(options, shared), **read_rows(options.out, entry)}
    rows = [found[name] for name in entry.rows if name in found]
    print("\n".join(format_table(rows)))
    target = output_folder(options.results) / f"text-{options.entry}.json"
    write_json(target, {"command": command(), **shared, "rows": rows})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read and validate the command line.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Raises:
        UserError: A value is invalid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder that m2s data prepare wrote")
    parser.add_argument("--entry", default="recipe", choices=ENTRIES, help="the table (%(default)s)")
    parser.add_argument("--rows", metavar="A,B,C", help="only these rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this many seconds")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="seconds of training of each row, in place of the entry's"
    )
    parser.add_argument(
        "--speeds",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="tables with the speed of rows, in place of short runs",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=C", help="change settings of all rows")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N held-out windows")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint of each row in OUT/runs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder of text-ENTRY.json")
    parser.add_argument("--table", action="store_true", help="print the table and write text-ENTRY.json")
    options = parser.parse_args(arguments)
    rows = ENTRIES[options.entry].rows
    options.rows = options.rows.split(",") if options.rows else list(rows)
    for name in options.rows:
        if name not in rows:
            raise UserError(f"{options.entry} has no row {name!r}: {suggest(name, rows)}")
    if options.data is None and not options.table:
        raise UserError("--data is missing: give the folder that `m2s data prepare` wrote")
    if options.budget is not None and (ENTRIES[options.entry].seconds is None or options.budget <= 0):
        budgeted = ", ".join(BUDGETED)
        raise UserError(f"--budget is {options.budget:g}, but it must be above 0, and belongs to the entries {budgeted}")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit is {options.limit}, but it must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    started = time.monotonic()
    try:
        options = parse(arguments)
        if options.table:
            write_table(options)
            return 0
        return 0 if run(options, started) else 1
    except (UserError, BadData) as error:
        print(f"text.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
