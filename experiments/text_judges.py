"""Judge all samples of the text experiments: perplexity with entropy, MAUVE and the Frechet distance of embeddings.

    python experiments/text_judges.py pack arrived/results --data packed/text --adversaries adversaries --out for-judges
    python experiments/text_judges.py judge for-judges judged --judges gemma-3-270m SmolLM2 --seconds 560     # on a GPU
    python experiments/text_judges.py judge for-judges judged --judges ...             # again: continues where it ended

`pack` collects the samples of one or several folders that experiments/text_job.py filled, adversaries of `m2s data
adversaries` and the held-out text. Projected samples of a repair become those of a row ROW-projected. Rows that were trained
for another time than those of the entry `methods` have it in their name, such as sedd-20min. With `--done JUDGED` it leaves
out sets that every judge has read. experiments/transfer.py brings the folder to another machine.

`judge` writes OUT/JUDGE/ROW/SET.json: the summary of `m2s evaluate genppl`, with the numbers of each sequence, and the metrics
of `m2s evaluate text` that need a judge. A set that has a file is not judged again. A call begins no set that may not end
within `--seconds`. Weights and results are float32; on a GPU matrix products round their operands to TF32. With `--bundle` the
results are packed for one transfer, while the call runs and at its end (experiments/job_results.py). Tables of them are made by
experiments/text_tables.py.
"""

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the import below, also where this file is loaded by its path
import job_results

from m2s.data import BadData, Tokens
from m2s.data.tokens import read_meta
from m2s.errors import UserError
from m2s.evaluation import TEXT_METRICS
from m2s.evaluation.genppl import PROTOCOLS, Samples, read_samples, summarize
from m2s.evaluation.judge import load_judge
from m2s.evaluation.text import MeasuredText, TextContext
from m2s.evaluation.text.held_out import load_held_out
from m2s.evaluation.text.measure import JudgeReader
from m2s.io import output_folder, write_json
from m2s.provenance import provenance

HELD_OUT, SAMPLES, PROJECTED, ADVERSARIES = "held-out", "samples", "projected", "adversaries"
SPLIT = "validation"
BATCHES = {"cpu": 8, "cuda": 64}  # sequences in each call of a judge
MINUTES = {"methods": ""}  # entries whose rows have no time in their names
PACKING = 0.1  # of the time of a call at most, for results that are packed while it runs


def row_name(row: str, entry: dict[str, Any]) -> str:
    """Return the name of a row among those of several entries.

    Args:
        row: The row.
        entry: The content of entry.json.
    """
    return row + MINUTES.get(entry["entry"], f"-{entry['seconds'] / 60:.0f}min")


def collect(folder: Path) -> dict[str, Path]:
    """Return the sets of samples of a folder that experiments/text_job.py filled.

    Args:
        folder: The folder, with entry.json.

    Returns:
        The files by ROW/SET.

    Raises:
        UserError: The folder has no entry.json.
    """
    try:
        entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no readable entry.json ({error}): give a folder of experiments/text_job.py") from error
    found = {f"{row_name(path.parent.name, entry)}/{path.stem}": path for path in sorted((folder / SAMPLES).glob("*/*.npz"))}
    for path in sorted(folder.glob(f"repair/*/{PROJECTED}.npz")):
        row, steps = path.parent.name.rsplit("-", 1)
        found[f"{row_name(row, entry)}-{PROJECTED}/analytic-linear-{steps}"] = path
    for path in sorted(folder.glob("repair/*/unprojected.npz")):  # of a repair that has not ended
        row, steps = path.parent.name.rsplit("-", 1)
        found.setdefault(f"{row_name(row, entry)}/analytic-linear-{steps}", path)
    return found


