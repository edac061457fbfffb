"""`m2s evaluate lm-eval CHECKPOINT --tasks ...`: tasks of lm-evaluation-harness."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from m2s.cli.evaluate.bpd import finite
from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, print_escaped
from m2s.io import output_file, require_absent, write_json

INSTALL = "pip install 'm2s-diffusion[eval]'"


@dataclass(frozen=True)
@help_from_source
class LmEval:
    """Run tasks of lm-evaluation-harness (lm_eval) on a model of text.

    A log-likelihood is minus a NELBO of the continuation, with the context clamped: a lower bound. So perplexities are upper
    bounds, and multiple-choice tasks compare bounds. An --estimator that is no bound is named in the output. Documents longer
    than the model are cut into windows in which every token is predicted once. Generation samples with the context clamped.

    From Python or another program: import m2s.evaluation.harness, which registers the model "m2s" with lm_eval.

    Needs pip install 'm2s-diffusion[eval]'.

    Example: m2s evaluate lm-eval runs/owt --tasks lambada_openai --limit 200 --passes 32

    Example: m2s evaluate lm-eval runs/mine --tasks my_task --include-path tasks/ --out lm_eval.json
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """The model: a folder or a repository of the Hugging Face hub. It must have a tokenizer."""
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK ...")]
    """Tasks of the harness, such as lambada_openai, hellaswag or wikitext, or of --include-path."""
    include_path: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder with the .yaml files of more tasks."""
    num_fewshot: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Examples in the context; by default what the task says."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Use only so many documents of each task."""
    estimator: str = "nelbo"
    """The estimator of log-likelihoods, as in m2s certify, such as nelbo or llada."""
    passes: int = 16
    """Draws of noise for each request."""
    seed: int = 0
    """Seed of the noise. A request has the same noise in any order and batch."""
    batch_size: int = 16
    """Requests of one length in each call of the network."""
    steps: int = 64
    """Sampling steps of a generation."""
    greedy: bool = True
    """Decode greedily where a task asks for it, such as the accuracy of LAMBADA; masking noise only."""
    device: str = ""
    """cpu or cuda; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all results and settings as .json; by default they are only printed."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        """Run the tasks, print their metrics and write --out.

        Raises:
            UserError: lm_eval is not installed, or a task or an option is invalid.
        """
        from m2s.devices import resolve_device
        from m2s.provenance import is_rerun, provenance

        for name, least in {"passes": 1, "batch_size": 1, "steps": 1, "limit": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(option=name, value=value, expected=f"at least {least}")
        if self.out is not None:
            require_absent([self.out], self.overwrite or is_rerun(self.out))
            output_file(self.out, (".json",))
        results, missing = self._evaluate()
        print_escaped("\n".join([self._kind(missing), *_lines(results)]))
        if self.out is not None:
            options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
            write_json(
                self.out,
                finite({"results": results, "missing": missing, "options": options, **provenance(resolve_device(self.device))}),
            )
            print_escaped(f"written to {self.out}")

    def _kind(self, missing: tuple[str, ...]) -> str:
        """What the log-likelihoods are, in a line."""
        kind = "lower bounds" if not missing else f"NO lower bounds: {self.estimator} lacks {', '.join(missing)}"
        return f"log-likelihoods by {self.estimator}, with the context clamped, are {kind}"

    def _evaluate(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The metrics of every task, and what the estimator lacks for a bound."""
        try:
            import lm_eval
            from lm_eval.tasks import TaskManager

            from m2s.evaluation.harness import Harness
        except ImportError as error:
            raise UserError(f"lm-evaluation-harness is needed ({error}): {INSTALL}") from error
        manager = TaskManager(include_path=None if self.include_path is None else str(self.include_path))
        unknown = [name for name in self.tasks if name not in manager.all_tasks]
        if unknown:
            hint = "lm_eval ls tasks lists them; --include-path adds a folder"
            raise UserError(option="tasks", value=unknown[0], reason="there is no task of that name", hint=hint)
        settings = {"passes": self.passes, "seed": self.seed, "batch_size": self.batch_size, "steps": self.steps}
        try:
            model = Harness(self.checkpoint, self.estimator, greedy=self.greedy, device=self.device, **settings)
            found = lm_eval.simple_evaluate(
                model,
                tasks=list(self.tasks),
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=1000,
            )
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(str(error)) from error
        return dict((found or {}).get("results", {})), model.missing


def _lines(results: dict[str, Any]) -> list[str]:
    """One line for each metric."""
    lines = []
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, int | float) and "stderr" not in name:
                metric, _, chosen = name.partition(",")
                error = metrics.get(f"{metric}_stderr,{chosen}")
                shown = f" ± {error:.4f}" if isinstance(error, int | float) else ""
                lines.append(f"{task:32s}{metric:24s}{value:12.4f}{shown}")
    return lines
