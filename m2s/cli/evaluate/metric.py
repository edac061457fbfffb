"""`m2s evaluate NAME INPUT` for metrics that are registered in `m2s.evaluation.registry.METRICS`, also by a plugin."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from m2s.cli.help_text import help_from_source
from m2s.errors import UserError
from m2s.io import output_file, write_json


@dataclasses.dataclass(frozen=True)
@help_from_source
class MetricArgs:
    """The options that every registered metric has. `metric_command` adds those of one metric."""

    metric: ClassVar[Callable[..., Any]]
    name: ClassVar[str]
    names: ClassVar[tuple[str, ...]] = ()  # the options of the metric

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="INPUT")]
    """What is measured: an .npz of m2s sample, or the folder of a run, as the metric expects."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json; by default it is only printed."""

    def run(self) -> None:
        """Compute the metric, print it and write it to --out."""
        from m2s.provenance import command

        out = None if self.out is None else output_file(self.out, (".json",))
        metric = type(self).metric
        options = {name: getattr(self, name) for name in self.names}
        try:
            found = metric(_read(self.source, metric), **options)
        except (OSError, ValueError, TypeError, ImportError) as error:
            raise UserError(f"metric {self.name!r} failed on {self.source}: {error}") from error
        numbers = found if isinstance(found, dict) else {self.name: found}
        print("\n".join(f"{name}  {value}" for name, value in numbers.items()))
        if out is not None:
            write_json(out, {**numbers, "metric": self.name, "source": self.source, "options": options, "command": command()})
            print(f"written to {out}")


def metric_command(name: str, metric: Callable[..., Any]) -> type:
    """Return the command of a registered metric.

    Args:
        name: The name of the metric.
        metric: A function. Its first parameter is what it measures: annotated as `m2s.Checkpoint` it receives the loaded
            model, as `Path` or `str` the name of the file, and otherwise the tokens of an .npz, [N, L]. Its other parameters
            are options of the command. It returns a number, or numbers by name.

    Returns:
        A dataclass with the method `run`.
    """
    parameters = list(inspect.signature(metric, eval_str=True).parameters.values())[1:]
    options = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    fields = [
        (one.name, str if one.annotation is one.empty else one.annotation, dataclasses.field(kw_only=True))
        if one.default is one.empty
        else (one.name, str if one.annotation is one.empty else one.annotation, dataclasses.field(default=one.default))
        for one in options
    ]
    summary = inspect.getdoc(metric) or f"Compute the metric {name}."
    namespace = {
        "__doc__": f"{summary}\n\nExample: m2s evaluate {name} samples.npz --out {name}.json",
        "metric": staticmethod(metric),
        "name": name,
        "names": tuple(one.name for one in options),
    }
    return dataclasses.make_dataclass("Metric", fields, bases=(MetricArgs,), frozen=True, namespace=namespace)


def _read(source: str, metric: Callable[..., Any]) -> Any:
    """What a metric measures, in the form that its first parameter has."""
    import numpy as np
    import torch

    from m2s.cli.sampling_args import load_checkpoint
    from m2s.hub import Checkpoint

    first = next(iter(inspect.signature(metric, eval_str=True).parameters.values()))
    if first.annotation is Checkpoint:
        return load_checkpoint(source)
    if first.annotation in (str, Path):
        return first.annotation(source)
    try:
        with np.load(source, allow_pickle=False) as file:
            return torch.from_numpy(file["tokens"]).long()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{source} is no .npz with an array `tokens`, as m2s sample writes it ({error})") from error
