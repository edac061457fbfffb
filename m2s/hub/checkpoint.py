"""Checkpoints: a folder with `config.json`, which describes the network, and `model.safetensors`. Nothing is pickled.

Checkpoints of other projects can be loaded too: see `m2s.hub.formats`.
"""

import contextlib
import html
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from m2s import remote, validation
from m2s.data import tokenizer as tokenizers
from m2s.data.encode import tokenizer_description
from m2s.data.examples import choose_labels, read_examples, read_labels, weights
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.heads import Head
from m2s.hub import builtin, formats
from m2s.hub.card import CARD, model_card
from m2s.hub.config import PREFIX as PROCESS
from m2s.hub.config import from_dict, limit_parameters, network_from_dict, network_to_dict, to_dict
from m2s.hub.folder import CONFIG, NEW, WEIGHTS, current, verify, write
from m2s.hub.tensors import TensorFaults, TensorInfo, check_finite, read_header, read_safetensors, uniform_precision
from m2s.io import atomic_write
from m2s.losses import Elbo, elbo
from m2s.losses.elbo import nelbo_integrand
from m2s.rng import derived_seed, draw_seed
from m2s.samplers import Diagnostics, sample
from m2s.version import __version__

MODEL_TYPE = "m2s"  # by which AutoModel of transformers finds `m2s.hub.auto_model`
FORMAT = 1  # increased when an older m2s cannot read new checkpoints
MIXIN = "a folder that PyTorchModelHubMixin wrote: load it by its class's from_pretrained and give model and head to m2s.sample"
MAX_SITES = 2**31 - 1  # of an image, where the network has no limit
MODEL = "model."  # prefix of the names of the network's tensors


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