def pack(options: argparse.Namespace) -> None:
    """Collect samples, adversaries and held-out text in one folder.

    Args:
        options: Command line options.

    Raises:
        UserError: Two folders have different samples of one name, or a file is missing.
    """
    files: dict[str, Path] = {}
    for folder in options.folders:
        for name, path in collect(folder).items():
            if name in files and files[name].read_bytes() != path.read_bytes():
                raise UserError(f"{files[name]} and {path} differ, but both are the samples {name}: leave out one folder")
            files[name] = path
    adversaries = sorted(options.adversaries.glob("*.npz"))
    if not adversaries:
        raise UserError(f"{options.adversaries} has no .npz: make them with m2s data adversaries")
    files |= {f"{ADVERSARIES}/{path.stem}": path for path in adversaries}
    if options.done is not None:
        judges = [path for path in options.done.iterdir() if path.is_dir()]
        files = {name: path for name, path in files.items() if not all((one / f"{name}.json").exists() for one in judges)}
    if options.out.exists():
        shutil.rmtree(options.out)
    for name, path in files.items():
        target = options.out / SAMPLES / f"{name}.npz"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    copy_held_out(options.data, output_folder(options.out / HELD_OUT))
    print(f"{len(files)} sets of samples in {options.out}")


def copy_held_out(data: Path, target: Path) -> None:
    """Copy the held-out text of a prepared text, without the text to train on.

    Args:
        data: Folder that `m2s data prepare` wrote.
        target: An existing folder.
    """
    meta = read_meta(data)
    shards = {shard["file"] for split, entry in meta["splits"].items() if split != SPLIT for shard in entry["shards"]}
    for path in sorted(data.iterdir()):
        if path.is_file() and path.name not in shards:
            shutil.copyfile(path, target / path.name)


