"""Held-out data for `m2s evaluate bpd`: images, a prepared text, text that is tokenized now, or a plugin's data set."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2s.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.data import Batch
    from m2s.evaluation.bpd import EvaluationSet
    from m2s.hub import Checkpoint
    from m2s.training.config import DataConfig

SPLITS = ("test", "validation", "train")


@dataclass(frozen=True)
class HeldOut:
    """The examples that a model is evaluated on.

    Args:
        name: The data set, folder or file.
        split: The split; None where the data has none.
        rows: The examples.
        labels: The class of each example, for a network that takes labels.
        left_out: Tokens at the end of a text that do not fill a window.
    """

    name: str
    split: str | None
    rows: "EvaluationSet"
    labels: "Tensor | None" = None
    left_out: int = 0

    def __str__(self) -> str:
        return self.name if self.split is None else f"{self.name} ({self.split})"

    @property
    def sites(self) -> int:
        """The number of sites of an example."""
        import torch

        return self.rows[torch.arange(1)].shape[1]

    def evenly_spaced(self, limit: int | None) -> "HeldOut":
        """Return `limit` examples, spread evenly over all; all where it is None or larger.

        Args:
            limit: The number of examples; None: all.
        """
        import torch

        from m2s.evaluation.bpd import Shard

        if limit is None or limit >= len(self.rows):
            return self
        labels = None if self.labels is None else Shard(self.labels, limit)[torch.arange(limit)]
        return HeldOut(self.name, self.split, Shard(self.rows, limit), labels, self.left_out)


@dataclass(frozen=True)
class SourceExamples:
    """The examples of one split of a `m2s.data.Source`.

    Args:
        read: Returns the examples of some indices: `Source.train` or `Source.validation`.
        count: The number of examples.
        name: The data set, for error messages.
    """

    read: "Callable[[Tensor], Batch]"
    count: int
    name: str

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: "Tensor") -> "Tensor":
        batch = self.read(index)
        if batch.weight is not None:
            raise UserError(f"{self.name} weights its positions, which bpd does not support: use m2s.elbo with these weights")
        return batch.x_0.long()


@dataclass(frozen=True)
class HeldOutSource:
    """Where held-out data comes from.

    Args:
        place: The checkpoint, as it was typed.
        checkpoint: The model, which must be able to read the data.
        data: --data; empty stands for the data that the run was trained on.
        split: --split; empty stands for test or, where a text has none, validation.
    """

    place: str
    checkpoint: "Checkpoint"
    data: str
    split: str

    def load(self) -> HeldOut:
        """Load the data.

        Returns:
            The examples, with their labels where the network takes labels.

        Raises:
            UserError: There is no such data, or the model cannot read it.
        """
        from m2s.data import DATASETS, image_sets
        from m2s.training.config import DataConfig

        registered = self.data in DATASETS and self.data != "text"
        config = DataConfig(self.data) if registered else None
        if not self.data:
            config = trained_on(self.place)
        if config is not None and config.name not in (*image_sets(), "text"):
            return self._registered(config)
        kind = (self.checkpoint.data or {})["kind"]
        if config is not None and config.name in image_sets():
            if kind != "image":
                raise UserError(f"{self.place} is a model of text, but {config.name} holds images: give --data with text")
            return self._images(config)
        if kind != "text":
            raise UserError(
                f"{self.place} is a model of images, but {self.data or 'what it was trained on'} is none of "
                f"{', '.join(image_sets())}: give --data with one of these"
            )
        length = (self.checkpoint.data or {}).get("length")
        if not isinstance(length, int) or length < 1:
            raise UserError(f'{self.place} does not say how long its texts are: "length" is missing in "data" of config.json')
        if config is not None:
            return self._prepared(length, prepared_folder(config.folder, self.place))
        return self._text(length)

    def _images(self, config: "DataConfig") -> HeldOut:
        """A split of an image data set."""
        from m2s.data import load

        images = load(config.name, config.folder, config.hub)
        described = self.checkpoint.data or {}
        trained = (described.get("shape"), described.get("levels"))
        if trained != (list(images.shape), images.vocab) or self.checkpoint.head.process.vocab != images.vocab:
            raise UserError(
                f"{self.place} is a model of images {trained[0]} in {trained[1]} levels, but {config.name} has "
                f"{list(images.shape)} in {images.vocab}: give --data with the data it was trained on"
            )
        split = self.split or "test"
        if split == "validation":
            raise UserError(f"{config.name} has no validation split: give --split test or train")
        takes_labels = self.checkpoint.config["model"].get("classes") is not None
        labels = getattr(images, f"{split}_labels") if takes_labels else None
        return HeldOut(config.name, split, getattr(images, split), labels)

    def _registered(self, config: "DataConfig") -> HeldOut:
        """A split of a data set that a plugin registered."""
        import torch

        from m2s.cli.sampling_args import trained_length
        from m2s.data import DATASETS
        from m2s.training.build import open_data

        if config.name not in DATASETS:
            raise UserError(
                f"{self.place} was trained on {config.name!r}, which is no registered data set: give --plugin with the file "
                "that registers it, or --data"
            )
        source = open_data(config)
        trained = (self.checkpoint.head.process.vocab, trained_length(self.checkpoint))
        if trained != (source.vocab, source.length):
            raise UserError(
                f"{self.place} is a model of {trained[1]} positions with {trained[0]} tokens, but {config.name} has "
                f"{source.length} positions with {source.vocab}: give --data with the data it was trained on"
            )
        split = self.split or "validation"
        if split == "test":
            raise UserError(f"{config.name} has no test split: give --split validation or train")
        read, count = (source.train, source.size) if split == "train" else (source.validation, source.held_out)
        takes_labels = self.checkpoint.config["model"].get("classes") is not None
        labels = read(torch.arange(count)).label if takes_labels else None
        return HeldOut(config.name, split, SourceExamples(read, count, config.name), labels)

    def _text(self, length: int) -> HeldOut:
        """Windows of a prepared text, or of text that is tokenized now."""
        from m2s.data.documents import find_sources, require_source
        from m2s.evaluation.bpd import token_windows

        name, path = self.data, Path(self.data).expanduser()
        if (path / "meta.json").exists() or (path / "plan.json").exists():
            return self._prepared(length, path)
        require_source(name)  # a mistyped path is the more likely error
        if self.checkpoint.tokenizer is None:
            raise UserError(
                f"{self.place} has no tokenizer to read {name} with: {self.checkpoint.tokenizer_hint}. Or give a folder that "
                "m2s data prepare made with its tokenizer"
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
            raise UserError(f"{name} is plain text, which has no splits: leave out --split")
        rows, left_out = token_windows(sources, self.checkpoint.tokenizer, length)
        return HeldOut(name, split, rows, left_out=left_out)

    def _prepared(self, length: int, path: Path) -> HeldOut:
        """Windows of a folder of m2s data prepare."""
        from m2s.data.encode import tokenizer_description
        from m2s.data.tokens import Tokens, read_meta

        meta = read_meta(path)
        described = tokenizer_description(self.checkpoint.tokenizer)
        vocab = self.checkpoint.head.process.vocab
        if meta["vocab"] != vocab or described not in ({}, meta["tokenizer"]):
            raise UserError(
                f"{path} was prepared with {meta['tokenizer']} ({meta['vocab']} tokens), but {self.place} reads "
                f"{described or 'unnamed tokens'} ({vocab}): prepare the text with that tokenizer"
            )
        held = {split: entry["tokens"] for split, entry in meta["splits"].items()}
        split = self.split or next((split for split in SPLITS[:2] if held.get(split, 0) >= length), None)
        if split is None:
            raise UserError(
                f"{path} holds {held.get('test', 0)} test and {held.get('validation', 0)} validation tokens, too few for one "
                f"window of {length}: give --split train, or --data"
            )
        return HeldOut(str(path), split, Tokens(path, split, length), left_out=held.get(split, 0) % length)


def trained_on(checkpoint: str) -> "DataConfig":
    """Return the data that a run was trained on, from its record.

    Args:
        checkpoint: The folder of the run, or a name of built-in weights.

    Raises:
        UserError: There is no record, or it cannot be read.
    """
    from m2s.data import image_sets
    from m2s.hub import builtin
    from m2s.io import read_json
    from m2s.training.config import DataConfig
    from m2s.training.run_folder import RECORD

    path = builtin.locate(checkpoint) / RECORD
    if not path.is_file():
        raise UserError(
            f"{checkpoint} does not say what it was trained on, because it has no {RECORD}: give --data, such as "
            f"{', '.join(image_sets())} or a text"
        )
    record = read_json(path, "give --data")
    try:
        recorded = record["config"]["data"]
        # JSON has no tuples. Records of version 0.1 have no options.
        found = DataConfig(**recorded | {"options": tuple(recorded.get("options", ()))})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): give --data") from error
    texts = (found.name, *found.options) if found.folder is None else (found.name, found.folder, *found.options)
    if not all(isinstance(text, str) for text in texts) or type(found.length) is not int or type(found.hub) is not bool:
        raise UserError(f"{path} is damaged (its data has values of other types): give --data")
    return found


def prepared_folder(folder: str | None, checkpoint: str) -> Path:
    """Return the folder of the prepared text that a run was trained on, with $M2S_DATA replaced.

    Args:
        folder: The folder in the record of the run.
        checkpoint: The checkpoint, for the error message.

    Raises:
        UserError: The record names no folder.
    """
    from m2s.data import root

    if folder is None:
        raise UserError(f"{checkpoint} does not say where the text is that it was trained on: give --data")
    return Path(folder.replace("$M2S_DATA", str(root()), 1)).expanduser()


def check_same_data(first: tuple[str, "Checkpoint"], second: tuple[str, "Checkpoint"]) -> None:
    """Check that two models read the same data.

    Args:
        first: A checkpoint as it was typed, and loaded.
        second: The checkpoint to compare it with.

    Raises:
        UserError: They read different data, so that their NELBOs cannot be compared.
    """
    from m2s.data.encode import tokenizer_description

    def described(checkpoint: "Checkpoint") -> dict[str, Any]:
        labels = checkpoint.config["model"].get("classes") is not None
        vocab = checkpoint.head.process.vocab
        return {
            **(checkpoint.data or {}),
            "tokens": vocab,
            "tokenizer": tokenizer_description(checkpoint.tokenizer),
            "labels": labels,
        }

    ours, theirs = described(first[1]), described(second[1])
    for key in ours | theirs:
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{first[0]} and {second[0]} do not read the same data: {key} is {ours.get(key)} and {theirs.get(key)}"
            )
