"""`m2s evaluate bpd | fid | genppl | lm-eval | text | zero-shot`: measure a model or its samples.

One file and one line per metric.
"""

from dataclasses import dataclass, make_dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro

from m2s.cli.evaluate.bpd import Bpd
from m2s.cli.evaluate.fid import Fid
from m2s.cli.evaluate.genppl import GenPPL
from m2s.cli.evaluate.lm_eval import LmEval
from m2s.cli.evaluate.metric import metric_command
from m2s.cli.evaluate.text import Text
from m2s.cli.evaluate.zero_shot import ZeroShot

BUILT_IN: dict[str, Any] = {
    "bpd": Bpd,
    "fid": Fid,
    "genppl": GenPPL,
    "lm-eval": LmEval,
    "text": Text,
    "zero-shot": ZeroShot,
}


@tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
@dataclass(frozen=True)
class Evaluate:
    """Measure a model on held-out data (bpd, zero-shot, lm-eval), or its samples: images (fid) or text (genppl,
    text).

    Every metric prints its standard errors. With --out result.json it also writes everything that the result depends on. A
    --plugin can register more metrics.

    Example: m2s evaluate bpd runs/digits
    """

    measure: (
        Annotated[Bpd, tyro.conf.subcommand("bpd")]
        | Annotated[Fid, tyro.conf.subcommand("fid")]
        | Annotated[GenPPL, tyro.conf.subcommand("genppl")]
        | Annotated[LmEval, tyro.conf.subcommand("lm-eval")]
        | Annotated[Text, tyro.conf.subcommand("text")]
        | Annotated[ZeroShot, tyro.conf.subcommand("zero-shot")]
    )
    """The metric."""

    def run(self) -> None:
        """Compute the metric."""
        self.measure.run()


def with_metrics(command: type) -> type:
    """Return `m2s evaluate` with one more subcommand for every registered metric.

    Args:
        command: The dataclass `Evaluate`.

    Returns:
        A subclass of it, or itself where no metric is registered that it does not have.
    """
    registered = {name: metric for name, metric in _registered().items() if name not in BUILT_IN}
    if not registered:
        return command
    choices = BUILT_IN | {name: metric_command(name, metric) for name, metric in registered.items()}
    annotations = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in choices.items()]
    namespace = {"__doc__": command.__doc__}
    extended = make_dataclass(
        command.__name__, [("measure", reduce(or_, annotations))], bases=(command,), frozen=True, namespace=namespace
    )
    return tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)(extended)


def _registered() -> dict[str, Any]:
    """The metrics in the registry of m2s.evaluation."""
    from m2s.evaluation.registry import METRICS  # heavy: it imports the model hub

    return dict(METRICS)
