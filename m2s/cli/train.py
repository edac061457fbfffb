"""`m2s train PRESET`: train a network, or resume a run."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from m2s.methods import METHODS
from m2s.presets import PRESETS, SUMMARIES
from m2s.training.config import Config, resolve

if TYPE_CHECKING:
    Choice = Config
else:
    Choice = tyro.extras.subcommand_type_from_defaults(PRESETS, SUMMARIES, prefix_names=False)


@dataclass(frozen=True)
class Train:
    __doc__ = f"""Train a network from a preset. Every value of the preset is an option: see m2s train PRESET --help.

    The run's folder is a checkpoint (m2s sample, m2s.load) with log.jsonl and the states from which the run resumes. Interrupt
    it at any time: the same command resumes the run, and the result is the same as without the interruption. Under torchrun it
    uses every process.

    Methods: {", ".join(METHODS)}. What each computes: docs/methods.md.

    Example: m2s train digits --method m2s --steps 1000 --out runs/digits
    """

    preset: Annotated[Choice, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Train, and print the NELBO on held-out data."""
        import torch

        from m2s.training.loop import Diverged, train  # imports torch.distributed, which takes time

        config = self.preset
        try:
            result = train(config)
        except torch.OutOfMemoryError:
            batch, size = config.run.batch, config.run.micro_batch or "all"
            print(
                f"m2s: the GPU's memory is too small for a call of the network on {size} of a step's {batch} examples: give "
                "--micro-batch, a number that divides them, or --recompute",
                file=sys.stderr,
            )
            raise SystemExit(1) from None
        except (Diverged, OSError) as error:  # a full disk is an OSError
            print(f"m2s: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        if not result.first:
            return
        bits, spread = (result.validation[f"validation_{name}"] for name in ("bits", "error"))
        what = "exact NLL of" if resolve(config).head.kind == "next-token" else "upper bound on the NLL of"
        print(f"{config.run.out}: {result.step} steps, {what} held-out data {bits:.4f} ± {spread:.4f} bits per position")
