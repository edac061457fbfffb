"""The options that m2s sample, m2s audit and m2s repair share, and how they become `SamplingOptions`."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from m2s import validation
from m2s.cli.errors import supports, unsupported_sampler
from m2s.cli.failures import is_out_of_memory
from m2s.cli.help_text import help_from_source
from m2s.cli.options import command_options
from m2s.devices import resolve_device
from m2s.errors import UserError, counted, print_escaped
from m2s.methods.config import AutoInt
from m2s.ops.backend import Backend

if TYPE_CHECKING:
    from m2s.hub import Checkpoint
    from m2s.samplers.base import NamedSampler
    from m2s.samplers.inference_model import InferenceModel
    from m2s.samplers.options import SamplingOptions

LARGE_CALL = 2**27  # logits of a call of the network that takes seconds on a CPU


@dataclass(frozen=True)
@help_from_source
class SamplingArgs:
    """What to draw from a checkpoint, and how."""

    sampler_options: ClassVar[tuple[str, ...]] = ()  # set by `with_sampler_options`
    least_batch: ClassVar[int] = 64
    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """The model: a folder with config.json and model.safetensors, such as that of a run; builtin:NAME, such as
    builtin:digits-sedd, for weights that ship with m2s (m2s data list names them); or a repository OWNER/NAME of the Hugging
    Face hub."""
    out: Path
    """Where to write."""
    n: int = 16
    """Number of samples."""
    steps: int = 128
    """Steps from noise to data. Each is one call of the network. The sampler autoregressive makes one per token."""
    sampler: str = "auto"
    """The rule for one step. Any model: euler, tau_leaping, forward_backward (tau-leaping with Campbell's corrector),
    predictor_corrector, informed (corrects the least likely tokens; not for masks alone); except tabulated rates: analytic
    (SEDD's release); ordered levels: ordinal_tau_leaping. With a posterior also bayes (the exact finite step), psi (bayes and
    fresh noise), entropy_bound, adaptive, and self_correcting (GIDD's; not for masks alone); with uniform noise
    absorbing_uniform; with masks ancestral, first_hitting, confidence, remasking. A next-token model: autoregressive. auto
    is bayes where the model has a posterior; for an unconstrained score analytic, or tau_leaping where rates are tabulated;
    for a next-token model autoregressive."""
    grid: str = "cosine"
    """Spacing of the times: cosine (small steps first) or linear (as in SEDD's release)."""
    seed: int = 0
    """Seed of all randomness."""
    length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens per sample; by default the length that the network was trained on. Longer text is filled in windows of that
    length."""
    batch_size: AutoInt = None
    """Samples drawn together. An interrupted run resumes after the last complete batch. auto: 64, or --micro-batch if that is
    more."""
    micro_batch: AutoInt = None
    """Samples in each call of the network. Samples depend on it: with another number the network may round differently. auto:
    8192 positions, as a power of two from 16 to 1024, so it depends on the length alone. An unfinished run resumes with its
    own number."""
    device: str = ""
    """cpu, cuda, cuda:1 or mps; by default cuda where there is a GPU, otherwise cpu."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of the network's body: auto is bf16 on a GPU, as in training, and float32 elsewhere. Logits are always
    float32."""
    compile: bool = False
    """Compile the network with torch.compile. It takes half a minute at the start: useful for many samples."""
    kernels: Backend = "auto"
    """Kernels of the last layer and the draw at a large vocabulary: fused (Triton) or reference (PyTorch). auto is fused on a
    GPU where triton is installed."""
    overwrite: bool = False
    """Replace a finished result."""

    def load(self) -> "Checkpoint":
        """Load the checkpoint onto the device.

        Returns:
            The checkpoint.

        Raises:
            UserError: An option is invalid, or the checkpoint cannot be read.
        """
        import torch

        from m2s.ops import why_unavailable

        for name in ("n", "batch_size"):
            if getattr(self, name) is not None:
                validation.positive_int(name, getattr(self, name))
        device = resolve_device(self.device)
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)  # Triton launches kernels on the current device, not on that of the tensors.
        if self.kernels == "fused" and (why := why_unavailable(torch.device(device.partition(":")[0]))):
            raise UserError(option="kernels", value="fused", reason=why)
        return load_checkpoint(self.checkpoint, device)

    def network(self, checkpoint: "Checkpoint") -> "InferenceModel":
        """Return the network in the form that samplers call.

        Args:
            checkpoint: The model, loaded by `load`.
        """
        from m2s.samplers.inference_model import InferenceModel

        return InferenceModel(checkpoint.model, checkpoint.head.process.states, self.uses_bf16(checkpoint), self.compile)

    def uses_bf16(self, checkpoint: "Checkpoint") -> bool:
        """Return whether the body of the network computes in bf16.

        Args:
            checkpoint: The model, loaded by `load`.
        """
        on_gpu = next(checkpoint.model.parameters()).is_cuda
        return self.precision == "bf16" or (self.precision == "auto" and on_gpu)

    def sample_length(self, checkpoint: "Checkpoint") -> int:
        """Return the number of tokens of a sample.

        Args:
            checkpoint: The model, loaded by `load`.

        Raises:
            UserError: It is unknown, or is not that of the model's images.
        """
        trained = trained_length(checkpoint)
        length = self.length or trained
        if not length:
            raise UserError(f"{self.checkpoint} does not say how long its sequences are: give --length")
        if (checkpoint.data or {}).get("kind") == "image" and length != trained:
            raise UserError(option="length", value=length, reason=f"the images of {self.checkpoint} have {trained} dimensions")
        return length

    def options(self, checkpoint: "Checkpoint", project: bool = False, **more: Any) -> "SamplingOptions":
        """Build the options of `m2s.sample` for all samples together. Building them checks them.

        Args:
            checkpoint: The model.
            project: Whether to project scores onto those that have a posterior.
            more: Arguments of `SamplingOptions` that only some commands have.

        Returns:
            The options, with the sampler as an object.

        Raises:
            UserError: The model cannot be sampled in this way.
        """
        from m2s.realizability import Projected
        from m2s.samplers.base import Sampler
        from m2s.samplers.options import SamplingOptions
        from m2s.samplers.registry import default_sampler, make_sampler

        head = Projected(checkpoint.head) if project else checkpoint.head
        length, trained = self.sample_length(checkpoint), trained_length(checkpoint)
        name = default_sampler(head) if self.sampler == "auto" else self.sampler
        sampler: NamedSampler | None = None
        try:
            sampler = make_sampler(name, **self._given_sampler_options())
            return SamplingOptions(
                head=head,
                shape=(self.n, length),
                steps=self.steps,
                sampler=sampler,
                grid=self.grid,
                seed=self.seed,
                window=trained if trained and length > trained else None,
                **{"micro_batch": self.micro_batch, **more},
            )
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            if isinstance(sampler, Sampler) and not supports(sampler, head):
                raise unsupported_sampler(sampler, head, self.checkpoint, self._projection()) from error
            raise UserError(str(error)) from error

    def resumed_micro_batch(self, *recorded: Mapping[str, Any] | None) -> int | None:
        """Return --micro-batch or, where it is auto, the number of an unfinished run, which must not change.

        Args:
            *recorded: The settings of unfinished runs; None where there is none.
        """
        return self.micro_batch or _recorded("micro_batch", recorded)

    def print_padding(self, options: "SamplingOptions") -> None:
        """Print a faster --micro-batch, where large calls of the network have many more rows than there are samples.

        Args:
            options: The options of all samples together.
        """
        rows = options.call_rows
        logits = rows * options.shape[1] * options.head.process.states
        if self.micro_batch is None and rows >= 4 * self.n and logits >= LARGE_CALL:
            print(
                f"each call of the network has {rows} rows for {counted(self.n, 'sample')}, so that samples do not depend on "
                f"their number: --micro-batch {self.n} takes about 1/{rows // self.n} of the time, and gives other samples"
            )

    def shard_size(self, options: "SamplingOptions", *recorded: Mapping[str, Any] | None) -> int:
        """Return --batch-size or, where it is auto, that of an unfinished run, or at least one micro-batch.

        Args:
            options: The options of all samples together.
            *recorded: The settings of unfinished runs; None where there is none.
        """
        return self.batch_size or _recorded("part", recorded) or max(self.least_batch, options.call_rows)

    def _given_sampler_options(self) -> dict[str, Any]:
        """The options of single samplers that were given."""
        values = {name: getattr(self, name) for name in self.sampler_options}
        return {name: value for name, value in values.items() if value is not None}

    def _projection(self) -> str:
        """What to type to sample from projected scores."""
        return "--project" if "--project" in command_options(type(self)) else "m2s sample --project"


def _recorded(name: str, settings: tuple[Mapping[str, Any] | None, ...]) -> int | None:
    """The first valid number of that name in the settings of unfinished runs."""
    numbers = [each.get(name) for each in settings if each is not None]
    return next((number for number in numbers if type(number) is int and number > 0), None)


def load_checkpoint(place: str, device: Any = "cpu") -> "Checkpoint":
    """Load a checkpoint.

    Where another project's checkpoint needs the merges of GPT-2's tokenizer, and they are not on this machine, they are
    downloaded as by `m2s data download gpt2`. Without a network the checkpoint has no tokenizer.

    Args:
        place: A folder, or a repository of the Hugging Face hub.
        device: Where to put the network.

    Returns:
        The checkpoint. Its weights are float32, whatever they were saved in: networks are called with times in float32.

    Raises:
        UserError: There is none, it cannot be read, or a file has another checksum than config.json says.
        MemoryError: Memory is too small, or torch's error for that.
    """
    from m2s.hub import load

    try:
        checkpoint = load(place, device, verify=True)
        checkpoint.model.float()
        return _with_merges(checkpoint)
    except UserError:
        raise
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        if is_out_of_memory(error.__cause__ or error):
            raise error.__cause__ or error from None
        raise UserError(str(error)) from error


def _with_merges(checkpoint: "Checkpoint") -> "Checkpoint":
    """The checkpoint with GPT-2's tokenizer, if it needs that and its merges can be downloaded."""
    from m2s.data.download import DOWNLOADS, download
    from m2s.data.files import BadData

    tokenizer = checkpoint.gpt2_without_merges
    if tokenizer is None or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return checkpoint
    try:
        download(DOWNLOADS["gpt2"])
    except (BadData, OSError):
        return checkpoint
    print_escaped(f"downloaded {DOWNLOADS['gpt2'].summary}, to {DOWNLOADS['gpt2'].path}")
    return replace(checkpoint, tokenizer=tokenizer)


def trained_length(checkpoint: "Checkpoint") -> int | None:
    """Return the number of tokens of the sequences that a network was trained on, None where its checkpoint does not say.

    Args:
        checkpoint: The checkpoint.
    """
    data = checkpoint.data or {}
    return math.prod(data["shape"]) if data.get("kind") == "image" else data.get("length")
