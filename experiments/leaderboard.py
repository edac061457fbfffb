"""Check an entry of the leaderboard "one H200, 30 minutes" and compute its score. The rules are in docs/leaderboard.md.

    m2s data prepare texts/ --out packed/text --tokenizer gpt2
    python experiments/leaderboard.py verify entries/m2s-offset --data packed/text            # on a GPU: about a minute
    python experiments/leaderboard.py verify entries/m2s-offset --data packed/text --windows 16      # a quick trial

An entry is a folder with entry.json and one folder for each run: what `m2s train` writes, without states. The command compares
the data with the SHA-256 of the rules, checks time, device and data of each run, and computes the NELBO of the held-out windows
from its weights, with all terms. It prints a row of the table. Without `--windows` it also writes FOLDER/verified.json.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the import below, also where this file is loaded by its path
from text_speed import logged_seconds

import m2s
from m2s.cli.evaluate.bpd import finite
from m2s.cli.plugins import load_plugins
from m2s.data import Tokens
from m2s.data.files import BadData
from m2s.devices import resolve_device
from m2s.distributed import World
from m2s.errors import UserError
from m2s.evaluation.bpd import Shard, dataset_nelbo, example_sizes, summarize
from m2s.io import read_json, write_json
from m2s.provenance import command, fingerprint, provenance
from m2s.training.config import RECORD
from m2s.training.log import NAME as LOG
from m2s.training.run_folder import read_record

ENTRY, RESULT = "entry.json", "verified.json"
SECONDS = 1800.0
DEVICE = "H200"
RULES = Path(__file__).parent / "results" / "leaderboard-data.json"
LENGTH, PASSES, SEED, BATCH_SIZE = 512, 4, 0, 32
FIELDS = {"name": str, "method": str, "code": str, "runs": list}
RUN_FIELDS = {"folder": str, "seed": int, "seconds": (int, float), "command": str}


def describe(folder: Path) -> dict[str, Any]:
    """Describe a prepared text, after every file was compared with its SHA-256.

    Args:
        folder: Folder that `m2s data prepare` wrote.

    Returns:
        Sources, counts, and the SHA-256 of all tokens with the tokenizer.
    """
    train, held_out = (Tokens(folder, split, LENGTH, verify=True) for split in ("train", "validation"))
    sources = [{key: source[key] for key in ("name", "bytes", "sha256")} for source in held_out.meta["sources"]]
    splits = {
        name: {key: held_out.meta["splits"][name][key] for key in ("documents", "tokens")} for name in ("train", "validation")
    }
    size = float(example_sizes(held_out, held_out.tokenizer)["byte"].sum())
    return {
        "sources": sources,
        "tokenizer": held_out.meta["tokenizer"]["kind"],
        "splits": splits,
        "train_windows": len(train),
        "validation_windows": len(held_out),
        "window": LENGTH,
        "validation_bytes": size,
        "sha256": held_out.fingerprint,
    }


def check_data(folder: Path, rules: dict[str, Any]) -> Tokens:
    """Return the held-out windows of the rules, after every file was compared with its SHA-256.

    Args:
        folder: Folder that `m2s data prepare` wrote.
        rules: What `describe` returned for the text of the rules.

    Raises:
        UserError: The text or its tokens are not those of the rules.
    """
    windows = Tokens(folder, "validation", LENGTH, verify=True)
    found = {source["name"]: source["sha256"] for source in windows.meta["sources"]}
    expected = {source["name"]: source["sha256"] for source in rules["sources"]}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            raise UserError(
                f"{folder} was made from {name} with SHA-256 {found.get(name)}; the rules have {expected.get(name)}"
            )
    if windows.fingerprint != rules["sha256"]:
        raise UserError(
            f"{folder} holds other tokens than the rules ({windows.fingerprint}, not {rules['sha256']}): prepare the files "
            "with --tokenizer gpt2 and no other option"
        )
    return windows


def read_entry(folder: Path) -> dict[str, Any]:
    """Return the content of entry.json.

    Args:
        folder: The folder of the entry.

    Raises:
        UserError: It is missing, or has no value for a field of the rules.
    """
    hint = "docs/leaderboard.md says what it must hold"
    entry = read_json(folder / ENTRY, hint)
    fields = [(entry, name, kind) for name, kind in FIELDS.items()]
    runs = entry.get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise UserError(f"{folder / ENTRY} has no list of runs: {hint}")
    fields += [(run, name, kind) for run in runs for name, kind in RUN_FIELDS.items()]
    for part, name, kind in fields:
        if not isinstance(part.get(name), kind):
            raise UserError(f"{folder / ENTRY} has {name} {part.get(name)!r}: {hint}")
    return entry


def check_run(folder: Path, run: dict[str, Any], tokens: str) -> None:
    """Check the record of a run: data, device, time, and that it started from random weights.

    Args:
        folder: The folder of the run.
        run: Its part of entry.json.
        tokens: The SHA-256 of the tokens of the rules.

    Raises:
        UserError: The run is not as the rules say.
    """
    record = read_record(folder, "copy the complete folder of the run")
    config, starts = record["config"], record["starts"]
    seconds = run["seconds"]
    if not 0 < seconds <= SECONDS:
        raise UserError(f"{folder} took {seconds:g} s, but the rules allow {SECONDS:g}")
    logged = logged_seconds(folder)
    if not 0 < logged <= seconds:
        raise UserError(f"{folder / LOG} has {logged:.0f} s of training, but {ENTRY} has {seconds:g} s for all of the run")
    checks: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
        "data.sha256": (record["data"].get("sha256"), lambda value: value == tokens, tokens),
        "data.length": (record["data"]["length"], lambda value: value == LENGTH, str(LENGTH)),
        "run.seed": (config.get("run", {}).get("seed"), lambda value: value == run["seed"], f"{run['seed']}, as {ENTRY} says"),
        "run.init": (config.get("run", {}).get("init"), lambda value: value is None, "none: random weights"),
        "processes": ({start.get("processes") for start in starts}, lambda value: value == {1}, "one process"),
        "gpu": (
            {start.get("gpu") for start in starts},
            lambda value: value and all(DEVICE in str(gpu) for gpu in value),
            f"one {DEVICE}",
        ),
    }
    for name, (value, accepts, expected) in checks.items():
        if not accepts(value):
            raise UserError(f"{folder / RECORD} has {name} {value}, expected {expected}")


def score(folder: Path, windows: Tokens, count: int | None, device: torch.device) -> dict[str, Any]:
    """Compute the NELBO of a run on held-out windows, with all terms.

    Args:
        folder: The folder of the run.
        windows: The held-out windows.
        count: Use only so many windows; None: all.
        device: Where the network runs, in bf16 on a GPU.

    Returns:
        The terms, each in bits per byte and nats per token, with errors, and what identifies the weights.

    Raises:
        UserError: The weights cannot be read, or do not belong to tokens of the rules.
    """
    try:
        checkpoint = m2s.load(folder, device, verify=True)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise UserError(f"{folder} cannot be loaded: {error}") from error
    checkpoint.model.float()
    if checkpoint.head.process.vocab != windows.vocab or checkpoint.length != LENGTH:
        raise UserError(f"{folder} is a network for {checkpoint.length} tokens of {checkpoint.head.process.vocab}: retrain it")
    shard = Shard(windows, min(count or len(windows), len(windows)))
    bf16, world = device.type == "cuda", World(0, 1, device)
    found = dataset_nelbo(
        checkpoint.model, checkpoint.head, shard, PASSES, seed=SEED, batch_size=BATCH_SIZE, bf16=bf16, world=world
    )
    terms = summarize(found, example_sizes(shard, windows.tokenizer))
    return {
        "terms": {name: {unit: value[unit] for unit in ("nats", "bits_per_byte")} for name, value in terms.items()},
        "exact": found.exact,
        "windows": len(shard),
        "parameters": sum(weight.numel() for weight in checkpoint.model.parameters()),
        "weights": fingerprint(checkpoint.model),
    }


def bits_per_byte(result: dict[str, Any]) -> float:
    """Return the score of a run.

    Args:
        result: What `score` returned.
    """
    return float(result["terms"]["nelbo"]["bits_per_byte"]["value"])


def format_row(entry: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return the row of the table: mean over runs, their spread, seeds, seconds and parameters.

    Args:
        entry: The content of entry.json.
        results: What `score` returned for each run.
    """
    scores = [bits_per_byte(result) for result in results]
    spread = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
    seconds = max(run["seconds"] for run in entry["runs"])
    bound = "exact" if all(result["exact"] for result in results) else "upper bound"
    cells = [entry["name"], entry["method"], f"{statistics.mean(scores):.4f}{spread}", bound, str(len(scores))]
    cells += [f"{seconds:.0f}", f"{results[0]['parameters']:,}"]
    return f"| {' | '.join(cells)} |".replace("\n", " ")


