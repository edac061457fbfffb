"""`m2s evaluate bpd CHECKPOINT`: the bound on the likelihood of held-out data."""

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m2s.errors import UserError
from m2s.io import atomic_write, output_file, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.distributed import World
    from m2s.evaluation.bpd import EvaluationSet
    from m2s.hub import Checkpoint

SPLITS = ("test", "validation", "train")
ROWS, LOGITS = 64, 2**28  # greatest numbers of rows and of logits in a call, unless --batch-size says otherwise


@dataclass(frozen=True)
class Held:
    """The rows to evaluate on, and what they are."""

    name: str
    split: str | None
    rows: "EvaluationSet"
    labels: "Tensor | None" = None
    left_out: int = 0  # tokens at the end of a text, less than a window

    def __str__(self) -> str:
        return self.name if self.split is None else f"{self.name} ({self.split})"


@dataclass(frozen=True)
class Bpd:
    """Bound the likelihood of held-out data: bits per dimension of images; of text bits per token, byte and character, and
    perplexity.

    The bound is integral + prior + reconstruction. All three are printed, and the integral alone, which is what most papers
    report and no bound by itself. Each pass gives every row a time of its own, stratified over the whole set and denser near
    0, where the loss is noisy, with the weight corrected.

    Two standard errors are given: "times" over the passes (other times and noise, the same rows; with Student's 95% interval)
    and "rows" over the rows (other rows too, each independent of the others). Figures do not depend on --batch-size but for
    rounding; under torchrun processes share the rows. Of an autoregressive network (ar) the likelihood itself is known: it is
    printed in place of the bound, and neither passes nor times matter.

    Of text, documents are joined by the end-of-text token and cut into windows of the trained length. Bytes and characters
    are those of the text without these tokens, though their nats count.

    Example: m2s evaluate bpd runs/digits --out bpd.json

    Example: m2s evaluate bpd runs/m2s --against runs/sedd --passes 16

    Example: m2s evaluate bpd runs/owt --data lm1b --limit 2000
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A folder with config.json and model.safetensors, such as that of a run, or a repository of the Hugging Face hub."""
    data: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """By default what the run was trained on. Else digits, mnist, cifar10; or text: a folder of m2s data prepare, a file or
    folder of .txt, .jsonl or .parquet, or a data set of the hub, such as lm1b or OWNER/NAME."""
    split: Annotated[str, tyro.conf.arg(metavar="test|validation|train")] = ""
    """By default test or, where a text has none, validation. A file or folder of plain text is taken as a whole."""
    against: Annotated[str | None, tyro.conf.arg(metavar="CHECKPOINT")] = None
    """Another one, bounded on the same rows, times and noise: the difference with its own, smaller, errors."""
    passes: int = 4
    """Times drawn for each row. The error over times needs at least 2."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Take so many rows only, spread evenly over all."""
    seed: int = 0
    """Of times and noise. Two models with the same seed are compared on the same noise."""
    t_min: float = 1e-3
    """The ends of time that are cut off the integral, and where the reconstruction takes over; a finite chain
    is summed as it is."""
    bins: int = 20
    """Of the curve of the loss over t."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Rows of each call of the network; by default at most 64, and fewer where the vocabulary is large."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the network's body: auto is bf16 on a GPU, as in training, and float32 elsewhere."""
    device: str = ""
    """cpu, cuda; by default the best there is."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json, with all that it depends on, and the curve of the loss over t beside it as .png."""

    def run(self) -> None:
        from m2s.distributed import World

        self._check()
        with World.start(self.device) as world:
            self._measure(world)

    def _measure(self, world: "World") -> None:
        import torch

        from m2s.evaluation.bpd import IMPORTANCE, Shard, curve, dataset_nelbo, difference, measured, summary, table

        started = time.monotonic()
        out = None
        if self.out is not None and world.first:
            out = output_file(self.out, (".json",))
            output_file(out.with_suffix(".png"), (".png",))
        checkpoint = self._load(self.checkpoint, world.device)
        other = None if self.against is None else self._load(self.against, world.device)
        if other is not None:
            self._compare(checkpoint, other)
        try:
            held = self._held(checkpoint)
            if self.limit is not None and self.limit < len(held.rows):
                labels = None if held.labels is None else Shard(held.labels, self.limit)[torch.arange(self.limit)]
                held = replace(held, rows=Shard(held.rows, self.limit), labels=labels)
            text: dict[str, Tensor] | None = None if (checkpoint.data or {})["kind"] == "image" else {}
            if text is not None and checkpoint.tokenizer is not None:
                text = measured(held.rows, checkpoint.tokenizer)
        except UserError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise UserError(str(error)) from error
        bf16 = self.precision == "bf16" or (self.precision == "auto" and world.device.type == "cuda")
        torch.backends.cudnn.allow_tf32 = bf16
        size = self.batch_size or self._batch_size(checkpoint, held)
        settings = (held.rows, self.passes, self.t_min, self.seed, size, held.labels, bf16, world)
        try:
            found, *theirs = [
                dataset_nelbo(each.model, each.head, *settings) for each in (checkpoint, other) if each is not None
            ]
        except torch.OutOfMemoryError as error:
            raise UserError(f"calls of {size} rows do not fit into the memory of {world.device}: give --batch-size") from error
        if not world.first:
            return
        result = summary(found, text)
        unit = "dimension" if text is None else "token"
        print("\n".join([*self._about(checkpoint, held), *table(result, unit, found.exact)]))
        compared: dict[str, Any] = {}
        if other is not None:
            bounds, gaps = summary(theirs[0], text), summary(found.minus(theirs[0]), text)
            exact = (found.exact, theirs[0].exact)
            if any(exact):  # whose terms are not those of a bound
                bounds, gaps = ({"bound": each["bound"]} for each in (bounds, gaps))
            compared = {"against": {**self._described(other), **bounds, "difference": gaps}}
            print("\n".join(difference(str(self.against), bounds, gaps, unit, exact)))
        if out is not None:
            seconds = round(time.monotonic() - started, 1)
            numbers = {
                "unit": unit,
                **result,
                **compared,
                "passes": (found.term("bound").sum(1) / found.sites.sum() / math.log(2)).tolist(),
                "exact": found.exact,
                "curve": curve(found, self.bins),
                "rows": len(held.rows),
                "sites": int(found.sites.sum()),
                **{f"{unit}s": int(counts.sum()) for unit, counts in (text or {}).items()},
                "times": {"from": found.t_min, "to": found.end, "density": f"1/(t + {IMPORTANCE})"},
                **self._settings(checkpoint, held, world, bf16, size, seconds),
            }
            self._write(out, finite(numbers))

    def _check(self) -> None:
        counts = {"--passes": self.passes, "--bins": self.bins, "--limit": self.limit, "--batch-size": self.batch_size}
        least = {**{name: (value, 1) for name, value in counts.items()}, "--seed": (self.seed, 0)}
        for name, (value, smallest) in least.items():
            if value is not None and value < smallest:
                raise UserError(f"{name} is {value}, but it must be at least {smallest}")
        if not 0 < self.t_min < 0.5:
            raise UserError(f"--t-min is {self.t_min}, but it must lie in (0, 0.5)")
        if self.split and self.split not in SPLITS:
            raise UserError(f"--split is {self.split!r}, but it must be one of {', '.join(SPLITS)}")

    def _compare(self, checkpoint: "Checkpoint", other: "Checkpoint") -> None:
        """Both read the same rows, given as much."""
        from m2s.data.encode import named

        def read(each: "Checkpoint") -> dict[str, Any]:
            labels = each.config["model"].get("classes") is not None
            vocab = each.head.process.vocab
            return {**(each.data or {}), "tokens": vocab, "tokenizer": named(each.tokenizer), "labels": labels}

        ours, theirs = read(checkpoint), read(other)
        for key in ours | theirs:
            if ours.get(key) != theirs.get(key):
                raise UserError(
                    f"{self.checkpoint} and {self.against} do not read the same data: {key} is {ours.get(key)} and "
                    f"{theirs.get(key)}"
                )

    def _load(self, place: str, device: Any) -> "Checkpoint":
        from m2s.hub import load

        try:
            checkpoint = load(place, device)
        except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
            raise UserError(str(error)) from error
        if (checkpoint.data or {}).get("kind") not in ("image", "text"):
            raise UserError(
                f'{place} does not describe its data: "data" of its config.json must be like '
                '{"kind": "image", "shape": [8, 8], "levels": 17} or {"kind": "text", "length": 128}; save it again with that'
            )
        return checkpoint

    def _held(self, checkpoint: "Checkpoint") -> Held:
        """The data that was asked for, if the model can read it."""
        from m2s.data import image_sets
        from m2s.training.config import DataConfig

        config = DataConfig(self.data) if self.data in image_sets() else None
        if not self.data:
            config = trained_on(self.checkpoint)
        kind = (checkpoint.data or {})["kind"]
        if config is not None and config.name in image_sets():
            if kind != "image":
                raise UserError(f"{self.checkpoint} is a model of text, but {config.name} holds images: give --data with text")
            return self._images(checkpoint, config)
        if kind != "text":
            raise UserError(
                f"{self.checkpoint} is a model of images, but {self.data or 'what it was trained on'} is none of "
                f"{', '.join(image_sets())}: give --data with one of these"
            )
        length = (checkpoint.data or {}).get("length")
        if not isinstance(length, int) or length < 1:
            raise UserError(
                f'{self.checkpoint} does not say how long its texts are: "length" is missing in "data" of config.json'
            )
        if config is not None:
            return self._prepared(checkpoint, length, text_folder(config.folder, self.checkpoint))
        return self._text(checkpoint, length, self.data)

    def _images(self, checkpoint: "Checkpoint", config: Any) -> Held:
        from m2s.data import load

        images = load(config.name, config.folder, config.hub)
        described = checkpoint.data or {}
        trained = (described.get("shape"), described.get("levels"))
        if trained != (list(images.shape), images.vocab) or checkpoint.head.process.vocab != images.vocab:
            raise UserError(
                f"{self.checkpoint} is a model of images {trained[0]} in {trained[1]} levels, but {config.name} has "
                f"{list(images.shape)} in {images.vocab}: give --data with the data it was trained on"
            )
        split = self.split or "test"
        if split == "validation":
            raise UserError(f"{config.name} has no validation split: give --split test or train")
        labels = getattr(images, f"{split}_labels")
        takes_labels = checkpoint.config["model"].get("classes") is not None
        return Held(config.name, split, getattr(images, split), labels if takes_labels else None)

    def _text(self, checkpoint: "Checkpoint", length: int, name: str) -> Held:
        """Windows of a prepared text, or of text that is tokenised now."""
        from m2s.data.documents import find_sources
        from m2s.evaluation.bpd import windows

        path = Path(name).expanduser()
        if (path / "meta.json").exists() or (path / "plan.json").exists():
            return self._prepared(checkpoint, length, path)
        if checkpoint.tokenizer is None:
            raise UserError(
                f"{self.checkpoint} has no tokenizer to read {name} with: give a folder that m2s data prepare made with its own"
            )
        sources, split = find_sources(name, test=""), None
        if not path.exists():
            there = {source.name.rpartition("/")[2]: source for source in sources}
            split = self.split or next((split for split in SPLITS[:2] if split in there), None)
            if split not in there:
                asked = f"no split {split}" if split else "neither test nor validation"
                raise UserError(f"{name} has {asked}: give --split {' or '.join(there)}")
            sources = [there[split]]
        elif self.split:
            raise UserError(f"{name} is plain text, which is taken as a whole: leave out --split")
        rows, left_out = windows(sources, checkpoint.tokenizer, length)
        return Held(name, split, rows, left_out=left_out)

    def _prepared(self, checkpoint: "Checkpoint", length: int, path: Path) -> Held:
        from m2s.data.encode import named
        from m2s.data.tokens import Tokens, read_meta

        meta = read_meta(path)
        described = named(checkpoint.tokenizer)
        if meta["vocab"] != checkpoint.head.process.vocab or described not in ({}, meta["tokenizer"]):
            raise UserError(
                f"{path} was prepared with {meta['tokenizer']} ({meta['vocab']} tokens), but {self.checkpoint} reads "
                f"{described or 'unnamed tokens'} ({checkpoint.head.process.vocab}): prepare the text with that tokenizer"
            )
        held = {split: entry["tokens"] for split, entry in meta["splits"].items()}
        split = self.split or next((split for split in SPLITS[:2] if held.get(split, 0) >= length), None)
        if split is None:
            raise UserError(
                f"{path} holds {held.get('test', 0)} test and {held.get('validation', 0)} validation tokens, too few for one "
                f"window of {length}: give --split train, or --data"
            )
        return Held(str(path), split, Tokens(path, split, length), left_out=held.get(split, 0) % length)

    def _batch_size(self, checkpoint: "Checkpoint", held: Held) -> int:
        import torch

        sites = held.rows[torch.arange(1)].shape[1]
        return max(1, min(ROWS, LOGITS // (sites * checkpoint.head.process.states)))

    def _about(self, checkpoint: "Checkpoint", held: Held) -> list[str]:
        import torch

        shape = (checkpoint.data or {}).get("shape")
        sites = held.rows[torch.arange(1)].shape[1]
        what = f"images of {' x '.join(map(str, shape))}" if shape else f"windows of {sites} tokens"
        passes = "" if checkpoint.head.exact else f", {self.passes} passes"
        lines = [f"{self.checkpoint} on {held}: {len(held.rows):,} {what}{passes}"]
        if held.labels is not None:
            lines.append("the network is given the labels: this bounds the likelihood given the label")
        if held.left_out:
            lines.append(f"the last {held.left_out} tokens, less than a window, are left out")
        return lines

    def _settings(
        self, checkpoint: "Checkpoint", held: Held, world: "World", bf16: bool, size: int, seconds: float
    ) -> dict[str, Any]:
        from m2s.provenance import provenance

        return {
            **self._described(checkpoint),
            "data": {"name": held.name, "split": held.split, "labels": held.labels is not None, "left_out": held.left_out},
            "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()},
            "batch_size": size,
            "precision": "bf16" if bf16 else "float32",
            "processes": world.size,
            "seconds": seconds,
            **provenance(world.device),
        }

    @staticmethod
    def _described(checkpoint: "Checkpoint") -> dict[str, Any]:
        from m2s.provenance import fingerprint

        described = {key: checkpoint.config.get(key) for key in ("head", "model", "data", "tokenizer", "extra")}
        return {"checkpoint": {**described, "weights": fingerprint(checkpoint.model)}}

    def _write(self, out: Path, numbers: dict[str, Any]) -> None:
        from m2s.evaluation.bpd import draw

        picture = out.with_suffix(".png")
        if not numbers["exact"]:
            with atomic_write(picture) as temporary:
                draw(numbers["curve"], numbers["unit"]).savefig(temporary, dpi=200)
        write_json(out, numbers)
        print(f"written to {out}" + ("" if numbers["exact"] else f", the loss over t to {picture}"))


def trained_on(checkpoint: str) -> Any:
    """The data of the run whose folder this is, as its train.json has it."""
    from m2s.data import image_sets
    from m2s.training.config import DataConfig
    from m2s.training.run_folder import RECORD

    path = Path(checkpoint).expanduser() / RECORD
    if not path.is_file():
        raise UserError(
            f"{checkpoint} does not say what it was trained on, for it holds no {RECORD}: give --data, such as "
            f"{', '.join(image_sets())} or a text"
        )
    try:
        return DataConfig(**json.loads(path.read_text(encoding="utf-8"))["config"]["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}): give --data") from error


def text_folder(folder: str | None, checkpoint: str) -> Path:
    """Where a prepared text lies, as open_source reads it."""
    from m2s.data import root

    if folder is None:
        raise UserError(f"{checkpoint} does not say where the text lies that it was trained on: give --data")
    return Path(folder.replace("$M2S_DATA", str(root()), 1)).expanduser()


def finite(value: Any) -> Any:
    """`value` with None for what JSON cannot hold: an infinite or undefined number."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