def save(
    folder: str | Path,
    model: nn.Module,
    head: Head,
    data: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a network, with everything that is needed to sample from it.

    A checkpoint that is already in the folder is replaced only when the new one is complete on the disk.

    Args:
        folder: Where to write; created if it does not exist.
        model: A network of a class in `m2s.models.NETWORKS`.
        head: Its head, of a registered class, as are its process and schedule (`m2s.hub.config.saved_classes`).
        data: A description of the data, {"kind": "image", "shape": [8, 8], "levels": 17} or {"kind": "text", "length": 128}.
        tokenizer: The tokenizer of a text model. One that is read from a file (GPT-2's merges) is copied into the folder.
        extra: Anything else that JSON can hold, such as a step count or a git commit.

    Returns:
        The folder.

    Raises:
        TypeError: A class is not registered, or `data` or `extra` holds what JSON cannot. Nothing is written.
        ValueError: Network, process and tokenizer have different vocabularies, `data` does not fit them, or the folder is a
            name of built-in weights. Nothing is written.

    Example:
        >>> m2s.hub.save("runs/mine", model, head, data={"kind": "text", "length": 128})
        >>> model, head = m2s.load("runs/mine")
    """
    if builtin.is_builtin(folder):
        raise ValueError(f"{folder} names weights in the package, which are not replaced: give the path of a folder")
    validation.instance("model", model, nn.Module, "a network such as m2s.models.DiT(config)")
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    tensors: dict[str, Tensor] = {}
    config = _describe(model, head, data, tokenizer, extra, tensors)
    for name, tensor in model.state_dict().items():
        tensors[MODEL + name] = tensor.detach().cpu().contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    copied = None
    if tokenizer is not None:
        with contextlib.suppress(FileNotFoundError):  # without the file, encoding text raises an error that says so
            copied = tokenizers.save_tokenizer_files(tokenizer, folder)
    write(folder, config, tensors, [] if copied is None else [copied])
    return folder


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
    if builtin.is_builtin(path_or_repo):
        checkpoint = _load(builtin.locate(path_or_repo), device, verify)
        checkpoint.model.float()  # the files are in bf16 to be small
        return checkpoint
    place = remote.locate(path_or_repo, _hub_files(), _suffixes())
    _check_ordinary(place)
    with _within(place):
        found = formats.recognize(place)
    if found is None:
        return _load(place, device, verify)
    layout, settings = found
    with _within(place):
        model, head, data, tokenizer = layout.load(place, settings)
        check_finite(dict(model.named_parameters()))
        config = _describe(model, head, data, tokenizer, {layout.name: settings}, {})
    return Checkpoint(model.to(device).eval(), head, tokenizer, data, config)


def _hub_files() -> tuple[str, ...]:
    """The names of the files of a checkpoint, which are downloaded from a repository."""
    others = [name for layout in formats.FORMATS.values() for name in layout.files]
    return tuple(dict.fromkeys((CONFIG, WEIGHTS, *tokenizers.KEPT, *others)))


def _suffixes() -> tuple[str, ...]:
    """The suffixes of files that are a checkpoint by themselves."""
    return tuple(suffix for layout in formats.FORMATS.values() for suffix in layout.suffixes)


def _load(folder: Path, device: torch.device | str = "cpu", verified: bool = False) -> Checkpoint:
    """Load a folder that `save` wrote."""
    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds {CONFIG} but no {WEIGHTS}: copy that file too, or save the checkpoint again")
    if verified:
        verify(folder, config)
    header = read_header(path)
    with _within(folder):
        matrices = read_safetensors(path, [name for name in header if name.startswith(PROCESS)])
        check_finite(matrices)
        head = from_dict(config["head"], matrices)
        validation.instance("head", head, Head, 'the description of a head such as {"kind": "Posterior", ...}')
        tokenizer = None if config.get("tokenizer") is None else tokenizers.from_dict(config["tokenizer"], folder)
        _check_vocabulary(config["model"], head, tokenizer)
        _check_data(config.get("data"), config["model"], head)
        present = {name.removeprefix(MODEL): info for name, info in header.items() if name.startswith(MODEL)}
        # Initial weights are replaced below and must not use up random numbers.
        with torch.random.fork_rng(devices=[]), limit_parameters([info.shape for info in present.values()]):
            model = network_from_dict(config["model"])
        _check_tensors(model, present, [name for name in header if not name.startswith((MODEL, PROCESS))])
        found = read_safetensors(path, [MODEL + name for name in present])
        weights = uniform_precision({name.removeprefix(MODEL): value for name, value in found.items()})
        model.load_state_dict(weights, assign=True)
        check_finite(dict(model.named_parameters()))
        return Checkpoint(model.to(device).eval(), head, tokenizer, config.get("data"), config)


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
    _load(Path(folder))  # a damaged checkpoint is not uploaded
    return remote.upload(Path(folder), repo, (CONFIG, WEIGHTS, *tokenizers.KEPT), private)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `config.json` says of a checkpoint.

    Args:
        checkpoint: The checkpoint.
    """
    extra = checkpoint.config.get("extra")
    return _describe(checkpoint.model, checkpoint.head, checkpoint.data, checkpoint.tokenizer, extra, {})


def _describe(
    model: nn.Module,
    head: Head,
    data: Mapping[str, Any] | None,
    tokenizer: Tokenizer | None,
    extra: Mapping[str, Any] | None,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """The contents of `config.json`. The head's matrices are put into `tensors`."""
    config: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "format": FORMAT,
        "m2s": __version__,
        "model": network_to_dict(model),
        "head": to_dict(head, tensors),
        "data": None if data is None else dict(data),
        "tokenizer": tokenizer_description(tokenizer) or None,
        "extra": {} if extra is None else dict(extra),
    }
    try:
        json.dumps(config)
    except TypeError as error:
        raise TypeError(f"data and extra must hold what JSON can: numbers, strings, lists, dictionaries; {error}") from None
    _check_vocabulary(config["model"], head, tokenizer)
    _check_data(json.loads(json.dumps(config["data"])), config["model"], head)  # as it reads from a file
    return config


def _check_ordinary(place: Path) -> None:
    """Raise ValueError where a file of the checkpoint is a pipe or a device: reading it could wait forever."""
    files = [place / name for name in (*_hub_files(), CONFIG + NEW)] if place.is_dir() else [place]
    for path in files + [path for suffix in _suffixes() for path in place.glob(f"*{suffix}")]:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not an ordinary file: take it from a copy, or save the checkpoint again")


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check `config.json`.

    Args:
        folder: The folder of a checkpoint.

    Returns:
        Its contents.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged, was not written by m2s, or was written by a newer version.
    """
    path = current(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        also = f"; {MIXIN}" if (folder / WEIGHTS).exists() else _inside(folder)
        raise FileNotFoundError(
            f"{folder} holds no {CONFIG}: it is not a checkpoint, or its first save was interrupted{also}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}. Take it from a copy, or save the checkpoint again") from None
    if not isinstance(config, dict) or not isinstance(config.get("format"), int):
        raise ValueError(
            f'{path} does not say its "format": it was not written by m2s.hub.save. It is in no layout of '
            f"other projects that m2s loads ({', '.join(formats.FORMATS)}; docs/checkpoints.md describes them); {MIXIN}"
        )
    if config["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {config['format']} (m2s {config.get('m2s')}), but this m2s ({__version__}) reads formats up to "
            f"{FORMAT}: install a newer m2s"
        )
    missing = [name for name in ("model", "head") if not isinstance(config.get(name), dict)]
    if missing:
        raise ValueError(f"{path} does not describe the {' and the '.join(missing)}: save the checkpoint again")
    return config


def _inside(folder: Path) -> str:
    """What to add where a checkpoint lies in a folder below, as in the hub's cache or in the folder of a training."""
    places = itertools.chain(*(folder.glob(f"{below}/{name}") for below in ("*", "*/*") for name in (CONFIG, "*.ckpt")))
    found = next((path.parent if path.name == CONFIG else path for path in places), None)
    return "" if found is None else f"; there may be one in it: try {found}"


def _check_vocabulary(model: Mapping[str, Any], head: Head, tokenizer: Tokenizer | None) -> None:
    """Network, process and tokenizer have the same vocabulary."""
    states, process = model.get("states"), head.process
    if states is not None and states != process.states:
        raise ValueError(f"the network has {states} states, but the process {process} has {process.states}: they must agree")
    if tokenizer is not None and tokenizer.vocab != process.vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab} tokens, but the process {process} has {process.vocab}: they must agree"
        )


