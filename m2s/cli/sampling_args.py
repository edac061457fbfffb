"""What m2s sample, m2s audit and m2s repair share: the options of a drawing, and what lies between them and a sampler."""

import hashlib
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m2s.cli.errors import typed
from m2s.devices import resolve_device
from m2s.errors import UserError
from m2s.io import atomic_write
from m2s.ops.backend import Backend
from m2s.training.config import Count, Number

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.hub import Checkpoint
    from m2s.samplers import StepEvent
    from m2s.samplers.inference_model import InferenceModel
    from m2s.samplers.options import SamplingOptions

BAR = "{l_bar}{bar}| {n:.1f}/{total:.0f} [{elapsed}<{remaining}, {rate_fmt}]"
# What of the options a sample depends on, beside the network, the clamp, the labels and projection.
SETTINGS = ("steps", "grid", "seed", "start", "guidance", "guide", "temperature", "top_p", "top_k", "on", "micro_batch")
ELSEWHERE = "give another --out, or --overwrite to replace it"
NUMBERS = ("corrections", "sites", "leap", "entry")  # options of some samplers, on which their samples depend too


@dataclass(frozen=True)
class SamplingArgs:
    """What is drawn from a checkpoint."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A folder with config.json and model.safetensors, or a repository owner/name of the Hugging Face hub."""
    out: Path
    """Where to write."""
    n: int = 16
    """How many samples."""
    steps: int = 128
    """Steps from noise to data; each is one call of the network. autoregressive: a call for each token, whatever is given."""
    sampler: str = "auto"
    """How to take a step: euler, analytic (SEDD's release), tau_leaping, forward_backward (the same with Campbell's corrector),
    predictor_corrector; for levels ordinal_tau_leaping; with a posterior also bayes (the exact finite step), adaptive and, but
    for masks alone, self_correcting (GIDD's), with masks besides ancestral, first_hitting, confidence, remasking; for a
    next-token model autoregressive.
    auto: bayes where there is a posterior; for a free score analytic, or tau_leaping where rates are tabulated; for a
    next-token model autoregressive."""
    corrections: Count = None
    """forward_backward, predictor_corrector: calls of the corrector after a step, by default 10 and 1; self_correcting: after
    the last step, by default 128."""
    sites: Count = None
    """predictor_corrector, self_correcting: sites that a call of the corrector may change, by default 1; adaptive: those of a
    step, by default as many as fill all in the steps there are."""
    leap: Number = None
    """forward_backward: how long a leap of the corrector is, in units of time; by default 0.003."""
    entry: Number = None
    """forward_backward: the time from which on there are any; by default 0.1."""
    grid: str = "cosine"
    """Where the times lie: cosine (small steps first) or linear (as in SEDD's release)."""
    seed: int = 0
    """Of all randomness."""
    length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens of each sample; by default what the network was trained on. Longer text is filled in windows of that length."""
    batch_size: int = 64
    """Samples drawn together, and kept together if the run is interrupted."""
    device: str = ""
    """cpu, cuda, mps; by default cuda where there is a GPU, else cpu."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the network's body: auto is bf16 on a GPU, as in training, and float32 elsewhere. Logits are float32 in any case."""
    compile: bool = False
    """Compile the network (torch.compile): half a minute at the start, for many samples."""
    kernels: Backend = "auto"
    """Of last layer and draw at a large vocabulary: fused (Triton) or the reference; auto is fused on a GPU with triton."""
    overwrite: bool = False
    """Replace a finished result."""

    def load(self) -> "Checkpoint":
        """The checkpoint, on the device."""
        import torch

        from m2s.hub import load
        from m2s.ops import why_unavailable

        if self.n < 1 or self.batch_size < 1:
            raise UserError(f"--n is {self.n} and --batch-size is {self.batch_size}, but both must be at least 1")
        device = resolve_device(self.device)
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)  # kernels are started on the device that is set, whatever the tensors'
        if self.kernels == "fused" and (why := why_unavailable(torch.device(device.partition(":")[0]))):
            raise UserError(f"--kernels is fused, but {why}")
        try:
            return load(self.checkpoint, device)
        except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
            raise UserError(str(error)) from error

    def network(self, checkpoint: "Checkpoint") -> "InferenceModel":
        """The network as the samplers call it."""
        from m2s.samplers.inference_model import InferenceModel

        return InferenceModel(checkpoint.model, checkpoint.head.process.states, self.bf16(checkpoint), self.compile)

    def bf16(self, checkpoint: "Checkpoint") -> bool:
        on_gpu = next(checkpoint.model.parameters()).is_cuda
        return self.precision == "bf16" or (self.precision == "auto" and on_gpu)

    def arithmetic(self, checkpoint: "Checkpoint") -> dict[str, Any]:
        """What decides the last digits of a network's answers, and so now and then a token."""
        return {"bf16": self.bf16(checkpoint), "compile": self.compile, "kernels": self.kernels}

    def tokens(self, checkpoint: "Checkpoint") -> int:
        """The tokens of a sample."""
        trained = trained_length(checkpoint)
        length = self.length or trained
        if not length:
            raise UserError(f"{self.checkpoint} does not say how long its sequences are: give --length")
        if (checkpoint.data or {}).get("kind") == "image" and length != trained:
            raise UserError(f"--length is {length}, but the images of {self.checkpoint} have {trained} sites")
        return length

    def options(self, checkpoint: "Checkpoint", project: bool = False, **more: Any) -> "SamplingOptions":
        """What is asked for, of all samples together, or why it cannot be done."""
        from m2s.realizability import Projected
        from m2s.samplers.options import SamplingOptions
        from m2s.samplers.registry import default_sampler, make_sampler

        head = Projected(checkpoint.head) if project else checkpoint.head
        length, trained = self.tokens(checkpoint), trained_length(checkpoint)
        sampler = default_sampler(head) if self.sampler == "auto" else self.sampler
        numbers = {name: getattr(self, name) for name in NUMBERS if getattr(self, name) is not None}
        try:
            return SamplingOptions(
                head=head,
                shape=(self.n, length),
                steps=self.steps,
                sampler=make_sampler(sampler, **numbers),
                grid=self.grid,
                seed=self.seed,
                window=trained if trained and length > trained else None,
                **more,
            )
        except (ValueError, TypeError) as error:
            raise UserError(self.typed(error)) from error

    def typed(self, error: Exception) -> str:
        """What the library says, in the words of this command."""
        return typed(str(error), {field.name for field in fields(self)})


