"""`m2s.fit`: train on a tensor, an array or a list of sequences, with the trainer of `m2s train`."""

import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from m2s import hub, validation
from m2s.data.images import ImageDataset
from m2s.data.sequences import Sequences
from m2s.data.source import ImageSource, Source, TextSource
from m2s.devices import resolve_device
from m2s.errors import UserError, suggestion
from m2s.methods.config import AUTO
from m2s.models import dit, unet
from m2s.rng import draw_seed
from m2s.training.config import RECORD, Config, DataConfig, NetworkConfig, OptimizerConfig, RunConfig, replace
from m2s.training.log import NAME as LOG
from m2s.training.loop import Diverged, train
from m2s.training.python_options import for_python, option_kinds, rewrite_options
from m2s.training.run_folder import read_record


def fit(
    x: Any,
    method: str = "m2s-offset",
    labels: Any = None,
    *,
    vocab: int | None = None,
    validation_x: Any = None,
    validation_labels: Any = None,
    steps: int = 1000,
    batch: int = 64,
    lr: float | None = None,
    size: str = "tiny",
    out: str | Path | None = None,
    seed: int | None = None,
    device: str = AUTO,
    progress: bool = True,
    options: Mapping[str, Any] | None = None,
) -> hub.Checkpoint:
    """Train a network on sequences of integers, and return it as `m2s.load` does.

    It builds a configuration and calls `m2s.training.train`, as `m2s train` does. The default is a transformer of about one
    million parameters, which a laptop trains in minutes. The returned weights are the moving average.

    Args:
        x: A tensor or an array of integers, [N, L]; or N sequences of any lengths, such as a list or a data set of torch,
            which are padded (padding has no effect on the loss); or a data set of images, `m2s.data.load("digits")`, which is
            trained on its training split and validated on its test split; or an `m2s.data.Source`.
        method: A method of `m2s.methods.METHODS`.
        labels: A class for each example, [N]. Samples can then be drawn by class and guided. True: the labels of the data set
            `x`. None: a data set of images is learned without its labels, a source that has labels with them.
        vocab: The number of tokens. None: the greatest token of x plus one, which is reported.
        validation_x: Held-out examples, in the form of `x`. None: a hundredth of the tokens is held out, or a tenth of fewer
            than 100,000.
        validation_labels: A class for each of them.
        steps: Training steps.
        batch: Examples of a step.
        lr: The largest learning rate. None: 1e-3 for the transformer, 2e-3 for the U-Net.
        size: The size of the network. The transformer has "tiny", "small" and "medium". A data set of images gets a U-Net of
            size "tiny", "mnist" or "md4", and the transformer for the other sizes.
        out: The folder of the run. The same call, given again, resumes it. None: nothing is kept on the disk.
        seed: Of weights, order, times, noise and the choice of held-out examples. None: that of the run in `out` where there
            is one, otherwise drawn from torch's global CPU generator. The checkpoint records it:
            `checkpoint.config["extra"]["seed"]`.
        device: "cpu", "cuda", or "auto": a GPU where there is one.
        progress: Report the progress: a bar on a terminal and in a notebook, lines elsewhere.
        options: Further values of `m2s.training.Config` by name, such as {"network.width": 64, "process.kind": "absorbing"}.

    Returns:
        The checkpoint, with `sample`, `evaluate` and `save`.

    Raises:
        UserError: An argument is out of range or unknown. Nothing has been written then.
        UserTypeError: `x` does not hold integers.
        Diverged: A loss or gradient was not finite.
        KeyboardInterrupt: Ctrl-C. With `out`, the state is saved and the same call resumes.

    Example:
        >>> x = torch.arange(8).repeat(500, 2)
        >>> checkpoint = m2s.fit(x, steps=200)
        >>> checkpoint.sample(4).shape
        torch.Size([4, 16])
    """
    seed = _seed(out) if seed is None else seed
    validation.positive_int("seed", seed, 0)
    source = _source(x, labels, vocab, validation_x, validation_labels, seed)
    if progress and getattr(source, "inferred", False):
        text = f"m2s.fit: {source.vocab} tokens, inferred from the greatest one; give vocab= if there are more"
        print(text, file=sys.stderr, flush=True)
    if progress:
        which = (
            ", chosen at random; give validation_x= to choose them"
            if isinstance(source, Sequences) and source is not x and validation_x is None
            else ""
        )
        text = f"m2s.fit: {source.size:,} examples for training, {source.held_out:,} held out for validation"
        print(text + which, file=sys.stderr, flush=True)
    with ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="m2s-fit-")))
        config = _config(source, labels, folder, method, steps, batch, lr, size, seed, device)
        for name, value in (options or {}).items():
            config = _replace(config, name, value)
        try:
            train(config, source, quiet=not progress, temporary=out is None)
        except UserError as error:
            raise for_python(error, options or ()) from error.__cause__
        except Diverged as error:
            text = str(error) if out is not None else str(error).replace(error.kept, "")
            raise Diverged(rewrite_options(text)) from None
        except SystemExit:
            kept = f"the state is in {out}, and the same call resumes" if out is not None else "give out= to be able to resume"
            raise KeyboardInterrupt(f"m2s.fit was interrupted: {kept}") from None
        checkpoint = hub.load(folder, resolve_device("" if device == AUTO else device))
        files = {name: (folder / name).read_bytes() for name in (RECORD, LOG) if (folder / name).is_file()}
        return dataclasses.replace(checkpoint, run_files=files)