def verify(options: argparse.Namespace) -> None:
    """Check an entry, print its row and write verified.json.

    Args:
        options: Command line options.

    Raises:
        UserError: The entry is not as the rules say, or its score is not a number.
    """
    load_plugins(options.plugin)
    entry = read_entry(options.folder)
    rules = read_json(RULES, "write it with leaderboard.py data")
    windows = check_data(options.data, rules)
    folders = [options.folder / run["folder"] for run in entry["runs"]]
    for folder, run in zip(folders, entry["runs"], strict=True):
        check_run(folder, run, rules["sha256"])
    seeds = [run["seed"] for run in entry["runs"]]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{options.folder / ENTRY} has runs with the same seed: {seeds}")
    device = torch.device(resolve_device(options.device))
    results = []
    for folder in folders:
        results.append(score(folder, windows, options.windows, device))
        if not math.isfinite(value := bits_per_byte(results[-1])):
            raise UserError(f"the NELBO of {folder} is not finite")
        error = results[-1]["terms"]["nelbo"]["bits_per_byte"]["rows_error"]
        print(f"{folder}: {value:.4f} ± {error:.4f} bits per byte on {results[-1]['windows']:,} windows", flush=True)
    print(format_row(entry, results))
    if options.windows is None:
        write_json(options.folder / RESULT, finite({"entry": entry, "runs": results, **provenance(device)}))
    else:
        print(f"a trial: {RESULT} is written for all {len(windows):,} windows only")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("verify", "data"), help="data: write the description of the text to FOLDER")
    parser.add_argument("folder", type=Path, help="folder of the entry")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder that m2s data prepare wrote")
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", help="Python file with the parts of the method"
    )
    parser.add_argument("--windows", type=int, metavar="N", help="a trial on N held-out windows")
    parser.add_argument("--device", default="", help="cpu or cuda; by default cuda where there is a GPU")
    options = parser.parse_args(arguments)
    try:
        if options.windows is not None and options.windows < 1:
            raise UserError(f"--windows is {options.windows}, but it must be at least 1")
        if options.action == "data":
            write_json(options.folder / RULES.name, {**describe(options.data), "command": command()})
        else:
            verify(options)
        return 0
    except (UserError, BadData) as error:
        print(f"leaderboard.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
