"""`m2s train PRESET`: train a network, or go on with one."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from m2s.cli.options import check_values, flag
from m2s.errors import UserError, suggest
from m2s.methods import METHODS
from m2s.presets import PRESETS, SUMMARIES
from m2s.training.config import Config, plain, resolve


@dataclass(frozen=True)
class Run(Config):
    settings: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[A.B=C ...]")] = ()
    """The same options in another form: steps=2000 head.offset=exact; head:posterior means head.kind=posterior."""


if TYPE_CHECKING:
    Choice = Run
else:
    Choice = tyro.extras.subcommand_type_from_defaults(
        {name: Run(**vars(preset)) for name, preset in PRESETS.items()}, SUMMARIES, prefix_names=False
    )


@dataclass(frozen=True)
class Train:
    __doc__ = f"""Train a network from a preset, every number of which can be changed; see m2s train PRESET --help.

    The run's folder is a checkpoint (m2s sample, m2s.load) with log.jsonl and the states to go on from. Interrupt it at any
    time: the same command goes on, and ends as if it had not been interrupted. Under torchrun it uses every process.

    Methods: {", ".join(METHODS)}. What each computes: docs/methods.md.

    Example: m2s train digits --method m2s --steps 1000 --out runs/digits
    """

    preset: Annotated[Choice, tyro.conf.arg(name="")]

    def run(self) -> None:
        import torch

        from m2s.training.loop import Diverged, train

        config = with_settings(self.preset)
        try:
            result = train(config)
        except torch.OutOfMemoryError:
            batch, size = config.run.batch, config.run.micro_batch or "all"
            print(
                f"m2s: the GPU's memory does not hold a call of the network on {size} of an update's {batch} samples: give "
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
        out = config.run.out
        what = "exact likelihood of" if resolve(config).head.kind == "next-token" else "bound on"
        print(f"{out}: {result.step} steps, {what} held-out data {bits:.4f} ± {spread:.4f} bits per site")


def with_settings(given: Run) -> Config:
    """`given` with its a.b=c applied, each read as the option of the same name would be."""
    config = Config(**{name: getattr(given, name) for name in vars(given) if name != "settings"})
    known = [f"{section}.{name}" for section, values in plain(config).items() if isinstance(values, dict) for name in values]
    known = [key.removeprefix("run.") for key in known] + ["method"]
    for setting in given.settings:
        key, equals, value = setting.partition("=")
        if not equals and ":" in setting:  # head:posterior is head.kind=posterior
            section, equals, value = setting.partition(":")
            key = f"{section}.kind"
        if not equals:
            raise UserError(f"{setting!r} is no setting: write key=value, such as steps=2000")
        if key not in known:
            raise UserError(f"there is no setting {key!r}: {suggest(key, known)}")
        option, values = flag(key), value.split(",")
        try:
            check_values(Config, option, values)
        except UserError as error:
            raise UserError(f"{setting!r} cannot be read: {error} (see m2s train PRESET --help)") from None
        config = tyro.cli(Config, default=config, args=[option, *values])
    return config