@dataclass(frozen=True)
class Judging:
    """What all sets are compared with, and how.

    Args:
        folder: The folder that `pack` made.
        limit: Samples of each set; None: those of the protocol.
        resamples: Bootstrap resamples.
    """

    folder: Path
    limit: int | None
    resamples: int

    def texts(self) -> tuple[dict[str, Path], MeasuredText, Samples]:
        """Return the files of all sets by name, and two sets of held-out windows: to compare with, and to measure."""
        files = {f"{path.parent.name}/{path.stem}": path for path in sorted((self.folder / SAMPLES).glob("*/*.npz"))}
        if not files:
            raise UserError(f"{self.folder} has no samples: make it with text_judges.py pack")
        first = self.read(next(iter(files.values())))
        assert first.tokens is not None
        count, length = first.tokens.shape
        held_out = load_held_out(self.folder / HELD_OUT, SPLIT, count, length, self.tokenizer, PROTOCOLS["paper"])
        return files, MeasuredText(held_out[0]), held_out[1]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the text."""
        return Tokens(self.folder / HELD_OUT, SPLIT, 1).tokenizer

    def read(self, path: Path) -> Samples:
        """Read a set of samples.

        Args:
            path: The file.
        """
        return read_samples(path, PROTOCOLS["paper"], self.tokenizer, self.limit)

    def measure(self, samples: Samples, reference: MeasuredText, reader: JudgeReader) -> dict[str, Any]:
        """Judge a set and compute all metrics that need a judge, except the perplexity, which the summary has.

        Args:
            samples: The set.
            reference: Held-out windows.
            reader: The judge.
        """
        scores = reader.read(samples)
        reference = MeasuredText(reference.samples, reader.read(reference.samples))
        context = TextContext(reference, None, self.resamples, 0, reader.judge.device)
        found = {
            name: metric.measure(MeasuredText(samples, scores), context)
            for name, metric in TEXT_METRICS.items()
            if metric.needs == {"judge"}
        }
        reader.forget(samples)
        return {"genppl": summarize(scores, self.resamples), "metrics": found}


@dataclass
class Bundle:
    """Packs the results of the judges.

    Args:
        out: The folder of all results.
        target: The link to the newest version; None: nothing is packed.
        next: `time.monotonic()` before which nothing is packed while judges read.
    """

    out: Path
    target: Path | None
    next: float = 0.0

    def after_set(self) -> None:
        """Pack what there is, unless it would take too much of the time of the call."""
        begin = time.monotonic()
        if begin >= self.next:
            self.pack()
            end = time.monotonic()
            self.next = end + (end - begin) / PACKING

    def pack(self) -> int:
        """Pack what there is, and return the bytes of all parts."""
        if self.target is None or not self.out.exists():
            return 0
        return job_results.publish(self.out, self.target, xz=True)


def judge(options: argparse.Namespace, started: float, bundle: Bundle) -> bool:
    """Judge the sets that have no file.

    Args:
        options: Command line options.
        started: `time.monotonic()` at the start of the process.
        bundle: Packs the results.

    Returns:
        Whether all sets are judged by all judges.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    judging = Judging(options.folder, options.limit, options.resamples)
    files, reference, real = judging.texts()
    longest = 0.0
    for name in options.judges:
        missing = [key for key in (*files, f"{HELD_OUT}/{SPLIT}") if not (options.out / name / f"{key}.json").exists()]
        if not missing:
            continue
        one = load_judge(name, options.device, "float32")
        reader = JudgeReader(one, options.batch_size or BATCHES.get(one.device.type, BATCHES["cpu"]))
        described = {"described": reader.described, "matmul": "TF32" if one.device.type == "cuda" else "float32"}
        for number, key in enumerate(missing):
            begin = time.monotonic()
            if begin - started + 1.5 * longest > options.seconds:
                print(f"not finished: {len(missing) - number} sets are left for {name}: the same command continues", flush=True)
                return False
            samples = judging.read(files[key]) if key in files else real
            found = judging.measure(samples, reference, reader)
            target = options.out / name / f"{key}.json"
            output_folder(target.parent)
            write_json(target, {"set": key, "judge": described, **found, **provenance(one.device, "transformers")})
            bundle.after_set()
            longest = max(longest, time.monotonic() - begin)
            value = found["genppl"]["perplexity"]["value"]
            print(f"at {time.monotonic() - started:.0f} s: {name}: {key}: perplexity {value:.2f}", flush=True)
    print(f"finished: {len(files)} sets, after {time.monotonic() - started:.0f} s", flush=True)
    return True


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line.

    Args:
        arguments: Arguments in place of `sys.argv`.

    Raises:
        UserError: A value is out of range.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    packed = actions.add_parser("pack", help="collect everything that is to be judged in one folder")
    packed.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of experiments/text_job.py")
    packed.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder that m2s data prepare wrote")
    packed.add_argument("--adversaries", type=Path, required=True, metavar="FOLDER", help="folder of m2s data adversaries")
    packed.add_argument("--done", type=Path, metavar="JUDGED", help="leave out sets that all judges of this folder have read")
    packed.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write; it is replaced")
    judged = actions.add_parser("judge", help="let judges read everything that was packed")
    judged.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that pack made")
    judged.add_argument("out", type=Path, metavar="OUT", help="the folder of the results")
    judged.add_argument("--judges", nargs="+", required=True, metavar="NAME", help="judges, as m2s evaluate genppl takes them")
    judged.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no set that may end after them; 0: only --bundle"
    )
    judged.add_argument("--bundle", type=Path, metavar="FOLDER", help="pack the results into this folder")
    judged.add_argument("--limit", type=int, metavar="N", help="only the first N samples of each set, for a trial")
    judged.add_argument("--resamples", type=int, default=2000, help="bootstrap resamples (%(default)s)")
    judged.add_argument("--batch-size", type=int, metavar="N", help="sequences in each call of a judge (64 on a GPU, else 8)")
    judged.add_argument("--device", default="", help="cpu or cuda; by default cuda where there is a GPU")
    options = parser.parse_args(arguments)
    if options.action == "judge":
        if options.bundle is not None:
            job_results.check_target(options.bundle)
        for name, value, least in (("limit", options.limit, 2), ("resamples", options.resamples, 100)):
            if value is not None and value < least:
                raise UserError(option=name, value=value, expected=f"at least {least}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    started = time.monotonic()
    try:
        options = parse(arguments)
        if options.action == "pack":
            pack(options)
            return 0
        bundle = Bundle(options.out, options.bundle)
        if options.seconds > 0:
            judge(options, started, bundle)
        if options.bundle is not None:
            print(f"{bundle.pack():,} bytes of results in {options.bundle}", flush=True)
        return 0
    except (UserError, BadData) as error:
        print(f"text_judges.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
