"""Compute metrics of several texts. Everything that was computed before is read from files."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from m2s.data.files import root
from m2s.errors import UserError, print_escaped
from m2s.evaluation.genppl import Samples, Scores
from m2s.evaluation.judge import Judge
from m2s.evaluation.text.judged import FOLDER, content_hash, judged_scores
from m2s.evaluation.text.metric import MeasuredText, TextContext, TextMetric
from m2s.evaluation.text.store import ResultStore
from m2s.io import output_folder
from m2s.progress import Progress
from m2s.provenance import fingerprint


class JudgeReader:
    """Lets a judge read each text once. Scores and embeddings are stored in files.

    They are in the folder `judged` beside samples. Those of held-out text are in $M2S_DATA/judged.

    Args:
        judge: The judge.
        batch_size: Sequences that the judge reads at once.
    """

    def __init__(self, judge: Judge, batch_size: int) -> None:
        self.judge, self.batch_size = judge, batch_size
        self.described = {**judge.describe(), "weights": fingerprint(judge.model)}
        self._known: dict[Path, Scores] = {}

    @property
    def name(self) -> str:
        """The name of the judge."""
        return str(self.described["name"])

    def forget(self, text: Samples) -> None:
        """Free the memory of the scores of a text.

        Args:
            text: The text.
        """
        self._known.pop(text.path, None)

    def read(self, text: Samples) -> Scores:
        """Return the scores and embeddings of a text.

        Args:
            text: The text.

        Raises:
            UserError: The judge cannot read it.
        """
        if text.path not in self._known:
            path = self._path(text)
            self._known[text.path] = judged_scores(text, self.judge, self.described["weights"], path, self.batch_size)
        return self._known[text.path]

    def _path(self, text: Samples) -> Path | None:
        """Where the scores of a text are stored; None where nothing can be written."""
        judge = Path(self.judge.name).name
        if text.path.is_file():
            path = text.path.parent / FOLDER / f"{text.path.stem}-{judge}.safetensors"
        else:
            size = "x".join(map(str, () if text.tokens is None else text.tokens.shape))
            path = root() / FOLDER / f"{text.path.parent.name}-{text.path.name}-{size}-{judge}.safetensors"
        try:
            output_folder(path.parent)
        except UserError as error:
            print_escaped(f"the judge's scores of {text.path} are not stored: {error}", file=sys.stderr)
            return None
        return path


def measure_texts(
    texts: Sequence[Samples],
    metrics: Mapping[str, TextMetric],
    context: TextContext,
    store: ResultStore,
    reader: JudgeReader | None = None,
) -> list[dict[str, dict[str, Any]]]:
    """Compute metrics of several texts.

    Args:
        texts: The texts.
        metrics: The metrics by name. They need a judge only where `reader` is given.
        context: What they are compared with.
        store: Has the results of earlier calls, and receives new ones.
        reader: The judge.

    Returns:
        For each text what each metric returned, by its name.

    Raises:
        UserError: A metric or the judge cannot measure a text.
    """
    reference = context.reference.samples
    judge = None if reader is None else [reader.described, reader.judge.device.type, reference.protocol.name]
    shared = {"reference": content_hash(reference), "judge": judge, "options": [context.resamples, context.seed]}
    found = []
    with Progress(len(texts), "measuring" if reader is None else f"measuring by {Path(reader.name).name}", "file") as progress:
        for text in progress.over(texts):
            content = content_hash(text)
            results = {}
            for name, metric in metrics.items():
                needed = context.training if "training text" in metric.needs else None
                training = None if needed is None else needed.fingerprint
                depends = {"metric": [name, metric.version], "text": content, "training": training, **shared}

                def compute(metric: TextMetric = metric, text: Samples = text) -> Mapping[str, Any]:
                    return _measure(metric, text, context, reader)

                results[name] = store.find_or_compute(depends, compute)
            if reader is not None:
                reader.forget(text)
            found.append(results)
    return found


def _measure(metric: TextMetric, text: Samples, context: TextContext, reader: JudgeReader | None) -> Mapping[str, Any]:
    """Compute one metric of one text."""
    if reader is None:
        measured = MeasuredText(text)
    else:
        reference = context.reference.samples
        context = replace(context, reference=MeasuredText(reference, reader.read(reference)))
        measured = MeasuredText(text, reader.read(text))
    try:
        return metric.measure(measured, context)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{text.path} cannot be measured: {error}") from error
