"""`m2s evaluate zero-shot CHECKPOINT --task wikitext2`: perplexity of a text that a model was not trained on."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m2s.cli.evaluate.bpd import finite, load_described
from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, print_escaped
from m2s.io import output_file, read_json, require_absent, write_json
from m2s.progress import Progress

if TYPE_CHECKING:
    from m2s.evaluation.zero_shot import Windows
    from m2s.hub import Checkpoint

GROUP = 8  # batches between two saved states


@dataclass(frozen=True)
@help_from_source
class ZeroShot:
    """Estimate the zero-shot perplexity of a model of text on the data sets of the field.

    Tasks: ptb, wikitext2, wikitext103, lm1b, lambada, ag_news, arxiv, pubmed. Each has a detokenizer, which turns the tokenized
    text of the data set into running text, and a rule for windows. Published numbers differ by both, so they are printed: are
    documents joined before they are cut, how many tokens does a window predict, and is the perplexity that of a token of this
    tokenizer or of a word of the original text. All perplexities are upper bounds: exp of a NELBO.

    Example: m2s evaluate zero-shot runs/owt --task wikitext2 --data wiki.test.txt

    Example: m2s evaluate zero-shot runs/owt --task lambada --passes 32 --limit 500 --out lambada.json
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """The model: a folder or a repository of the Hugging Face hub. It must have a tokenizer."""
    task: Annotated[str, tyro.conf.arg(metavar="TASK")]
    """The data set: ptb, wikitext2, wikitext103, lm1b, lambada, ag_news, arxiv, pubmed, or that of a plugin."""
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH|OWNER/NAME")] = None
    """A file or folder of .txt, .jsonl or .parquet with the original text, or a data set of the hub; by default that of the
    task on the hub, which needs pip install 'datasets>=4'."""
    wrap: Literal["auto", "yes", "no"] = "auto"
    """Join documents by the end token before they are cut (yes), or cut each by itself (no); auto: what papers do."""
    stride: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens that a window predicts; the others are its context. By default all, which is the field's rule."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Use only the first documents."""
    estimator: str = "nelbo"
    """The estimator, as in m2s certify, such as nelbo, mdlm or llada."""
    passes: int = 4
    """Draws of noise for each window."""
    seed: int = 0
    """Seed of the noise."""
    batch_size: int = 16
    """Windows of one length in each call of the network."""
    device: str = ""
    """cpu or cuda; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json. An interrupted command continues from the state beside it."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        """Estimate, print and write --out.

        Raises:
            UserError: An option is invalid, or the data cannot be read.
        """
        from m2s.devices import resolve_device
        from m2s.evaluation.likelihood import ESTIMATORS, Options
        from m2s.evaluation.zero_shot import TASKS, make_windows, read_documents
        from m2s.provenance import fingerprint, is_rerun, provenance

        task, estimator = TASKS.find(self.task, "task"), ESTIMATORS.find(self.estimator, "estimator")
        for name, least in {"passes": 1, "batch_size": 1, "limit": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(option=name, value=value, expected=f"at least {least}")
        if self.out is not None:
            require_absent([self.out], self.overwrite or is_rerun(self.out))
            output_file(self.out, (".json",))
        checkpoint = load_described(self.checkpoint, resolve_device(self.device))
        length = (checkpoint.data or {}).get("length")
        if checkpoint.tokenizer is None:
            raise UserError(f"{self.checkpoint} has no tokenizer to read text with: {checkpoint.tokenizer_hint}")
        if not isinstance(length, int):
            raise UserError(f"{self.checkpoint} does not say how long its texts are")
        if reason := estimator.unsupported(checkpoint.head):
            raise UserError(option="estimator", value=self.estimator, reason=f"it does not support {checkpoint.head}: {reason}")
        try:
            documents = read_documents(task, self.data)[: self.limit]
        except (OSError, ValueError) as error:
            raise error if isinstance(error, UserError) else UserError(str(error)) from error
        wrap = None if self.wrap == "auto" else self.wrap == "yes"
        made = make_windows(documents, task, checkpoint.tokenizer, length, wrap, self.stride)
        weights = fingerprint(checkpoint.model)
        numbers = self._summary(self._nats(checkpoint, made, weights), made)
        missing = estimator.missing(checkpoint.head, Options())
        print_escaped("\n".join(self._lines(task.title, made, numbers, missing)))
        if self.out is not None:
            options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
            found = {"task": self.task, **numbers, "rule": made.rule, "missing": missing, "weights": weights}
            write_json(self.out, finite({**found, "options": options, **provenance(resolve_device(self.device))}))
            self._partial().unlink(missing_ok=True)
            print_escaped(f"written to {self.out}")

    def _partial(self) -> Path:
        """Where the state of an interrupted command is saved."""
        assert self.out is not None
        return self.out.with_suffix(".partial.json")

    def _nats(self, checkpoint: "Checkpoint", made: "Windows", weights: str) -> list[float]:
        """The estimate of every window, in nats."""
        from m2s.evaluation.likelihood.conditional import conditional_nats

        settings = {"weights": weights, "rule": made.rule, "tokens": made.tokens, "task": self.task, "data": self.data}
        settings |= {"estimator": self.estimator, "passes": self.passes, "seed": self.seed}
        nats: list[float] = []
        if self.out is not None and self._partial().is_file():
            state = read_json(self._partial(), "delete it, and the command starts again")
            nats = state["nats"] if state.get("settings") == settings else []
        device = next(checkpoint.model.parameters()).device
        with Progress(len(made.requests), "estimating", "window") as progress:
            progress.update(len(nats))
            while len(nats) < len(made.requests):
                group = made.requests[len(nats) : len(nats) + GROUP * self.batch_size]
                given = (self.passes, self.seed, self.batch_size, self.estimator, None, device, progress.update)
                nats += conditional_nats(checkpoint.model, checkpoint.head, group, *given)[0].tolist()
                if self.out is not None:
                    write_json(self._partial(), {"settings": settings, "nats": nats})
        return nats

    def _summary(self, nats: list[float], made: "Windows") -> dict[str, Any]:
        """Totals, and perplexities per token and per word with their standard error over windows."""
        from statistics import stdev

        total = sum(nats)
        error = stdev(nats) * math.sqrt(len(nats)) if len(nats) > 1 else math.nan
        found: dict[str, Any] = {"nats": total, "windows": len(nats), "documents": made.documents}
        for unit, count in (("token", made.tokens), ("word", made.words)):
            mean = total / count
            found[f"{unit}s"] = count
            found[f"nats_per_{unit}"] = mean
            found[f"perplexity_per_{unit}"] = math.exp(min(mean, 700.0))
            found[f"perplexity_per_{unit}_error"] = math.exp(min(mean, 700.0)) * error / count
        found["bits_per_character"] = total / math.log(2) / max(made.characters, 1)
        return found

    def _lines(self, title: str, made: "Windows", numbers: dict[str, Any], missing: tuple[str, ...]) -> list[str]:
        """The result as text."""
        kind = "upper bounds" if not missing else f"NO upper bounds: {self.estimator} lacks {', '.join(missing)}"
        lines = [
            f"{title}: {made.documents:,} documents, {made.tokens:,} tokens, {made.words:,} words",
            f"windows: {made.rule}",
            f"perplexities by {self.estimator} ({kind}); ± is the standard error over windows",
        ]
        for unit in ("token", "word"):
            value, error = numbers[f"perplexity_per_{unit}"], numbers[f"perplexity_per_{unit}_error"]
            lines.append(f"perplexity per {unit:8s}{value:14.4f} ± {error:.4f}{numbers[f'nats_per_{unit}']:14.5f} nats")
        return [*lines, f"bits per character     {numbers['bits_per_character']:14.5f}"]
