"""`m2s evaluate NAME INPUT` for metrics that are registered in `m2s.evaluation.METRICS`, also by a plugin."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import docstring_parser
import tyro

from m2s.cli.evaluate.bpd import finite
from m2s.cli.help_text import help_from_source
from m2s.errors import UserError
from m2s.io import output_file, write_json

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE, CHECKPOINT = "reference", "checkpoint"  # parameters of a metric that are inputs, not options


@dataclasses.dataclass(frozen=True)
@help_from_source
class MetricArgs:
    """The options that every registered metric has. `metric_command` adds those of one metric."""

    metric: ClassVar[Callable[..., Any]]
    name: ClassVar[str]
    names: ClassVar[tuple[str, ...]] = ()  # the parameters of the metric after the first one

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="INPUT")]
    """What is measured: samples, an .npz of m2s sample; or a model, the folder of a run."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json; by default it is only printed."""

    def run(self) -> None:
        """Compute the metric, print it and write it to --out."""
        from m2s.provenance import command

        out = None if self.out is None else output_file(self.out, (".json",))
        given = {name: getattr(self, name) for name in self.names}
        samples, inputs = self._read(given)
        try:
            found = type(self).metric(samples, **given | inputs)
        except UserError:
            raise
        except (OSError, ValueError, TypeError, ImportError) as error:
            raise UserError(f"metric {self.name!r} failed on {self.source}: {error}") from error
        numbers = finite(found if isinstance(found, dict) else {self.name: found})
        print("\n".join(_lines(numbers)))
        if out is not None:
            write_json(out, {**numbers, "metric": self.name, "source": self.source, "options": given, "command": command()})
            print(f"written to {out}")

    def _read(self, given: dict[str, Any]) -> "tuple[Tensor | None, dict[str, Any]]":
        """The samples, None where INPUT is a model, and the inputs that the metric has parameters for."""
        from m2s.cli.sampling_args import load_checkpoint

        is_model = Path(self.source).suffix != ".npz" and CHECKPOINT in self.names
        place = self.source if is_model else given.get(CHECKPOINT)
        inputs: dict[str, Any] = {}
        if place is not None:
            inputs[CHECKPOINT] = load_checkpoint(place)
        if given.get(REFERENCE) is not None:
            inputs[REFERENCE] = _read_reference(given[REFERENCE])
        return None if is_model else _read_tokens(self.source), inputs


def metric_command(name: str, metric: Callable[..., Any]) -> type:
    """Return the command of a registered metric.

    Args:
        name: The name of the metric.
        metric: A function as `m2s.evaluation.Metric` describes it. Its first parameter receives the samples. It may leave out
            `reference` and `checkpoint`. Its other parameters are options of the command. It returns a number, or numbers by
            name.

    Returns:
        A dataclass with the method `run`.
    """
    parameters = list(inspect.signature(metric, eval_str=True).parameters.values())[1:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    summary = inspect.getdoc(metric) or f"Compute the metric {name}."
    texts = {each.arg_name: each.description for each in docstring_parser.parse(summary).params}
    namespace = {
        "__doc__": f"{summary}\n\nExample: m2s evaluate {name} samples.npz --out {name}.json",
        "metric": staticmethod(metric),
        "name": name,
        "names": tuple(one.name for one in named),
    }
    fields = [_field(one, texts.get(one.name) or "") for one in named]
    return dataclasses.make_dataclass("Metric", fields, bases=(MetricArgs,), frozen=True, namespace=namespace)


def _field(parameter: inspect.Parameter, text: str) -> tuple[str, Any, Any]:
    """The field of a command for a parameter of a metric, with its help text."""
    if parameter.name == REFERENCE:
        text = "Real data to compare with: an .npz of tokens, or a split of a data set such as mnist:test."
        kind: Any = Annotated[str | None, tyro.conf.arg(metavar="NPZ|SPLIT", help=text)]
        return REFERENCE, kind, dataclasses.field(default=None)
    if parameter.name == CHECKPOINT:
        text = "The model that drew the samples, for a metric that needs both."
        return CHECKPOINT, Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help=text)], dataclasses.field(default=None)
    kind = str if parameter.annotation is parameter.empty else parameter.annotation
    if text:
        kind = Annotated[kind, tyro.conf.arg(help=" ".join(text.split()))]
    if parameter.default is parameter.empty:
        return parameter.name, kind, dataclasses.field(kw_only=True)
    return parameter.name, kind, dataclasses.field(default=parameter.default)


def _read_tokens(source: str) -> "Tensor":
    """The tokens of an .npz, [N, L]."""
    import numpy as np
    import torch

    try:
        with np.load(source, allow_pickle=False) as file:
            return torch.from_numpy(file["tokens"]).long()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{source} is no .npz with an array `tokens`, as m2s sample writes it ({error})") from error


def _read_reference(name: str) -> "Tensor":
    """The tokens of a split of a data set or of an .npz, [N, L]."""
    from m2s.cli.evaluate.images import is_split, load_split

    return load_split(name).tokens.long() if is_split(name) else _read_tokens(name)


def _lines(numbers: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """One line for each number, with its standard error where there is one."""
    for name, value in numbers.items():
        if isinstance(value, dict) and set(value) == {"value", "error"}:
            error = "" if value["error"] is None else f" ± {value['error']:.4g}"
            yield f"{prefix}{name}  {value['value']}{error}"
        elif isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}  {value}"