def _seed(out: str | Path | None) -> int:
    """The seed of the run that the folder holds, so that the same call resumes it; otherwise a drawn one."""
    if out is None or not (Path(out) / RECORD).is_file() or (Path(out) / RECORD).stat().st_size == 0:
        return draw_seed()
    recorded = read_record(Path(out), "give another out").get("config", {}).get("run", {}).get("seed")
    return recorded if isinstance(recorded, int) else draw_seed()


def _source(x: Any, labels: Any, vocab: int | None, validation_x: Any, validation_labels: Any, seed: int) -> Source:
    """The data as a source: a data set as it is, or sequences of which some are held out."""
    if isinstance(x, ImageDataset):
        x = ImageSource(x)
    if not isinstance(x, Source):
        return Sequences(x, vocab, labels, None, validation_x, validation_labels, seed=seed)
    if not (vocab is None and validation_x is None and validation_labels is None and isinstance(labels, bool | None)):
        raise UserError(
            "x is a data set, which has its own vocabulary, labels and held-out examples: leave these out; labels=True "
            "trains on its labels"
        )
    return x


def _data(source: Source) -> DataConfig:
    """The entry of train.json from which commands open the data again, such as `m2s evaluate bpd`."""
    if isinstance(source, ImageSource):
        return DataConfig(name=source.images.name)
    if isinstance(source, TextSource):
        return DataConfig(name="text", folder=str(source.folder), length=source.length)
    return DataConfig(name="sequences")


def _network(source: Source, size: str, labels: bool) -> NetworkConfig:
    """The U-Net of that size for images that it can read, otherwise the transformer."""
    kind = "dit"
    if source.shape is not None and size in unet.SIZES:
        resolutions = len(unet.SIZES[size].get("multipliers", (1,)))
        fits = all(side % 2 ** (resolutions - 1) == 0 for side in source.shape[:2])
        kind = "unet" if fits or size not in dit.SIZES else "dit"
    return NetworkConfig(kind=kind, size=size, labels=labels)


def _config(
    source: Source,
    labels: Any,
    folder: Path,
    method: str,
    steps: int,
    batch: int,
    lr: float | None,
    size: str,
    seed: int,
    device: str,
) -> Config:
    """The configuration of a run on a laptop."""
    validation.positive_int("steps", steps)
    run = RunConfig(
        out=folder,
        steps=steps,
        batch=batch,
        seed=seed,
        device=device,
        importance=0.1,  # as in the preset digits: fewer large gradients near t = 0
        validate_every=0,
        validation_passes=2,
        log_every=max(1, min(50, steps // 10)),
        save_every=min(steps, 500),
        keep=1,
    )
    # As `m2s train`, a data set of images is learned without its labels unless they are asked for.
    labeled = source.classes is not None and not isinstance(source, ImageSource) if labels is None else labels is not False
    network = _network(source, size, labeled)
    rate = (2e-3 if network.kind == "unet" else 1e-3) if lr is None else lr
    # The moving average must forget the first weights within a short run.
    optimizer = OptimizerConfig(lr=rate, warmup=max(1, min(100, steps // 10)), ema=0.995)
    return Config(run=run, method=method, network=network, data=_data(source), optimizer=optimizer)


def _replace(config: Config, name: str, value: Any) -> Config:
    """The configuration with one value changed, or an error that names the option."""
    try:
        if name not in option_kinds() and not name.startswith("run."):  # such as the name of a section
            raise TypeError
        return replace(config, name, value)
    except (AttributeError, TypeError):
        closest = suggestion(name, list(option_kinds()))
        hint = "names are those of m2s train --help without dashes, such as network.width or process.kind"
        raise UserError(option="options", value=name, reason="there is no such value", hint=closest or hint) from None
