"""`m2s evaluate bpd CHECKPOINT`: the NELBO of held-out data, an upper bound on its negative log-likelihood."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m2s.cli.evaluate.held_out import SPLITS, HeldOut, HeldOutSource, check_same_data
from m2s.cli.help_text import help_from_source
from m2s.cli.sampling_args import load_checkpoint
from m2s.errors import UserError, counted, print_escaped
from m2s.io import atomic_write, output_file, require_absent, write_json
from m2s.patches import AttributePatches
from m2s.provenance import is_rerun

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.distributed import World
    from m2s.evaluation.bpd import DatasetNelbo
    from m2s.hub import Checkpoint

# Largest numbers of examples and of logits in a call of the network, unless --batch-size is given.
MAX_EXAMPLES, MAX_LOGITS = 64, 2**28


@dataclass(frozen=True)
class _Setup:
    """What one evaluation runs on: the models, the data, and how the network is called."""

    checkpoint: "Checkpoint"
    other: "Checkpoint | None"
    held_out: HeldOut
    text: "dict[str, Tensor] | None"  # bytes and characters of each example; None for images
    batch_size: int
    bf16: bool

    @property
    def unit(self) -> str:
        """What a site is called."""
        return "dimension" if self.text is None else "token"


@dataclass(frozen=True)
@help_from_source
class Bpd:
    """Estimate the negative ELBO of held-out data: bits per dimension of images; bits per token, byte and character and the
    perplexity of text.

    The NELBO bounds the negative log-likelihood from above. It is integral + prior + reconstruction. All three are printed,
    and so is the integral alone, which most papers report and which is not a bound by itself. Each pass draws one time per
    example. The times are stratified over all examples, and denser near 0, where the loss is noisy; the weights correct this.

    Two standard errors are printed: "times" over the passes (other times and noise, same examples; with Student's 95%
    interval) and "rows" over the examples. Results do not depend on --batch-size, except for rounding. Under torchrun the
    processes divide the examples. An autoregressive network (ar) has an exact likelihood: it is printed in place of the NELBO,
    and passes and times do not matter.

    Text: documents are joined by the end-of-text token and cut into windows of the trained length. Bytes and characters are
    those of the text without these tokens, but the nats of these tokens count.

    Example: m2s evaluate bpd runs/digits --out bpd.json

    Example: m2s evaluate bpd runs/m2s --against runs/sedd --passes 16

    Example: m2s evaluate bpd runs/owt --data lm1b --limit 2000
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """The model: a folder with config.json and model.safetensors, such as that of a run; builtin:NAME, such as
    builtin:digits-sedd, for weights that ship with m2s (m2s data list names them); or a repository OWNER/NAME of the Hugging
    Face hub."""
    data: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """The data; by default what the run was trained on. Images: digits, mnist, cifar10. Text: a folder of m2s data prepare, a
    file or folder of .txt, .jsonl or .parquet, or a data set of the hub, such as lm1b or OWNER/NAME."""
    split: Annotated[str, tyro.conf.arg(metavar="test|validation|train")] = ""
    """The split of the data; by default test or, where a text has none, validation. A file or folder of plain text has none."""
    against: Annotated[str | None, tyro.conf.arg(metavar="CHECKPOINT")] = None
    """Another model to compare with, on the same examples, times and noise. The error of the difference is smaller than those
    of its two parts."""
    passes: int = 4
    """Times drawn for each example. The error over times needs at least 2."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Use only so many examples, spread evenly over all; by default all."""
    seed: int = 0
    """Seed of times and noise. Two models with the same seed are evaluated on the same noise."""
    t_min: float = 1e-3
    """The integral runs over [t_min, 1 - t_min], and the reconstruction term starts from t_min. A finite chain is summed
    completely."""
    bins: int = 20
    """Bins of the curve of the loss over t."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Examples in each call of the network; by default at most 64, and fewer where the vocabulary is large."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of the network's body: auto is bf16 on a GPU, as in training, and float32 elsewhere."""
    device: str = ""
    """cpu or cuda; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result and everything it depends on as .json, and the curve of the loss over t beside it as .png; by default
    the result is only printed."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        """Estimate the NELBO, print it and write it to --out."""
        from m2s.distributed import World

        self._check()
        with World.start(self.device) as world:
            self._evaluate(world)

    def _check(self) -> None:
        """Raise UserError for numbers that are out of range."""
        smallest = {"passes": 1, "bins": 1, "limit": 1, "batch_size": 1, "seed": 0}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(option=f"--{name.replace('_', '-')}", value=value, expected=f"at least {least}")
        if not 0 < self.t_min < 0.5:
            raise UserError(f"--t-min is {self.t_min}, but it must lie in (0, 0.5)")
        if self.split and self.split not in SPLITS:
            raise UserError(option="--split", value=self.split, expected=f"one of {', '.join(SPLITS)}")

    def _evaluate(self, world: "World") -> None:
        """Evaluate on all processes; the first one prints and writes."""
        import torch

        from m2s.evaluation.bpd import dataset_nelbo

        started = time.monotonic()
        out = None
        if self.out is not None and world.first:
            require_absent([self.out], self.overwrite or is_rerun(self.out))
            out = output_file(self.out, (".json",))
            output_file(out.with_suffix(".png"), (".png",))
        setup = self._set_up(world)
        held_out = setup.held_out
        settings = (held_out.rows, self.passes, self.t_min, self.seed, setup.batch_size, held_out.labels, setup.bf16, world)
        try:
            with AttributePatches() as patches:
                patches.set(torch.backends.cudnn, "allow_tf32", setup.bf16)
                found, *theirs = [
                    dataset_nelbo(each.model, each.head, *settings)
                    for each in (setup.checkpoint, setup.other)
                    if each is not None
                ]
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{setup.batch_size} examples per call do not fit into the memory of {world.device}: give --batch-size"
            ) from error
        for place, each in zip((self.checkpoint, self.against), (found, *theirs), strict=False):
            if bool(each.term("nelbo").isnan().any()):  # an infinite NELBO is a legal value
                raise UserError(
                    f"the NELBO of {place} is not a number: its network returns NaN or infinity, so the training diverged or "
                    "the weights are damaged. Use an earlier checkpoint"
                )
        if not world.first:
            return
        numbers = self._report(setup, found, theirs)
        if out is not None:
            seconds = round(time.monotonic() - started, 1)
            self._write(out, finite({**numbers, **self._settings(setup, world, seconds)}))

    def _set_up(self, world: "World") -> _Setup:
        """Load the models and the data."""
        from m2s.evaluation.bpd import example_sizes

        checkpoint = load_described(self.checkpoint, world.device)
        other = None if self.against is None else load_described(self.against, world.device)
        if other is not None:
            check_same_data((self.checkpoint, checkpoint), (str(self.against), other))
        try:
            held_out = HeldOutSource(self.checkpoint, checkpoint, self.data, self.split).load().evenly_spaced(self.limit)
            text: dict[str, Tensor] | None = None if (checkpoint.data or {})["kind"] == "image" else {}
            if text is not None and checkpoint.tokenizer is not None:
                text = example_sizes(held_out.rows, checkpoint.tokenizer)
        except UserError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise UserError(str(error)) from error
        bf16 = self.precision == "bf16" or (self.precision == "auto" and world.device.type == "cuda")
        largest = max(1, min(MAX_EXAMPLES, MAX_LOGITS // (held_out.sites * checkpoint.head.process.states)))
        return _Setup(checkpoint, other, held_out, text, self.batch_size or largest, bf16)

    def _report(self, setup: _Setup, found: "DatasetNelbo", theirs: "list[DatasetNelbo]") -> dict[str, Any]:
        """Print the result, and return its numbers."""
        from m2s.evaluation.bpd import IMPORTANCE, format_difference, format_table, integrand_curve, summarize

        result, unit = summarize(found, setup.text), setup.unit
        print_escaped("\n".join([*self._heading(setup), *format_table(result, unit, found.exact)]))
        compared: dict[str, Any] = {}
        if setup.other is not None:
            totals, gaps = summarize(theirs[0], setup.text), summarize(found.minus(theirs[0]), setup.text)
            exact = (found.exact, theirs[0].exact)
            if any(exact):  # an exact likelihood has no integral, prior and reconstruction to compare
                totals, gaps = ({"nelbo": each["nelbo"]} for each in (totals, gaps))
            compared = {"against": {**_describe(setup.other), **totals, "difference": gaps}}
            print_escaped("\n".join(format_difference(str(self.against), totals, gaps, unit, exact)))
        return {
            "unit": unit,
            **result,
            **compared,
            "passes": (found.term("nelbo").sum(1) / found.sites.sum() / math.log(2)).tolist(),
            "exact": found.exact,
            "curve": integrand_curve(found, self.bins),
            "rows": len(setup.held_out.rows),
            "sites": int(found.sites.sum()),
            **{f"{unit}s": int(counts.sum()) for unit, counts in (setup.text or {}).items()},
            "times": {"from": found.t_min, "to": found.end, "density": f"1/(t + {IMPORTANCE})"},
        }

    def _heading(self, setup: _Setup) -> list[str]:
        """What is evaluated on which data."""
        held_out, shape = setup.held_out, (setup.checkpoint.data or {}).get("shape")
        number = counted(len(held_out.rows), "image" if shape else "window")
        what = " x ".join(map(str, shape)) if shape else f"{held_out.sites} tokens"
        passes = "" if setup.checkpoint.head.exact else f", {counted(self.passes, 'pass')}"
        lines = [f"{self.checkpoint} on {held_out}: {number} of {what}{passes}"]
        if held_out.labels is not None:
            lines.append("the network is given the labels: this bounds the likelihood given the label")
        if held_out.left_out:
            lines.append(f"the last {held_out.left_out} tokens, less than a window, are left out")
        return lines

    def _settings(self, setup: _Setup, world: "World", seconds: float) -> dict[str, Any]:
        """What the result depends on."""
        from m2s.provenance import provenance

        held_out = setup.held_out
        data = {
            "name": held_out.name,
            "split": held_out.split,
            "labels": held_out.labels is not None,
            "left_out": held_out.left_out,
        }
        return {
            **_describe(setup.checkpoint),
            "data": data,
            "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()},
            "batch_size": setup.batch_size,
            "precision": "bf16" if setup.bf16 else "float32",
            "processes": world.size,
            "seconds": seconds,
            **provenance(world.device),
        }

    def _write(self, out: Path, numbers: dict[str, Any]) -> None:
        """Write the numbers and, for an NELBO, the curve of the loss over t."""
        from m2s.evaluation.bpd import plot_integrand

        picture = out.with_suffix(".png")
        if not numbers["exact"]:
            with atomic_write(picture) as temporary:
                plot_integrand(numbers["curve"], numbers["unit"]).savefig(temporary, dpi=200)
        write_json(out, numbers)
        print_escaped(f"written to {out}" + ("" if numbers["exact"] else f", the loss over t to {picture}"))


def load_described(place: str, device: Any) -> "Checkpoint":
    """Load a checkpoint that describes its data.

    Args:
        place: A folder, or a repository of the Hugging Face hub.
        device: Where to put the network.

    Returns:
        The checkpoint.

    Raises:
        UserError: It cannot be read, or does not describe its data.
    """
    checkpoint = load_checkpoint(place, device)
    kind = (checkpoint.data or {}).get("kind")
    if kind == "sequence":
        raise UserError(
            f"{place} was trained on sequences in memory, which a command cannot read: in Python, "
            f"m2s.load({place!r}).evaluate(x) estimates the NELBO of sequences x"
        )
    if kind not in ("image", "text"):
        raise UserError(
            f'{place} does not describe its data: "data" of its config.json must be like '
            '{"kind": "image", "shape": [8, 8], "levels": 17} or {"kind": "text", "length": 128}; save it again with that'
        )
    return checkpoint


def _describe(checkpoint: "Checkpoint") -> dict[str, Any]:
    """What a result records of a checkpoint."""
    from m2s.provenance import fingerprint

    described = {key: checkpoint.config.get(key) for key in ("head", "model", "data", "tokenizer", "extra")}
    return {"checkpoint": {**described, "weights": fingerprint(checkpoint.model)}}


def finite(value: Any) -> Any:
    """Replace infinite and undefined numbers, which JSON cannot hold, by None.

    Args:
        value: A number, or dictionaries and lists of numbers.

    Returns:
        The same structure.
    """
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
