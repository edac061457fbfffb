"""`m2s train PRESET`: train a network, or resume a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from m2s.cli.failures import CommandFailure, is_out_of_memory
from m2s.errors import counted, print_escaped
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

    Example: m2s train digits --method m2s-offset --steps 1000 --out runs/digits
    """

    preset: Annotated[Choice, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Train, and print the NELBO on held-out data.

        Raises:
            CommandFailure: The run diverged, or the memory is too small.
        """
        from m2s.data import image_sets
        from m2s.training.loop import Diverged, train  # imports torch.distributed, which takes time

        config = self.preset
        try:
            result = train(config)
        except Diverged as error:
            raise CommandFailure(str(error), resumes=False) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            batch, size = config.run.batch, config.run.micro_batch or "all"
            raise CommandFailure(
                f"the memory is too small for a call of the network on {size} of a step's {batch} examples: give "
                "--micro-batch, a number that divides them, or --recompute"
            ) from error
        if not result.first:
            return
        bits, spread = (result.validation[f"validation_{name}"] for name in ("bits", "error"))
        what = "exact NLL of" if resolve(config).head.kind == "next-token" else "upper bound on the NLL of"
        unit = "dimension" if config.data.name in image_sets() else "token" if config.data.name == "text" else "position"
        steps = counted(result.step, "step")
        print_escaped(f"{config.run.out}: {steps}, {what} held-out data {bits:.4f} ± {spread:.4f} bits per {unit}")
