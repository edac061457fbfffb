"""Checkpoints: a folder with `config.json`, which describes the network, and `model.safetensors`. Nothing is pickled.

Checkpoints of other projects can be loaded too: see `m2s.hub.formats`.
"""

import html
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from m2s import remote, validation
from m2s.data import tokenizer as tokenizers
from m2s.data.examples import choose_labels, read_examples, read_labels, weights
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.heads import Head
from m2s.hub import formats
from m2s.hub.card import CARD, model_card
from m2s.hub.description import describe_parts
from m2s.hub.folder import CONFIG, WEIGHTS
from m2s.hub.loading import read_checkpoint, read_folder
from m2s.hub.saving import save
from m2s.io import atomic_write
from m2s.losses import Elbo, elbo
from m2s.losses.elbo import nelbo_integrand
from m2s.rng import derived_seed, draw_seed
from m2s.samplers import Diagnostics, sample


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds. It unpacks as (model, head).

    Args:
        model: The network, in evaluation mode.
        head: What its output means, with its process.
        tokenizer: The tokenizer of a text model, or None.
        data: A description of the data, such as {"kind": "text", "length": 128}, or None.
        config: The contents of `config.json`.
        run_files: The record and the log of the run that `m2s.fit` made, by file name. `save` writes them too, so that
            `m2s report` and `m2s evaluate` find what the network was trained on. Empty for a checkpoint that was loaded.

    Example:
        >>> checkpoint = m2s.load("builtin:digits-m2s")
        >>> images = checkpoint.sample(2, steps=4)
        >>> nelbo = checkpoint.evaluate(images)
        >>> model, head = checkpoint
    """

    model: nn.Module
    head: Head
    tokenizer: Tokenizer | None = None
    data: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    run_files: dict[str, bytes] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        """Yield the model and the head."""
        return iter((self.model, self.head))

    @property
    def length(self) -> int | None:
        """The number of tokens of the sequences that the network was trained on; None where the checkpoint does not say."""
        data = self.data or {}
        return math.prod(data["shape"]) if data.get("kind") == "image" else data.get("length")

    @property
    def gpt2_without_merges(self) -> Tokenizer | None:
        """GPT-2's tokenizer, where another project's checkpoint needs it and its merges are not on this machine; else None."""
        if self.tokenizer is not None or not any(name in formats.FORMATS for name in self.config.get("extra") or {}):
            return None
        return formats.gpt2_without_merges(formats.Vocabulary(self.head.process.states, self.head.process.mask))

    @property
    def tokenizer_hint(self) -> str:
        """What to do where there is no tokenizer: of another project's checkpoint, how to get its file."""
        if not any(name in formats.FORMATS for name in self.config.get("extra") or {}):
            return "it was saved without one"
        process = self.head.process
        return formats.tokenizer_hint(formats.Vocabulary(process.states, process.mask)) + ". Then load or convert it again"

    def __repr__(self) -> str:
        network, head, data = self._summary()
        return f"Checkpoint({network},\n  {head},\n  {data})"

    def _repr_html_(self) -> str:
        """The network, the head and the data, as a notebook shows them."""
        names = ("network", "head and process", "data")
        rows = "".join(
            f"<tr><td>{name}</td><td>{html.escape(text)}</td></tr>" for name, text in zip(names, self._summary(), strict=True)
        )
        return f"<table>{rows}</table>"

    def _summary(self) -> tuple[str, str, str]:
        """The network with its size; the head with its process; the data with the step, where they are known."""
        parameters = sum(weight.numel() for weight in self.model.parameters())
        kind = {key: value for key, value in (self.data or {}).items() if key != "kind"}
        data = ", ".join(f"{name} {value}" for name, value in kind.items())
        data = f"{self.data.get('kind')} data ({data})" if self.data else "data not described"
        extra = self.config.get("extra") or {}
        step = f", step {extra['step']:,}" if isinstance(extra.get("step"), int) else ""
        method = f" of {extra['method']}" if step and isinstance(extra.get("method"), str) else ""
        return f"{type(self.model).__name__} with {parameters:,} parameters", str(self.head), data + step + method

    @overload
    def sample(
        self,
        n: int | None = None,
        length: int | None = None,
        labels: Any = None,
        *,
        diagnostics: Literal[False] = False,
        **options: Any,
    ) -> Tensor: ...

    @overload
    def sample(
        self,
        n: int | None = None,
        length: int | None = None,
        labels: Any = None,
        *,
        diagnostics: Literal[True],
        **options: Any,
    ) -> tuple[Tensor, Diagnostics]: ...

    def sample(
        self,
        n: int | None = None,
        length: int | None = None,
        labels: Any = None,
        *,
        diagnostics: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Diagnostics]:
        """Draw samples: `m2s.sample` with this network and head.

        Args:
            n: The number of samples; None: one for each label, or 16.
            length: The number of tokens of each; None: the length that the network was trained on. Longer samples are filled
                in windows of that length.
            labels: The class of each sample, [n]: a tensor, an array or a list of integers below the number of classes; or one
                class for all samples. None: samples of all classes. `condition` of `m2s.sample` is the same as a tensor.
            diagnostics: Also return `Diagnostics`.
            **options: Other arguments of `m2s.sample`, such as `steps`, `seed`, `guidance` or `lengths`.

        Returns:
            Tokens, int64 [n, length]. With `diagnostics`, the pair (tokens, `Diagnostics`).

        Raises:
            UserError: The length is not known, or an option is invalid.
            UserTypeError: `n` is no integer, such as a shape.
        """
        trained = self.length
        if length is None and trained is None:
            raise UserError(option="length", reason="the checkpoint does not say how long its sequences are", hint="give it")
        wanted = trained if length is None else length
        assert wanted is not None
        if trained is not None and wanted > trained:
            options.setdefault("window", trained)
        if labels is not None:
            if options.get("condition") is not None:
                raise UserError(option="labels", reason="condition is given too", hint="give one of them")
            if n is None and np.ndim(labels) == 1:
                n = len(labels)
        count = 16 if n is None else n
        validation.positive_int("n", count)
        if labels is not None:
            alike = [labels] * count if np.ndim(labels) == 0 else labels
            options["condition"] = self._checked_labels(read_labels("labels", alike, count))
        return sample(self.model, self.head, (count, wanted), diagnostics=diagnostics, **options)

    def _checked_labels(self, labels: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """Labels of the classes that the network was trained on, or an error."""
        known, classes = self._classes()
        if not known:
            return labels
        if classes is None:
            reason = "the network was trained without labels"
            raise UserError(option="labels", reason=reason, hint="leave them out, or train it with labels")
        validation.tokens("labels", labels, classes, "labels")
        return labels

    def _classes(self) -> tuple[bool, int | None]:
        """Whether the network says how many classes it has, and the number; None: it has none."""
        settings = getattr(self.model, "config", None)
        return hasattr(settings, "classes"), getattr(settings, "classes", None)

    def evaluate(
        self,
        x: Any,
        labels: Any = None,
        lengths: Int[Tensor, "N"] | None = None,
        passes: int = 4,
        batch_size: int = 64,
        seed: int | None = None,
    ) -> Elbo:
        """Estimate the NELBO of examples: `m2s.elbo` in batches.

        Args:
            x: Clean tokens, [N, L], or sequences of any lengths, which are padded.
            labels: A class for each example, [N]. The NELBO is then of x given its label.
            lengths: The length of each example, [N], where `x` is padded already; None: all tokens count.
            passes: Times per example.
            batch_size: Examples per call of the network. Times are stratified over them.
            seed: Of times and noise. None: drawn from torch's global CPU generator.

        Returns:
            The NELBO of each example and its terms, in nats. `mean()` is the average and its standard error, and `sites` has
            the number of tokens of each example.

        Raises:
            UserError: A number is out of range.
            UserTypeError: `x` does not hold integers.
        """
        validation.positive_int("batch_size", batch_size)
        examples = read_examples("x", x)
        tokens, counted = examples.tokens, examples.lengths
        if lengths is not None:
            counted = read_labels("lengths", lengths, len(tokens), "lengths")
        contained = examples.labels if self._classes()[1] is not None else None
        given = choose_labels(labels, contained, len(tokens))
        given = None if given is None else self._checked_labels(given)
        seed = draw_seed() if seed is None else seed
        device, found = next(self.model.parameters()).device, []
        for first in range(0, len(tokens), batch_size):
            rows = slice(first, first + batch_size)
            weight = weights(counted[rows], tokens.shape[1]).to(device)
            generator = torch.Generator(device).manual_seed(derived_seed(seed, "evaluate", first))
            condition = None if given is None else given[rows].to(device)
            loss = nelbo_integrand(self.head)
            terms = (tokens[rows].to(device), passes, 1e-3, loss, generator, weight, condition)
            found.append(elbo(self.model, self.head, *terms))
        return Elbo.concatenate(found)

    def save(self, folder: str | Path) -> Path:
        """Save the checkpoint, so that `m2s.load` reads it.

        Args:
            folder: Where to write; created if it does not exist.

        Returns:
            The folder.

        Raises:
            TypeError: The class of the network, head or process is not registered. Nothing is written.
        """
        place = self._save(folder)
        if not (place / "state").exists():  # the folder of a run keeps the record and the log that belong to its states
            for name, content in self.run_files.items():
                with atomic_write(place / name) as temporary:
                    temporary.write_bytes(content)
        return place

    def _save(self, folder: str | Path) -> Path:
        """Save the network with everything that is needed to sample from it."""
        return save(folder, self.model, self.head, self.data, self.tokenizer, self.config.get("extra"))

    def save_pretrained(self, folder: str | Path, command: str | None = None) -> Path:
        """Save the checkpoint with a model card, README.md, and without the record of its run, which names the machine.

        Args:
            folder: Where to write; created if it does not exist.
            command: How the network was trained, for the card; None: the card does not say.

        Returns:
            The folder.
        """
        place = self._save(folder)
        with atomic_write(place / CARD) as temporary:
            temporary.write_text(model_card(self.model, self.head, self.data, self.config, command), encoding="utf-8")
        return place

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, device: torch.device | str = "cpu") -> "Checkpoint":
        """Load a checkpoint, as `m2s.load` does.

        Args:
            path_or_repo: A folder, or a repository "owner/name" on the Hugging Face hub.
            device: Where the network is put.

        Returns:
            The checkpoint.
        """
        return load(path_or_repo, device)

    def push_to_hub(self, repo_id: str, private: bool = False, command: str | None = None) -> str:
        """Upload the checkpoint with its model card to the Hugging Face hub.

        Args:
            repo_id: The repository, "owner/name"; created if it does not exist.
            private: Create a private repository.
            command: How the network was trained, for the card.

        Returns:
            The address of the repository.

        Raises:
            ValueError: The name of the repository is invalid.
            ConnectionError: The hub cannot be reached or does not allow the upload.
            ImportError: `huggingface_hub` is not installed.
        """
        remote.check_repository(repo_id)
        with tempfile.TemporaryDirectory(prefix="m2s-") as folder:
            self.save_pretrained(folder, command)
            return remote.upload(Path(folder), repo_id, (CONFIG, WEIGHTS, *tokenizers.KEPT), private)


