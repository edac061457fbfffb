"""`m2s sample CHECKPOINT`: draw samples from a trained network."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from m2s.cli.help_text import help_from_source
from m2s.cli.sample_files import advance, read_finished, settings, write_picture_or_text, write_samples
from m2s.cli.sampling_args import SamplingArgs
from m2s.errors import UserError
from m2s.io import output_file, require_absent
from m2s.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.hub import Checkpoint
    from m2s.samplers.options import SamplingOptions
    from m2s.samplers.shards import SampleShards

SUFFIXES = (".npz", ".png", ".txt")


@dataclass(frozen=True)
@help_from_source
class Sample(SamplingArgs):
    """Draw samples from a checkpoint. Writes tokens as .npz, and a grid of pictures (.png) or text (.txt) beside them.

    Sample number i depends on the seed and on i only. It does not depend on the batch size, on the number of processes, or on
    an interruption. The same command, given again, resumes an interrupted run. It also writes a picture or text that is
    missing beside finished tokens.

    The last options below belong to single samplers. They come from the samplers that are registered, also by a --plugin.

    Example: m2s sample runs/digits --n 64 --steps 100 --out digits.png

    Example: m2s sample runs/owt --sampler forward_backward --corrections 2 --prompt "Once upon" --out story.txt
    """

    out: Path
    """The file to write: .npz for tokens; .png (images) or .txt (text), with the tokens beside it as .npz."""
    start: int = 0
    """Number of the first sample. Samples 0..63 and then 64..127 are the same as 0..127."""
    prompt: str = ""
    """Text at the start of every sample."""
    clamp: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .npy of integers, [n, length] or [length]: tokens that stay as they are, and -1 at positions to fill (infilling)."""
    labels: tuple[int, ...] = ()
    """Classes to draw, cyclically by the number of the sample, from a network that was trained with labels: --labels 0 1 2."""
    guidance: float = 1.0
    """Strength g of classifier-free guidance: above 1 exaggerates the labels, 1 is no guidance. Needs --labels."""
    guide: Literal["posterior", "rates", "step"] = "posterior"
    """What guidance combines, as p_c^g p_u^(1-g) of the predictions with and without labels: posteriors; reverse rates (always
    for an unconstrained score); or the distributions of one step (D-CFG of UDLM; samplers bayes, ancestral, analytic)."""
    temperature: float = 1.0
    """Temperature of the posterior: below 1 sharpens it."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens that has this much of the posterior; 1 keeps all."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Keep this many of the most likely tokens; by default all."""
    on: Literal["posterior", "leave_one_out"] = "posterior"
    """The distribution that temperature, top-k and top-p sharpen."""
    project: bool = False
    """Replace an unconstrained score by the nearest one that has a posterior (repair of SEDD checkpoints)."""
    shard: str = ""
    """I/K: draw only every K-th batch, starting with the I-th (counted from 0), to divide the work. The process that draws the
    last batch writes the result. Under torchrun each process takes its part by itself. Write -- before the command there:
    torchrun --nproc-per-node 8 -m m2s.cli -- sample RUN --n 64."""

    def run(self) -> None:
        """Draw the samples that are missing, and write all of them.

        Raises:
            UserError: An option cannot be used, or a shard is damaged.
        """
        from m2s.cli.evaluate.images import read_settings
        from m2s.samplers.shards import CorruptShardError, read_unfinished, remove_finished

        out = output_file(self.out, SUFFIXES)
        tokens_file = out.with_suffix(".npz")
        if out.exists() and tokens_file.exists():
            remove_finished(tokens_file, read_settings(str(tokens_file)))
        require_absent([out], self.overwrite)
        shard, shards = self._shard()
        checkpoint = self.load()
        self._check(checkpoint)
        finished = read_settings(str(tokens_file)) if tokens_file.exists() and not self.overwrite else None
        recorded = (finished, read_unfinished(tokens_file))
        options = self._options(checkpoint, self.resumed_micro_batch(*recorded))
        parts = self._parts(checkpoint, options, self.shard_size(options, *recorded))
        if tokens_file.exists() and not self.overwrite:
            write_picture_or_text(out, read_finished(tokens_file, parts.settings), checkpoint, parts.settings)
            if parts.folder.is_dir():
                with parts.lock():
                    parts.delete()
            return
        with parts.lock(shard, shards):
            try:
                done = parts.open()
                if done:
                    print(f"resuming: {done} of {self.n} samples were drawn before")
                else:
                    self.print_padding(options)
                self._draw(checkpoint, parts, options, (shard, shards))
                with parts.joining() as complete:
                    if complete:
                        write_samples(out, parts.read_all(), checkpoint, parts.settings)
                        parts.delete()
                    elif parts.folder.is_dir():
                        print(f"shard {shard} of {shards} is drawn; other shards are missing")
            except CorruptShardError as error:
                raise UserError(str(error)) from error

    def read_or_draw(self) -> "Tensor":
        """Return the samples: those of a finished file with the same settings, or new ones, which are written.

        Returns:
            The tokens, [n, L].

        Raises:
            UserError: An option is invalid, or the file exists with other settings and `overwrite` is not set.
        """
        tokens_file = self.out.with_suffix(".npz")
        if self.overwrite or not tokens_file.exists():
            self.run()
        checkpoint = self.load()
        options = self._options(checkpoint, self.micro_batch)
        return read_finished(tokens_file, self._parts(checkpoint, options, self.shard_size(options)).settings)

    def _parts(self, checkpoint: "Checkpoint", options: "SamplingOptions", size: int) -> "SampleShards":
        """The batches of samples on the disk, with the settings that the samples depend on."""
        from m2s.samplers.shards import SampleShards

        # The labels from the first sample on: a run of an older version, which counted them from 0, has other settings.
        labels = self._sample_labels(len(self.labels))
        known, vocab = settings(self, checkpoint, options, labels), checkpoint.head.process.vocab
        return SampleShards(self.out.with_suffix(".npz"), self.n, options.shape[1], size, known, vocab)

    def _shard(self) -> tuple[int, int]:
        """The number of this shard, and how many there are."""
        text = self.shard or f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"
        try:
            shard, shards = map(int, text.split("/"))
        except ValueError:
            raise UserError(option="shard", value=text, expected="like 0/2") from None
        if not 0 <= shard < shards:
            raise UserError(option="shard", value=text, reason=f"the first number must lie in 0..{shards - 1}")
        return shard, shards

    def _check(self, checkpoint: "Checkpoint") -> None:
        """Raise UserError where the checkpoint cannot do what the options ask for."""
        from m2s.data.tokenizer import check_tokenizer

        if self.out.suffix == ".png" and (checkpoint.data or {}).get("kind") != "image":
            others = ".npz" if checkpoint.tokenizer is None else ".txt or .npz"
            raise UserError(f"{self.checkpoint} is not a model of images: write {others}")
        if self.out.suffix == ".txt" and checkpoint.tokenizer is None:
            hint = f"{checkpoint.tokenizer_hint}. Or write .npz"
            raise UserError(f"{self.checkpoint} has no tokenizer to turn tokens into text: {hint}")
        if self.prompt and checkpoint.tokenizer is None:
            hint = f"{checkpoint.tokenizer_hint}. Or use --clamp"
            raise UserError(f"{self.checkpoint} has no tokenizer to encode --prompt: {hint}")
        if (self.out.suffix == ".txt" or self.prompt) and checkpoint.tokenizer is not None:
            check_tokenizer(checkpoint.tokenizer)
        if self.project and checkpoint.head.has_posterior:
            raise UserError(f"--project is for an unconstrained score, but {self.checkpoint} predicts a posterior already")
        if self.guidance != 1 and not self.labels:
            raise UserError(
                option="guidance", value=self.guidance, reason="there are no --labels", hint="give the classes to draw"
            )
        sharpens = (self.temperature, self.top_p, self.top_k) != (1, 1, None)
        if sharpens and not checkpoint.head.has_posterior and not self.project:
            raise UserError(
                f"--temperature, --top-k and --top-p sharpen a posterior, but {self.checkpoint} predicts an unconstrained "
                "score, which need not have one: use --project, or leave them out"
            )
        classes = checkpoint.config["model"].get("classes")
        if self.labels and (classes is None or not all(0 <= label < classes for label in self.labels)):
            known = "takes no labels" if classes is None else f"knows the classes 0..{classes - 1}"
            raise UserError(f"--labels are {' '.join(map(str, self.labels))}, but {self.checkpoint} {known}")

    def _clamp(self, checkpoint: "Checkpoint", length: int) -> "Tensor | None":
        """Fixed tokens of all samples, [n, length], with -1 at positions to fill; None where nothing is fixed."""
        import torch

        if not self.prompt and self.clamp is None:
            return None
        clamp = torch.full((self.n, length), -1) if self.clamp is None else self._read_clamp(self.clamp, length)
        if self.prompt:
            assert checkpoint.tokenizer is not None
            try:
                ids = checkpoint.tokenizer.encode(self.prompt)
            except ValueError as error:
                raise UserError(f"--prompt: {error}") from error
            if len(ids) >= length:
                raise UserError(f"--prompt has {len(ids)} tokens, but a sample has {length}: give a greater --length")
            clamp[:, : len(ids)] = torch.tensor(ids)
        return clamp

    def _read_clamp(self, path: Path, length: int) -> "Tensor":
        """The tokens of --clamp, [n, length]."""
        import numpy as np
        import torch

        from m2s.npz import read_npy

        try:
            found = read_npy(path)
            if found.dtype.kind not in "iu":
                raise ValueError(f"its dtype is {found.dtype}")
            given = torch.from_numpy(found.astype(np.int64))
        except (OSError, ValueError) as error:
            raise UserError(f"--clamp {path} cannot be read as a .npy file of integers: {error}") from error
        if given.shape not in ((length,), (self.n, length)):
            raise UserError(f"--clamp {path} has shape {list(given.shape)}, expected [{length}] or [{self.n}, {length}]")
        return given.expand(self.n, length).clone()

    def _sample_labels(self, count: int) -> tuple[int, ...]:
        """The labels of the first `count` samples. Sample i has label i mod the number of labels, whatever --start is."""
        return tuple(self.labels[(self.start + i) % len(self.labels)] for i in range(count))

    def _options(self, checkpoint: "Checkpoint", micro_batch: int | None) -> "SamplingOptions":
        """The options of all samples together."""
        import torch

        return self.options(
            checkpoint,
            self.project,
            clamp=self._clamp(checkpoint, self.sample_length(checkpoint)),
            condition=torch.tensor(self._sample_labels(self.n)) if self.labels else None,
            guidance=self.guidance,
            guide=self.guide,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            on=self.on,
            start=self.start,
            micro_batch=micro_batch,
        )

    def _draw(
        self, checkpoint: "Checkpoint", parts: "SampleShards", options: "SamplingOptions", shard: tuple[int, int]
    ) -> None:
        """Draw the batches of this shard that are missing, and save each."""
        import m2s
        from m2s.ops import use_backend

        missing = list(parts.missing(*shard))
        windows, network = len(list(options.windows())), self.network(checkpoint)
        with (
            use_backend(self.kernels),
            Progress(float(sum(count for _, count in missing)), "sampling", "sample") as progress,
        ):
            for first, count in missing:
                rows = slice(first, first + count)
                batch = replace(
                    options,
                    shape=(count, parts.length),
                    start=self.start + first,
                    clamp=None if options.clamp is None else options.clamp[rows],
                    condition=None if options.condition is None else options.condition[rows],
                )
                given = {field.name: getattr(batch, field.name) for field in fields(batch)}
                parts.write(first, m2s.sample(network, callback=lambda step: advance(progress, step, windows), **given))
