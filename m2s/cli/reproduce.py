"""`m2s reproduce NAME`: evaluate a released checkpoint as its authors did, and print the published figure beside the result."""

import functools
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m2s import validation
from m2s.cli.evaluate.bpd import finite
from m2s.cli.help_text import help_from_source
from m2s.cli.sampling_args import load_checkpoint
from m2s.devices import resolve_device
from m2s.errors import UserError, counted, print_escaped
from m2s.io import output_file, require_absent, write_json
from m2s.progress import Progress
from m2s.provenance import is_rerun

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.evaluation.bpd import DatasetNelbo
    from m2s.evaluation.published import Published
    from m2s.hub import Checkpoint

MAX_EXAMPLES, MAX_LOGITS = 16, 2**27  # of a call of the network, unless --batch-size is given


@dataclass(frozen=True)
@help_from_source
class Reproduce:
    """Evaluate a released checkpoint on the text of its paper, and print the published perplexity beside the result.

    Without NAME it lists the results. Each has its checkpoint, its text, its windows, and the terms of the published figure.
    The checkpoint is downloaded, or --checkpoint is its copy in any layout that m2s loads. The text is not downloaded: the
    command prints how to get it, and --data is the file.

    The result is printed as the authors compute it, often as a mean over times in place of the integral, and with all terms of
    the negative ELBO: integral, prior and reconstruction. A departure from the protocol of the authors is named.

    Example: m2s reproduce mdlm-owt --data owt.jsonl --limit 1000 --out mdlm.json
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """A published result, such as mdlm-owt; by default they are listed."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """The text: a file or folder of .txt, .jsonl or .parquet, with one document per line or record."""
    checkpoint: Annotated[str | None, tyro.conf.arg(metavar="CHECKPOINT")] = None
    """A copy of the checkpoint: a folder, a file, or a repository OWNER/NAME; by default the released one is downloaded."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Use only so many windows, spread evenly over the text; by default all."""
    passes: int = 1
    """Times drawn for each window. The error over times needs at least 2."""
    seed: int = 0
    """Seed of times and noise."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Windows in each call of the network; by default at most 16, and fewer where the vocabulary is large."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of the network's body: auto is bf16 on a GPU, as the authors measure, and float32 elsewhere."""
    device: str = ""
    """cpu or cuda; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write both figures and all they depend on as .json; by default they are only printed."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        """Evaluate, and print both figures.

        Raises:
            UserError: There is no such result, or the checkpoint or the text is not there.
        """
        from m2s.evaluation.likelihood import ESTIMATORS
        from m2s.evaluation.published import PUBLISHED

        if self.name is None:
            print_escaped("\n".join(_listed()))
            return
        entry = PUBLISHED.find(self.name, "name")
        for name in ("limit", "passes", "batch_size"):
            if getattr(self, name) is not None:
                validation.positive_int(name, getattr(self, name))
        if self.out is not None:
            require_absent([self.out], self.overwrite or is_rerun(self.out))
            output_file(self.out, (".json",))
        print_escaped("\n".join(_described(entry)))
        if self.data is None:
            raise UserError(f"--data is missing: {_needs(entry)}")
        device = resolve_device(self.device)
        checkpoint = self._load(entry, device)
        if reason := ESTIMATORS[entry.estimator].unsupported(checkpoint.head):
            raise UserError(f"the published number is not for models such as {checkpoint.head}: {reason}. {_needs(entry)}")
        length = checkpoint.length or entry.length
        rows, left_out = self._rows(entry, checkpoint, length)
        self._evaluate(entry, checkpoint, rows, left_out, device)

    def _load(self, entry: "Published", device: str) -> "Checkpoint":
        """The checkpoint, with its tokenizer."""
        place = self.checkpoint or entry.checkpoint
        try:
            checkpoint = load_checkpoint(place, device)
        except UserError as error:
            raise UserError(f"{error}. {_needs(entry)}") from error
        if checkpoint.tokenizer is None:
            raise UserError(f"{place} has no tokenizer: {checkpoint.tokenizer_hint}")
        return checkpoint

    def _rows(self, entry: "Published", checkpoint: "Checkpoint", length: int) -> "tuple[Tensor, int]":
        """The windows, and the number of tokens that are left out."""
        import torch

        from m2s.data.documents import require_source
        from m2s.evaluation.bpd import Shard
        from m2s.evaluation.published import cut_windows, read_text

        assert self.data is not None and checkpoint.tokenizer is not None
        if not Path(self.data).expanduser().exists():
            raise UserError(f"there is no file or folder {self.data}: {_needs(entry)}")
        require_source(self.data)
        rows, left_out = cut_windows(read_text(entry, self.data), checkpoint.tokenizer, length, entry.windows)
        if self.limit is not None and self.limit < len(rows):
            rows = Shard(rows, self.limit)[torch.arange(self.limit)]
        return rows, left_out

    def _evaluate(self, entry: "Published", checkpoint: "Checkpoint", rows: "Tensor", left_out: int, device: str) -> None:
        """Estimate the figure and the NELBO, print both beside the published figure, and write them."""
        import torch

        from m2s.distributed import World
        from m2s.evaluation.bpd import dataset_nelbo, summarize
        from m2s.evaluation.likelihood import ESTIMATORS, Options, measure
        from m2s.provenance import fingerprint, provenance

        place, states = torch.device(device), checkpoint.head.process.states
        size = self.batch_size or max(1, min(MAX_EXAMPLES, MAX_LOGITS // (rows.shape[1] * states)))
        bf16 = self.precision == "bf16" or (self.precision == "auto" and place.type == "cuda")
        departures = self._departures(entry, rows, bf16)
        windows = f"{counted(len(rows), 'window')} of {rows.shape[1]} tokens"
        print_escaped(
            f"{windows}, {counted(self.passes, 'pass')}; about {_minutes(checkpoint, rows, size, self.passes, place)}"
        )
        started = time.monotonic()
        try:
            found: DatasetNelbo = dataset_nelbo(
                checkpoint.model, checkpoint.head, rows, self.passes, 1e-3, self.seed, size, None, bf16, World(0, 1, place)
            )
            with Progress(len(rows), "as published", "window") as progress:
                autocast = functools.partial(torch.autocast, place.type, torch.bfloat16, enabled=bf16)
                given = (entry.estimator, self.passes, self.seed, size, None, None, 0, place, progress.update, autocast)
                theirs = measure(checkpoint.model, checkpoint.head, rows, *given).summary({"token": float(rows.shape[1])})
        except torch.OutOfMemoryError as error:
            raise UserError(f"{size} windows per call do not fit into the memory of {device}: give --batch-size") from error
        result = summarize(found, {})
        lines = [f"{'published perplexity':32s}{entry.perplexity:>10.2f}   {entry.terms}"]
        result["as_published"] = {"perplexity": _perplexity(theirs, rows.shape[1]), "estimator": entry.estimator}
        lacks = ESTIMATORS[entry.estimator].missing(checkpoint.head, Options())
        kinds = {
            "as_published": ("as published", lacks),
            "integral": ("the integral alone", ("its ends",)),
            "nelbo": ("all terms", ()),
        }
        for term, (label, missing) in kinds.items():
            value = result[term]["perplexity"]
            errors = [
                f"± {value[key]:.2f} ({what})" for key, what in (("error", "times"), ("rows_error", "windows")) if value[key]
            ]
            note = f"not a bound: lacks {', '.join(missing)}" if missing else "an upper bound, in expectation over times"
            lines.append(f"{f'ours, {label}':32s}{value['value']:>10.2f}   {' '.join([*errors, note])}")
        lines += [f"departure: {text}" for text in departures]
        print_escaped("\n".join(lines))
        if self.out is None:
            return
        numbers: dict[str, Any] = {
            "name": self.name,
            "published": asdict(entry),
            **result,
            "windows": len(rows),
            "tokens": int(rows.numel()),
            "left_out": left_out,
            "departures": departures,
            "checkpoint": {"head": repr(checkpoint.head), "weights": fingerprint(checkpoint.model)},
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()},
            "batch_size": size,
            "precision": "bf16" if bf16 else "float32",
            "seconds": round(time.monotonic() - started, 1),
            **provenance(place),
        }
        write_json(self.out, finite(numbers))
        print_escaped(f"written to {self.out}")

    def _departures(self, entry: "Published", rows: "Tensor", bf16: bool) -> list[str]:
        """What differs from the protocol of the authors."""
        found = []
        if rows.shape[1] != entry.length:
            found.append(f"windows have {rows.shape[1]} tokens, which the checkpoint was made for, and not {entry.length}")
        if self.limit is not None:
            found.append(f"{len(rows)} windows, not the complete text")
        if self.checkpoint is not None:
            found.append(f"the checkpoint is {self.checkpoint}; the published one is {entry.checkpoint}")
        if not bf16:
            found.append("float32; the authors measure in bfloat16")
        return found


def _perplexity(found: dict[str, Any], length: int) -> dict[str, float | None]:
    """The perplexity of a token, with its standard error over windows, from a summary in nats per window."""
    value = math.exp(min(found["nats"] / length, 700.0))
    return {"value": value, "error": None, "rows_error": value * found["error"] / length if found["error"] > 0 else None}


def _described(entry: "Published") -> list[str]:
    """What is reproduced."""
    return [
        f"{entry.title}: perplexity {entry.perplexity} ({entry.reference})",
        f"  checkpoint {entry.checkpoint}; text: {entry.text}",
        f"  windows of {entry.length} tokens ({entry.windows}); {entry.protocol}",
    ]


def _needs(entry: "Published") -> str:
    """The files that an evaluation needs."""
    return (
        f"needed are the checkpoint {entry.checkpoint} (its config.json and weights, given as --checkpoint where this machine "
        f"is offline), GPT-2's merges (m2s data download gpt2), and {entry.text} as --data: {entry.obtain}"
    )


def _listed() -> list[str]:
    """One line for each result."""
    from m2s.evaluation.published import PUBLISHED

    lines = [f"{'name':22s}{'perplexity':>10s}  checkpoint"]
    return lines + [f"{name:22s}{entry.perplexity:>10.2f}  {entry.checkpoint}" for name, entry in PUBLISHED.items()]


def _minutes(checkpoint: "Checkpoint", rows: "Tensor", size: int, passes: int, device: Any) -> str:
    """The estimated time, from one call of the network."""
    import torch

    from m2s.heads.output import call_model

    batch = rows[:size].to(device).long()
    t = torch.full((len(batch),), 0.5, device=device)
    began = time.monotonic()
    with torch.no_grad():
        call_model(checkpoint.model, checkpoint.head.process, batch, t)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    calls = math.ceil(len(rows) / size) * (3 * passes + 1)
    seconds = calls * (time.monotonic() - began)
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
