"""m2s sample: draw from a trained network."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from m2s.cli.sampling_args import BAR, SamplingArgs, advance, drawn, settings, write_beside, write_samples
from m2s.errors import UserError
from m2s.io import output_file, require_absent

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.hub import Checkpoint
    from m2s.samplers.options import SamplingOptions
    from m2s.samplers.shards import SampleShards

SUFFIXES = (".npz", ".png", ".txt")


@dataclass(frozen=True)
class Sample(SamplingArgs):
    """Draw samples from a checkpoint: tokens as .npz, and a picture grid (.png) or text (.txt) beside them.

    Sample number i depends on the seed and i alone: not on the batch, on how many processes share the work, or on an
    interruption. A killed run goes on where it stopped when the same command is given again; so does one that drew all and
    could not write the picture or the text.

    Example: m2s sample runs/digits --n 64 --steps 100 --out digits.png
    """

    out: Path
    """Where to write: .npz for tokens; .png (images) or .txt (text) puts the tokens beside it as .npz."""
    start: int = 0
    """The number of the first sample: 0..63 and then 64..127 are the same as 0..127."""
    prompt: str = ""
    """Text that every sample begins with."""
    clamp: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .npy of integers [n, length] or [length]: tokens that stay as they are, -1 where free (infilling)."""
    labels: tuple[int, ...] = ()
    """Classes to draw, in turns, from a network that takes them."""
    guidance: float = 1.0
    """Strength g of classifier-free guidance: above 1 exaggerates the labels, 1 is no guidance."""
    guide: Literal["posterior", "rates", "step"] = "posterior"
    """What guidance combines, as p_c^g p_u^(1-g) of the predictions with and without labels: posteriors, reverse rates (always
    for an unconstrained score), or the distributions of one step (D-CFG of UDLM; samplers bayes, ancestral, analytic)."""
    temperature: float = 1.0
    """Below one sharpens the posterior."""
    top_p: float = 1.0
    """Keep the likeliest tokens that hold this much of the posterior."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Keep this many of the likeliest tokens."""
    on: Literal["posterior", "leave_one_out"] = "posterior"
    """Which law temperature, top-k and top-p sharpen."""
    project: bool = False
    """Replace a free score by the nearest one that has a posterior (repair of SEDD checkpoints)."""
    micro_batch: int = 16
    """Rows of every call of the network. Part of what a sample is: another number may round differently."""
    shard: str = ""
    """i/k: draw every k-th batch only, beginning with the i-th (from 0); whoever draws the last writes the result. Under
    torchrun each process takes its share by itself."""

    def run(self) -> None:
        from m2s.samplers.shards import CorruptShardError, SampleShards

        out = output_file(self.out, SUFFIXES)
        tokens_file = out.with_suffix(".npz")
        require_absent([out], self.overwrite)
        shard, shards = self._share()
        checkpoint = self.load()
        self._check(checkpoint)
        options = self._options(checkpoint)
        parts = SampleShards(
            tokens_file, self.n, options.shape[1], self.batch_size, settings(self, checkpoint, options, self.labels)
        )
        if tokens_file.exists() and not self.overwrite:
            write_beside(out, drawn(tokens_file, parts.settings), checkpoint, parts.settings)
            parts.close()
            return
        try:
            done = parts.open()
            self._draw(checkpoint, parts, options, done, (shard, shards))
            if not parts.whole():
                print(f"shard {shard} of {shards} is drawn; the others are not all there yet")
                return
            tokens = parts.join()
        except CorruptShardError as error:
            raise UserError(str(error)) from error
        write_samples(out, tokens, checkpoint, parts.settings)
        parts.close()

    def _share(self) -> tuple[int, int]:
        text = self.shard or f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"
        try:
            shard, shards = map(int, text.split("/"))
        except ValueError:
            raise UserError(f"--shard is {text!r}, but it must be like 0/2") from None
        if not 0 <= shard < shards:
            raise UserError(f"--shard is {text!r}, but the first number must lie in 0..{shards - 1}")
        return shard, shards

    def _check(self, checkpoint: "Checkpoint") -> None:
        """The checkpoint can do what was asked of it."""
        from m2s.data.tokenizer import check_tokenizer

        if self.out.suffix == ".png" and (checkpoint.data or {}).get("kind") != "image":
            raise UserError(f"{self.checkpoint} does not hold a model of images: write .txt or .npz")
        if self.out.suffix == ".txt" and checkpoint.tokenizer is None:
            raise UserError(f"{self.checkpoint} has no tokenizer to turn tokens into text: write .npz")
        if self.prompt and checkpoint.tokenizer is None:
            raise UserError(f"{self.checkpoint} has no tokenizer to read --prompt with: use --clamp")
        if (self.out.suffix == ".txt" or self.prompt) and checkpoint.tokenizer is not None:
            check_tokenizer(checkpoint.tokenizer)
        if self.project and checkpoint.head.has_posterior:
            raise UserError(f"--project repairs a free score, but {self.checkpoint} predicts a posterior already")
        classes = checkpoint.config["model"].get("classes")
        if self.labels and (classes is None or not all(0 <= label < classes for label in self.labels)):
            known = "takes no labels" if classes is None else f"knows the classes 0..{classes - 1}"
            raise UserError(f"--labels are {' '.join(map(str, self.labels))}, but {self.checkpoint} {known}")

    def _clamp(self, checkpoint: "Checkpoint", length: int) -> "Tensor | None":
        import numpy as np
        import torch

        if not self.prompt and self.clamp is None:
            return None
        clamp = torch.full((self.n, length), -1)
        if self.clamp is not None:
            try:
                given = torch.from_numpy(np.load(self.clamp, allow_pickle=False).astype(np.int64))
            except (OSError, ValueError) as error:
                raise UserError(f"--clamp {self.clamp} cannot be read as a .npy file of integers: {error}") from error
            if given.shape not in ((length,), (self.n, length)):
                raise UserError(
                    f"--clamp {self.clamp} has shape {list(given.shape)}, expected [{length}] or [{self.n}, {length}]"
                )
            clamp = given.expand(self.n, length).clone()
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

    def _options(self, checkpoint: "Checkpoint") -> "SamplingOptions":
        import torch

        return self.options(
            checkpoint,
            self.project,
            clamp=self._clamp(checkpoint, self.tokens(checkpoint)),
            condition=torch.tensor([self.labels[i % len(self.labels)] for i in range(self.n)]) if self.labels else None,
            guidance=self.guidance,
            guide=self.guide,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            on=self.on,
            start=self.start,
            micro_batch=self.micro_batch,
        )

    def _draw(
        self, checkpoint: "Checkpoint", parts: "SampleShards", options: "SamplingOptions", done: int, share: tuple[int, int]
    ) -> None:
        from tqdm import tqdm

        import m2s
        from m2s.ops import use_backend

        missing = list(parts.missing(*share))
        if done:
            print(f"going on: {done} of {self.n} samples were drawn before")
        same = {field.name: getattr(options, field.name) for field in fields(options)}
        windows, network = len(list(options.windows())), self.network(checkpoint)
        with (
            use_backend(self.kernels),
            tqdm(total=float(sum(count for _, count in missing)), desc="sampling", unit="sample", bar_format=BAR) as bar,
        ):
            for first, count in missing:
                at = slice(first, first + count)
                mine = {name: None if same[name] is None else same[name][at] for name in ("clamp", "condition")}
                mine |= {"shape": (count, parts.length), "start": self.start + first}
                tokens = m2s.sample(network, callback=lambda step: advance(bar, step, windows), **{**same, **mine})
                parts.put(first, tokens)