def trained_length(checkpoint: "Checkpoint") -> int | None:
    data = checkpoint.data or {}
    return math.prod(data["shape"]) if data.get("kind") == "image" else data.get("length")


def settings(
    drawing: SamplingArgs, checkpoint: "Checkpoint", options: "SamplingOptions", labels: tuple[int, ...] = ()
) -> dict[str, Any]:
    """All that a sample depends on."""
    from m2s.provenance import fingerprint
    from m2s.realizability import Projected

    clamp, sampler = options.clamp, options.chosen
    return {
        **{name: getattr(options, name) for name in SETTINGS},
        "sampler": sampler.name,
        **{name: getattr(sampler, name) for name in NUMBERS if hasattr(sampler, name)},
        "project": isinstance(options.head, Projected),
        "labels": list(labels),
        "clamp": None if clamp is None else hashlib.sha256(clamp.numpy().tobytes()).hexdigest(),
        "data": checkpoint.data,
        **drawing.arithmetic(checkpoint),
        "weights": fingerprint(checkpoint.model),
    }


def write_samples(out: Path, tokens: "Tensor", checkpoint: "Checkpoint", settings: dict[str, Any]) -> None:
    """The tokens as .npz and, as `out` ends, a picture grid or text beside them."""
    import numpy as np

    from m2s.provenance import command

    with atomic_write(out.with_suffix(".npz")) as temporary:
        ids, typed = tokens.numpy().astype(np.int32), json.dumps(command())
        np.savez_compressed(temporary, tokens=ids, settings=json.dumps(settings), command=typed)
    write_beside(out, tokens, checkpoint, settings)


def write_beside(out: Path, tokens: "Tensor", checkpoint: "Checkpoint", settings: dict[str, Any]) -> None:
    """What `out` is, beside the tokens' .npz."""
    from m2s.report.samples import write_pictures, write_text

    data = checkpoint.data or {}
    if out.suffix == ".png":
        write_pictures(out, tokens, tuple(data["shape"]), data["levels"])
    if out.suffix == ".txt":
        assert checkpoint.tokenizer is not None
        write_text(out, tokens, checkpoint.tokenizer, settings["start"])
    beside = "" if out.suffix == ".npz" else f", tokens in {out.with_suffix('.npz')}"
    print(f"{len(tokens)} samples in {out}{beside}")


def drawn(path: Path, settings: dict[str, Any]) -> "Tensor":
    """The tokens of a whole .npz of these settings: what `write_samples` left that did not come to the file beside it."""
    import zipfile
    import zlib

    import numpy as np
    import torch

    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, there = torch.from_numpy(file["tokens"]).long(), dict(json.loads(str(file["settings"])))
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is there already, and is no whole file of samples: {ELSEWHERE}") from error
    here = json.loads(json.dumps(settings))
    other = sorted(name for name in {**there, **here} if there.get(name) != here.get(name))
    if other:
        raise UserError(f"{path} is there already, drawn with other settings ({', '.join(other)}): {ELSEWHERE}")
    return tokens


def advance(bar: Any, step: "StepEvent", windows: int) -> None:
    """Move a bar over samples by one step of some of them."""
    bar.update(min(len(step.samples) / step.steps / windows, bar.total - bar.n))
