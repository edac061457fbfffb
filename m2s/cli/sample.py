"""m2s sample: draw from a trained network."""

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m2s.report import Refused, target

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.hub import Checkpoint
    from m2s.sampler import Step
    from m2s.sampler.options import Options
    from m2s.sampler.parts import Parts

SUFFIXES = (".npz", ".png", ".txt")


@dataclass(frozen=True)
class Sample:
    """Draw samples from a checkpoint: tokens as .npz, and a picture grid (.png) or text (.txt) beside them.

    Sample number i depends on the seed and i alone: not on the batch, on how many processes share the work, or on an
    interruption. A killed run goes on where it stopped when the same command is given again.

    Samplers: bayes (exact finite step; the default), euler, analytic (SEDD's release), tau_leaping, predictor_corrector; for
    masks also ancestral, first_hitting, confidence, remasking.

    Example: m2s sample runs/digits --n 64 --steps 100 --out digits.png
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A folder with config.json and model.safetensors, or a repository owner/name of the Hugging Face hub."""
    out: Path
    """Where to write: .npz for tokens; .png (images) or .txt (text) puts the tokens beside it as .npz."""
    n: int = 16
    """How many samples."""
    steps: int = 128
    """Steps from noise to data; each is one call of the network."""
    sampler: str = "bayes"
    """How to take a step; see above."""
    grid: str = "cosine"
    """Where the times lie: cosine (small steps first) or linear."""
    seed: int = 0
    """Of all randomness."""
    start: int = 0
    """The number of the first sample: 0..63 and then 64..127 are the same as 0..127."""
    length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens of each sample; by default what the network was trained on. Longer text is filled in windows of that length."""
    prompt: str = ""
    """Text that every sample begins with."""
    clamp: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .npy of integers [n, length] or [length]: tokens that stay as they are, -1 where free (infilling)."""
    labels: tuple[int, ...] = ()
    """Classes to draw, in turns, from a network that takes them."""
    guidance: float = 1.0
    """Exaggerate the labels: mu_c^g mu_u^(1-g)."""
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
    batch_size: int = 64
    """Samples drawn together, and kept together if the run is interrupted."""
    micro_batch: int = 16
    """Rows of every call of the network. Part of what a sample is: another number may round differently."""
    device: str = ""
    """cpu, cuda, mps; by default the best there is."""
    shard: str = ""
    """i/k: draw every k-th batch only, beginning with the i-th (from 0); whoever draws the last writes the result. Under
    torchrun each process takes its share by itself."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        import torch

        from m2s.sampler.parts import Damaged, Parts

        out = target(self.out, SUFFIXES)
        tokens_file = out.with_suffix(".npz")
        for path in {out, tokens_file}:
            if path.exists() and not self.overwrite:
                raise Refused(f"{path} is there already: give another --out, or --overwrite to replace it")
        if self.n < 1 or self.batch_size < 1:
            raise Refused(f"--n is {self.n} and --batch-size is {self.batch_size}, but both must be at least 1")
        shard, shards = self._share()
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        checkpoint = self._load(device)
        length, window = self._length(checkpoint)
        options = self._options(checkpoint, length, window)
        parts = Parts(tokens_file, self.n, length, self.batch_size, self._settings(checkpoint, options.clamp))
        try:
            done = parts.open()
            self._draw(checkpoint, parts, options, done, (shard, shards))
            if not parts.whole():
                print(f"shard {shard} of {shards} is drawn; the others are not all there yet")
                return
            tokens = parts.join()
        except Damaged as error:
            raise Refused(str(error)) from error
        self._write(checkpoint, tokens, parts.settings, out)
        parts.close()

    def _share(self) -> tuple[int, int]:
        text = self.shard or f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"
        try:
            shard, shards = map(int, text.split("/"))
        except ValueError:
            raise Refused(f"--shard is {text!r}, but it must be like 0/2") from None
        if not 0 <= shard < shards:
            raise Refused(f"--shard is {text!r}, but the first number must lie in 0..{shards - 1}")
        return shard, shards

    def _load(self, device: str) -> "Checkpoint":
        from m2s.hub import load

        try:
            checkpoint = load(self.checkpoint, device)
        except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
            raise Refused(str(error)) from error
        data = checkpoint.data or {}
        if self.out.suffix == ".png" and data.get("kind") != "image":
            raise Refused(f"{self.checkpoint} does not hold a model of images: write .txt or .npz")
        if self.out.suffix == ".txt" and checkpoint.tokenizer is None:
            raise Refused(f"{self.checkpoint} has no tokenizer to turn tokens into text: write .npz")
        if self.prompt and checkpoint.tokenizer is None:
            raise Refused(f"{self.checkpoint} has no tokenizer to read --prompt with: use --clamp")
        return checkpoint

    def _length(self, checkpoint: "Checkpoint") -> tuple[int, int | None]:
        import math

        data = checkpoint.data or {}
        trained = math.prod(data["shape"]) if data.get("kind") == "image" else data.get("length")
        length = self.length or trained
        if not length:
            raise Refused(f"{self.checkpoint} does not say how long its sequences are: give --length")
        if data.get("kind") == "image" and length != trained:
            raise Refused(f"--length is {length}, but the images of {self.checkpoint} have {trained} sites")
        return length, trained if trained and length > trained else None

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
                raise Refused(f"--clamp {self.clamp} cannot be read as a .npy file of integers: {error}") from error
            if given.shape not in ((length,), (self.n, length)):
                raise Refused(
                    f"--clamp {self.clamp} has shape {list(given.shape)}, expected [{length}] or [{self.n}, {length}]"
                )
            clamp = given.expand(self.n, length).clone()
        if self.prompt:
            assert checkpoint.tokenizer is not None
            try:
                ids = checkpoint.tokenizer.encode(self.prompt)
            except ValueError as error:
                raise Refused(f"--prompt: {error}") from error
            if len(ids) >= length:
                raise Refused(f"--prompt has {len(ids)} tokens, but a sample has {length}: give a greater --length")
            clamp[:, : len(ids)] = torch.tensor(ids)
        return clamp

    def _options(self, checkpoint: "Checkpoint", length: int, window: int | None) -> "Options":
        """What is asked for, of all samples together, or why it cannot be done."""
        import torch

        from m2s.realizability import Projected
        from m2s.sampler.options import Options

        head = checkpoint.head
        if self.project and head.has_posterior:
            raise Refused(f"--project repairs a free score, but {self.checkpoint} predicts a posterior already")
        classes = checkpoint.config["model"].get("classes")
        if self.labels and (classes is None or not all(0 <= label < classes for label in self.labels)):
            known = "takes no labels" if classes is None else f"knows the classes 0..{classes - 1}"
            raise Refused(f"--labels are {' '.join(map(str, self.labels))}, but {self.checkpoint} {known}")
        try:
            return Options(
                head=Projected(head) if self.project else head,
                shape=(self.n, length),
                steps=self.steps,
                sampler=self.sampler,
                grid=self.grid,
                seed=self.seed,
                clamp=self._clamp(checkpoint, length),
                condition=torch.tensor([self.labels[i % len(self.labels)] for i in range(self.n)]) if self.labels else None,
                guidance=self.guidance,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                on=self.on,
                start=self.start,
                micro_batch=self.micro_batch,
                window=window,
            )
        except (ValueError, TypeError) as error:
            raise Refused(str(error)) from error

    def _settings(self, checkpoint: "Checkpoint", clamp: "Tensor | None") -> dict[str, Any]:
        """All that a sample depends on."""
        skipped = ("out", "n", "length", "prompt", "clamp", "batch_size", "device", "shard", "overwrite", "checkpoint")
        mine = {name: value for name, value in asdict(self).items() if name not in skipped}
        weights = hashlib.sha256()
        for name, tensor in checkpoint.model.state_dict().items():
            weights.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        given = None if clamp is None else hashlib.sha256(clamp.numpy().tobytes()).hexdigest()
        about = {"data": checkpoint.data, "weights": weights.hexdigest()}
        return {**mine, "labels": list(self.labels), "clamp": given, **about}

    def _draw(self, checkpoint: "Checkpoint", parts: "Parts", options: "Options", done: int, share: tuple[int, int]) -> None:
        from tqdm import tqdm

        import m2s

        missing = list(parts.missing(*share))
        if done:
            print(f"going on: {done} of {self.n} samples were drawn before")
        same = {field.name: getattr(options, field.name) for field in fields(options)}
        windows = len(list(options.windows()))
        with tqdm(total=float(sum(count for _, count in missing)), desc="sampling", unit="sample", bar_format=BAR) as bar:
            for first, count in missing:
                at = slice(first, first + count)
                mine = {name: None if same[name] is None else same[name][at] for name in ("clamp", "condition")}
                mine |= {"shape": (count, parts.length), "start": self.start + first}
                tokens = m2s.sample(checkpoint.model, callback=lambda step: _advance(bar, step, windows), **{**same, **mine})
                parts.put(first, tokens)

    def _write(self, checkpoint: "Checkpoint", tokens: "Tensor", settings: dict[str, Any], out: Path) -> None:
        import numpy as np

        from m2s.report import whole
        from m2s.report.samples import write_pictures, write_text

        data = checkpoint.data or {}
        with whole(out.with_suffix(".npz")) as temporary:
            ids, command = tokens.numpy().astype(np.int32), json.dumps(sys.argv)
            np.savez_compressed(temporary, tokens=ids, settings=json.dumps(settings), command=command)
        if out.suffix == ".png":
            write_pictures(out, tokens, tuple(data["shape"]), data["levels"])
        if out.suffix == ".txt":
            assert checkpoint.tokenizer is not None
            write_text(out, tokens, checkpoint.tokenizer, self.start)
        tokens_file = "" if out.suffix == ".npz" else f", tokens in {out.with_suffix('.npz')}"
        print(f"{self.n} samples in {out}{tokens_file}")


def _advance(bar: Any, step: "Step", windows: int) -> None:
    bar.update(min(len(step.samples) / step.steps / windows, bar.total - bar.n))


BAR = "{l_bar}{bar}| {n:.1f}/{total:.0f} [{elapsed}<{remaining}, {rate_fmt}]"