def load(path_or_repo: str | Path, device: torch.device | str = "cpu", verify: bool = False) -> Checkpoint:
    """Load a checkpoint of m2s, or of another project (`m2s.hub.formats.FORMATS`, docs/checkpoints.md).

    No code of the files is run. The configuration is compared with the tensors in the file before a network is built.

    Args:
        path_or_repo: A folder; a repository "owner/name" on the Hugging Face hub, such as "louaaron/sedd-small"; or
            "builtin:NAME", weights that ship with the package (`m2s.hub.builtin.names()`). Of some projects also a file, such
            as "mdlm.ckpt".
        device: Where the network is put.
        verify: Compare the SHA-256 of the files with those in config.json. Checkpoints of version 0.1 and of other projects
            have none.

    Returns:
        The checkpoint. The network is in evaluation mode, and its weights have the dtype in which they were saved. Weights
        that were saved in several, and built-in ones, are converted to float32.

    Raises:
        FileNotFoundError: There is no such folder or repository, no such built-in weights, or a file is missing.
        ValueError: A file is damaged, holds NaN or infinity, or was written by a newer version of m2s.
        ImportError: `huggingface_hub` is needed and not installed.

    Example:
        >>> model, head = m2s.load("runs/mine")
        >>> x = m2s.sample(model, head, (4, 128))
    """
    return Checkpoint(*read_checkpoint(path_or_repo, device, verify))


def push(folder: str | Path, repo: str, private: bool = False) -> str:
    """Upload a checkpoint to the Hugging Face hub.

    Args:
        folder: The folder of the checkpoint.
        repo: The repository, "owner/name"; created if it does not exist.
        private: Create a private repository.

    Returns:
        The address of the repository.

    Raises:
        ValueError: The name of the repository is invalid, or the checkpoint is damaged.
        ConnectionError: The hub cannot be reached or does not allow the upload.
    """
    read_folder(Path(folder))  # a damaged checkpoint is not uploaded
    return remote.upload(Path(folder), repo, (CONFIG, WEIGHTS, *tokenizers.KEPT), private)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `config.json` says of a checkpoint.

    Args:
        checkpoint: The checkpoint.
    """
    extra = checkpoint.config.get("extra")
    return describe_parts(checkpoint.model, checkpoint.head, checkpoint.data, checkpoint.tokenizer, extra, {})
