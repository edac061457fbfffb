"""Files of samples: the settings that samples depend on, the tokens as .npz, and a picture or text beside them."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2s.cli.sampling_args import SamplingArgs
from m2s.errors import UserError, print_escaped
from m2s.io import atomic_write

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm.auto import tqdm

    from m2s.hub import Checkpoint
    from m2s.samplers import StepEvent
    from m2s.samplers.options import SamplingOptions

# Fields of SamplingOptions on which a sample depends, besides the head, the sampler, clamped tokens and labels.
FIELDS = ("steps", "grid", "seed", "start", "guidance", "guide", "temperature", "top_p", "top_k", "on")
BAR = "{l_bar}{bar}| {n:.1f}/{total:.0f} [{elapsed}<{remaining}, {rate_fmt}]"
REPLACE = "give another --out, or --overwrite to replace it"


def settings(
    arguments: SamplingArgs, checkpoint: "Checkpoint", options: "SamplingOptions", labels: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return everything that samples depend on. A run resumes only with the same settings.

    Args:
        arguments: The options of the command.
        checkpoint: The model.
        options: The options of the sampler.
        labels: The classes that are drawn.

    Returns:
        The settings, as JSON can hold them.
    """
    from m2s.provenance import fingerprint
    from m2s.realizability import Projected

    clamp, sampler = options.clamp, options.sampler_object
    return {
        **{name: getattr(options, name) for name in FIELDS},
        "micro_batch": options.call_rows,
        "sampler": sampler.name,
        **{name: getattr(sampler, name) for name in arguments.sampler_options if hasattr(sampler, name)},
        "project": isinstance(options.head, Projected),
        "labels": list(labels),
        "clamp": None if clamp is None else hashlib.sha256(clamp.numpy().tobytes()).hexdigest(),
        "data": checkpoint.data,
        # Precision and kernels change the last digits of the network's output, and so a token now and then.
        "bf16": arguments.uses_bf16(checkpoint),
        "compile": arguments.compile,
        "kernels": arguments.kernels,
        "weights": fingerprint(checkpoint.model),
    }


def write_samples(out: Path, tokens: "Tensor", checkpoint: "Checkpoint", settings: dict[str, Any]) -> None:
    """Write tokens as .npz and, depending on the suffix of `out`, a grid of pictures or text beside them.

    Args:
        out: The file that was asked for: .npz, .png or .txt.
        tokens: The samples, [N, L].
        checkpoint: The model that they were drawn from.
        settings: What they depend on.
    """
    import numpy as np

    from m2s.provenance import command

    with atomic_write(out.with_suffix(".npz")) as temporary:
        ids = tokens.numpy().astype(np.int32)
        np.savez_compressed(temporary, tokens=ids, settings=json.dumps(settings), command=json.dumps(command()))
    write_picture_or_text(out, tokens, checkpoint, settings)


def write_picture_or_text(out: Path, tokens: "Tensor", checkpoint: "Checkpoint", settings: dict[str, Any]) -> None:
    """Write the picture (.png) or text (.txt) of samples whose tokens are in the .npz beside it, and print where they are.

    Args:
        out: The file that was asked for. For .npz there is nothing to write.
        tokens: The samples, [N, L].
        checkpoint: The model that they were drawn from.
        settings: What they depend on.
    """
    from m2s.report.samples import write_pictures, write_text

    data = checkpoint.data or {}
    if out.suffix == ".png":
        write_pictures(out, tokens, tuple(data["shape"]), data["levels"])
    if out.suffix == ".txt":
        assert checkpoint.tokenizer is not None
        write_text(out, tokens, checkpoint.tokenizer, settings["start"])
    beside = "" if out.suffix == ".npz" else f", tokens in {out.with_suffix('.npz')}"
    print_escaped(f"{len(tokens)} samples in {out}{beside}")


def read_finished(path: Path, settings: dict[str, Any]) -> "Tensor":
    """Read the tokens of a finished run, whose picture or text is missing.

    Args:
        path: The .npz of the tokens.
        settings: The settings that the tokens must have been drawn with.

    Returns:
        The tokens, [N, L].

    Raises:
        UserError: The file is not a complete file of samples, or has other settings.
    """
    import torch

    from m2s.npz import read_npz

    try:
        found = read_npz(path, ["tokens", "settings"])
        tokens, recorded = torch.from_numpy(found["tokens"]).long(), dict(json.loads(str(found["settings"])))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is there already, and is not a complete file of samples: {REPLACE}") from error
    given = json.loads(json.dumps(settings))
    different = sorted(name for name in {**recorded, **given} if recorded.get(name) != given.get(name))
    if different:
        raise UserError(f"{path} is there already, drawn with other settings ({', '.join(different)}): {REPLACE}")
    return tokens


def advance(bar: "tqdm[Any]", step: "StepEvent", windows: int) -> None:
    """Move a progress bar that counts samples by one step of some of them.

    Args:
        bar: The progress bar.
        step: The step that was taken.
        windows: How many windows a sample is filled in.
    """
    bar.update(min(len(step.samples) / step.steps / windows, bar.total - bar.n))
