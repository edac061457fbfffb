"""`m2s evaluate NAME [SAMPLES]` for metrics that are registered in `m2s.evaluation.registry.METRICS`, also by a plugin."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from m2s.cli.help_text import help_from_source
from m2s.cli.options import flag
from m2s.errors import UserError, print_escaped
from m2s.io import output_file, require_absent, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.evaluation.bpd import EvaluationSet
    from m2s.hub import Checkpoint

INPUTS = ("samples", "reference", "checkpoint")  # parameters of every metric that are not options of its own


@dataclasses.dataclass(frozen=True)
@help_from_source
class MetricArgs:
    """The options that every registered metric has. `metric_command` adds those of one metric."""

    metric: ClassVar[Callable[..., dict[str, Any]]]
    name: ClassVar[str]
    option_names: ClassVar[tuple[str, ...]] = ()
    input_names: ClassVar[tuple[str, ...]] = INPUTS

    samples: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[SAMPLES]")] = ""
    """The samples: an .npz that m2s sample wrote. A metric of a model needs none."""
    checkpoint: Annotated[str, tyro.conf.arg(metavar="CHECKPOINT")] = ""
    """The model, for metrics that need it: the folder of a run, built-in weights (builtin:NAME), or a repository of the Hugging
    Face hub."""
    reference: Annotated[str, tyro.conf.arg(metavar="NAME:SPLIT|FILE|TEXT")] = ""
    """Held-out data to compare with: a split of a data set such as mnist:test, an .npz with tokens, or, with --checkpoint, any
    text that m2s evaluate bpd --data accepts."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json; by default it is only printed."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        """Compute the metric, print it and write it to --out.

        Raises:
            UserError: The metric does not use an option that is given, or it fails.
        """
        from m2s.cli.sampling_args import load_checkpoint
        from m2s.provenance import command, is_rerun

        if self.out is not None:
            require_absent([self.out], self.overwrite or is_rerun(self.out))
        out = None if self.out is None else output_file(self.out, (".json",))
        samples = read_tokens(Path(self.samples)) if self.samples else None
        checkpoint = load_checkpoint(self.checkpoint) if self.checkpoint else None
        reference = self._reference(checkpoint)
        options = {name: getattr(self, name) for name in self.option_names}
        given = {name: value for name, value in (("reference", reference), ("checkpoint", checkpoint)) if value is not None}
        for name in given:
            if name not in self.input_names:
                raise UserError(f"--{name} is given, but the metric {self.name} does not use it: leave it out")
        try:
            found = type(self).metric(samples, **given, **options)
        except UserError:
            raise
        except (OSError, ValueError, TypeError, ImportError) as error:
            raise UserError(f"the metric {self.name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"the metric {self.name} returned a {type(found).__name__}, but it must return a dict of values")
        print_escaped("\n".join(format_numbers(found)))
        if out is not None:
            inputs = {name: getattr(self, name) or None for name in INPUTS}
            write_json(out, {"metric": self.name, **found, "inputs": inputs, "options": options, "command": command()})
            print_escaped(f"written to {out}")

    def _reference(self, checkpoint: "Checkpoint | None") -> "EvaluationSet | None":
        """The data of --reference."""
        from m2s.cli.evaluate.held_out import HeldOutSource
        from m2s.cli.evaluate.images import is_split, load_split

        if not self.reference:
            return None
        if is_split(self.reference):
            return load_split(self.reference).tokens
        if Path(self.reference).suffix == ".npz":
            return read_tokens(Path(self.reference))
        if checkpoint is None:
            raise UserError(
                f"--reference is {self.reference!r}, which is no split such as mnist:test and no .npz: give --checkpoint too, "
                "whose tokenizer reads the text"
            )
        return HeldOutSource(self.checkpoint, checkpoint, self.reference, "").load().rows


def metric_command(name: str, metric: Callable[..., dict[str, Any]]) -> type:
    """Return the command of a registered metric.

    Args:
        name: The name of the metric.
        metric: A function `metric(samples, reference=None, checkpoint=None, ...)`. It may leave out `reference` and
            `checkpoint`. Its other named parameters become options of the command. An option without an annotation is a text.

    Returns:
        A dataclass with the method `run`.

    Raises:
        UserError: A parameter of the metric has the name of an option that every metric has.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(metric, eval_str=True).parameters.values()
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    options = [one for one in parameters if one.kind in kinds and one.name not in INPUTS]
    for one in options:
        if one.name in {field.name for field in dataclasses.fields(MetricArgs)}:
            raise UserError(f"the metric {name} has a parameter {one.name!r}, but every metric has an option {flag(one.name)}")
    fields = [
        (
            one.name,
            str if one.annotation is one.empty else one.annotation,
            dataclasses.field(kw_only=True, default=dataclasses.MISSING if one.default is one.empty else one.default),
        )
        for one in options
    ]
    summary, _, rest = (inspect.getdoc(metric) or f"Compute the metric {name}.").partition("\n\n")
    namespace = {
        # The example comes before the section Args:, from which tyro takes the help texts of the options.
        "__doc__": f"{summary}\n\nExample: m2s evaluate {name} samples.npz\n\n{rest}",
        "metric": staticmethod(metric),
        "name": name,
        "option_names": tuple(one.name for one in options),
        "input_names": INPUTS if takes_all else tuple(one.name for one in parameters if one.name in INPUTS),
    }
    return dataclasses.make_dataclass("Metric", fields, bases=(MetricArgs,), frozen=True, namespace=namespace)


def read_tokens(path: Path) -> "Tensor":
    """Read the tokens of an .npz.

    Args:
        path: A file of m2s sample, or any .npz with an array of integers `tokens`.

    Returns:
        The tokens, int64 [N, L].

    Raises:
        UserError: The file does not exist or has no such array.
    """
    import numpy as np
    import torch

    from m2s.npz import read_npz

    try:
        tokens = read_npz(path, ["tokens"])["tokens"]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is no .npz with an array `tokens`, as m2s sample writes it ({error})") from error
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or not tokens.size or (tokens < 0).any():
        raise UserError(f"{path} holds {tokens.dtype} {list(tokens.shape)}, expected tokens from 0 on, integers [N, L]")
    return torch.from_numpy(tokens.astype(np.int64))


def format_numbers(found: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the lines that show a result.

    Args:
        found: Values by name, nested where needed. {"value": ..., "error": ...} is a value with its standard error.
        prefix: What precedes every name.

    Yields:
        One line for each value.
    """
    for name, value in found.items():
        if isinstance(value, dict) and "value" in value:
            error = value.get("error")
            yield f"{prefix}{name}  {value['value']:.6g}" + ("" if error is None else f" ± {error:.2g}")
        elif isinstance(value, dict):
            yield from format_numbers(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}  {value}"