def _check_data(data: Any, model: Mapping[str, Any], head: Head) -> None:
    """The description of the data has the form that sampling and evaluation rely on, and fits the network and the process."""
    if data is None:
        return
    if not isinstance(data, dict):
        raise ValueError(f'data is {data!r}, but it must be a description such as {{"kind": "text", "length": 128}}')
    if data.get("kind") == "image":
        shape: Any = data.get("shape")
        levels: Any = data.get("levels")
        if not isinstance(shape, list) or len(shape) not in (2, 3):
            raise ValueError(f"data.shape is {shape!r}, but it must be [height, width] or [height, width, channels]")
        for size in shape:
            validation.positive_int("data.shape", size)
        validation.positive_int("data.levels", levels, low=2)
        if levels != head.process.vocab:
            raise ValueError(
                f"data.levels is {levels}, but the process {head.process} has {head.process.vocab}: they must agree"
            )
        image, length = model.get("shape"), model.get("length")  # a transformer has the greatest length, if any
        if isinstance(image, list | tuple) and shape != list(image):
            raise ValueError(f"data.shape is {shape}, but the network is for images {image}: they must agree")
        if math.prod(shape) > (length if isinstance(length, int) else MAX_SITES):
            raise ValueError(f"data.shape is {shape}, but the network is for at most {length or MAX_SITES} sites")
    elif data.get("length") is not None:
        validation.positive_int("data.length", data["length"])


def _check_tensors(model: nn.Module, weights: Mapping[str, TensorInfo], unexpected: list[str]) -> None:
    """The weights are those of the network, with the same names and shapes, and floats where it has floats."""
    expected = model.state_dict()
    both = [name for name in expected if name in weights]
    shapes = [
        f"{name} has shape {list(weights[name].shape)}, expected {list(expected[name].shape)}"
        for name in both
        if weights[name].shape != tuple(expected[name].shape)
    ]
    dtypes = [
        f"{name} has dtype {weights[name].dtype}, expected {expected[name].dtype}"
        for name in both
        if weights[name].dtype.is_floating_point != expected[name].is_floating_point()
    ]
    missing = [name for name in expected if name not in weights]
    faults = TensorFaults(missing, [*(name for name in weights if name not in expected), *unexpected], shapes + dtypes)
    if faults:
        raise ValueError(f"{WEIGHTS} does not fit the network that {CONFIG} describes: {faults}")


# What constructors may raise for values of the wrong type or size, which a configuration from others can hold.
_UNUSABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, AssertionError)


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    """Add the folder to the message of errors raised inside."""
    try:
        yield
    except _UNUSABLE as error:
        reason = str(error) or type(error).__name__
        raise ValueError(reason if str(folder) in reason else f"{folder}: {reason}") from error
