"""Compare candidates for the recipe of text with `owt-fast`, on the Markov source of experiments/plateau.py.

    python experiments/candidates.py out/candidates            # 50 minutes of one core; finished rows are skipped
    python experiments/candidates.py out/candidates --table    # writes experiments/results/candidates.json

A row is one training run of a candidate: that of `owt-fast` in experiments/plateau.py with one change. Rows of a seed have the
same order of the data. The result of a candidate is the difference of its NELBO to that of the baseline with the same seed, at
matched tokens of the network's input. POINTS are the tokens at which it is reported. The baseline leaves the plateau near the
first one. The error is the standard error of the mean difference over the seeds. Three seeds give a rough error, so the pooled
one, the root mean square over the candidates of a method, is reported too. A candidate wins at a point if its mean difference
is below -2 times the larger of the two errors.

experiments/candidate_changes.py has the changes, and says what can be expected of each candidate before a measurement.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # for the import below, also where this file is loaded by its path
import plateau
from candidate_changes import (
    AveragedTimes,
    BiasControl,
    ClippedObjective,
    last_bias,
    repeat_examples,
    start_at_unigram,
    tie,
)

import m2s
from m2s.data.sequences import Sequences
from m2s.data.source import Source
from m2s.distributed import World
from m2s.errors import UserError
from m2s.heads import Head
from m2s.io import output_folder, write_json
from m2s.losses.objective import TrainingObjective
from m2s.patches import AttributePatches
from m2s.provenance import command, provenance
from m2s.training import loop
from m2s.training.build import load_weights, make_objects
from m2s.training.config import Config, replace, resolve
from m2s.training.trainer import LocalBatch, Trainer

RESULTS = Path(__file__).parent / "results" / "candidates.json"
BASELINE, SEEDS, STEPS = "owt-fast", (1, 2, 3), 300
POINTS = (102_400, 204_800, 307_200)
VARIANCE = {"owt-fast": ("repeat-2", "repeat-4", "bias-control"), "time-free": ("time-free-averaged",)}
"""The candidates with which the variance of the gradient is measured, by the candidate that trains the network."""
TRAINED = (100, 300)  # steps of these networks
TIMED = 25  # training steps of each candidate in the comparison of their times
GROUPS, BATCHES = 10, 12  # batches for the variance: the errors are those over groups


@dataclass(frozen=True)
class Candidate:
    """A change of the recipe.

    Args:
        settings: Values of the configuration.
        prepare: Changes the network before its first step; called with it and the logarithms of the unigram distribution.
        objective: Makes the objective from the trainer and these logarithms; None: that of the trainer.
        repeats: How often each example of a batch is repeated.
        sizes: Batch sizes, each with the step of its first batch; empty: that of the configuration.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module, Tensor], None] | None = None
    objective: Callable[[Trainer, Tensor], TrainingObjective] | None = None
    repeats: int = 1
    sizes: tuple[tuple[int, int], ...] = ()


def clipped(trainer: Trainer, unigram: Tensor) -> TrainingObjective:
    """Return the objective of `loss-clip`."""
    return ClippedObjective(trainer.model, trainer.head, trainer.loss, trainer.config.run.t_min)


def controlled(trainer: Trainer, unigram: Tensor) -> TrainingObjective:
    """Return the objective of `bias-control`."""
    return BiasControl(trainer.model, trainer.head, trainer.loss, trainer.config.run.t_min, unigram=unigram)


def averaged(trainer: Trainer, unigram: Tensor) -> TrainingObjective:
    """Return the objective of `time-free-averaged`."""
    run = trainer.config.run
    assert run.importance is not None
    return AveragedTimes(trainer.model, trainer.head, trainer.loss, run.t_min, importance=run.importance)


SMALL = {"batch": 8, "validate_every": 50, "log_every": 50}
CANDIDATES = {
    BASELINE: Candidate(),
    "unigram-bias": Candidate(prepare=start_at_unigram),
    "repeat-2": Candidate(repeats=2),
    "repeat-4": Candidate(repeats=4),
    "bias-control": Candidate(objective=controlled),
    "time-free": Candidate({"network.time": "no"}),
    "time-free-averaged": Candidate({"network.time": "no"}, objective=averaged),
    "no-clip": Candidate({"optimizer.clip": 0.0}),
    "loss-clip": Candidate({"optimizer.clip": 0.0}, objective=clipped),
    "qk-norm": Candidate({"network.qk_norm": True}),
    "batch-8": Candidate({**SMALL, "steps": 2 * STEPS, "optimizer.warmup": 100}),
    "batch-schedule": Candidate({"steps": STEPS + 100, "optimizer.warmup": 100}, sizes=((0, 8), (200, 16))),
    "lr-6e-3": Candidate({"optimizer.lr": 6e-3}),
    "beta2-0.9": Candidate({"optimizer.beta2": 0.9}),
    "beta2-0.99": Candidate({"optimizer.beta2": 0.99}),
    "tied": Candidate({"network.embedding_std": 0.02}, prepare=tie),
    "embedding-0.02": Candidate({"network.embedding_std": 0.02}),
    "uniform-t": Candidate({"importance": None}),
    "importance-0.3": Candidate({"importance": 0.3}),
}
ROWS: dict[str, tuple[str, ...]] = {
    "m2s-offset": tuple(CANDIDATES),
    "mdlm": (BASELINE, "batch-schedule"),
    "sedd": (BASELINE, "batch-schedule"),
}
"""The candidates of each method, the baseline first. `mdlm` and `sedd` have the one that won at all points."""


class CandidateTrainer(Trainer):
    """A trainer with the changes of a candidate that are no options of m2s.

    Args:
        candidate: The candidate.
        unigram: The logarithms of the unigram distribution, [K].
        config: As in `Trainer`.
        source: As in `Trainer`.
        world: As in `Trainer`.
        model: As in `Trainer`.
        head: As in `Trainer`.
        description: As in `Trainer`.
    """

    def __init__(
        self,
        candidate: Candidate,
        unigram: Tensor,
        config: Config,
        source: Source,
        world: World,
        model: nn.Module,
        head: Head,
        description: dict[str, Any],
    ) -> None:
        self.candidate = candidate
        if candidate.prepare is not None:
            candidate.prepare(model, unigram)
        super().__init__(config, source, world, model, head, description)
        if candidate.objective is not None:
            self.wrapped = candidate.objective(self, unigram)
        if candidate.prepare is tie:  # a checkpoint has both names
            self.average.values["head.weight"] = self.average.values["embedding.weight"]

    def local_batch(self, step: int) -> LocalBatch | None:
        """Return the batch of a step as the candidate changes it.

        Args:
            step: The training step, counted from 0.
        """
        sizes = [size for first, size in self.candidate.sizes if first <= step]
        if sizes:
            self.config = replace(self.config, "batch", sizes[-1])
        batch = super().local_batch(step)
        return batch if batch is None or self.candidate.repeats == 1 else repeat_examples(batch, self.candidate.repeats)


def configure(method: str, name: str, seed: int, out: Path) -> Config:
    """Return the configuration of a row.

    Args:
        method: The method.
        name: The candidate.
        seed: The seed of the run.
        out: The folder of the run.
    """
    config = replace(plateau.configure(BASELINE, seed, out, STEPS), "method", method)
    for key, value in CANDIDATES[name].settings.items():
        config = replace(config, key, value)
    return config


def measure(method: str, name: str, seed: int, out: Path, steps: int | None = None) -> dict[str, Any]:
    """Train one row and return it.

    Args:
        method: The method.
        name: The candidate.
        seed: The seed of the run.
        out: The folder of the run, removed by the caller.
        steps: Training steps, in place of those of the candidate.
    """
    train_x, held_out = plateau.draw(plateau.EXAMPLES, 1), plateau.draw(plateau.HELD_OUT, 2)
    config = configure(method, name, seed, out)
    config = config if steps is None else replace(config, "steps", steps)
    unigram = plateau.unigram_logits(train_x)
    begin = time.process_time()
    with AttributePatches() as patches:
        patches.set(loop, "Trainer", functools.partial(CandidateTrainer, CANDIDATES[name], unigram))
        found = plateau.trace(config, train_x, held_out)
    seconds = time.process_time() - begin
    leaves = None
    if method == "m2s-offset":
        level = plateau.unigram_nelbo(m2s.load(out).head, config.run, train_x, held_out) - plateau.BELOW
        leaves = plateau.crossing(found["tokens"], found["nats"], level)
    row = {"method": method, "candidate": name, "seed": seed, "tokens_to_leave": leaves, "core_seconds": seconds}
    return {**row, "trace": found, **provenance(torch.device("cpu"))}


def make_trainer(name: str, steps: int, run: Path | None = None) -> CandidateTrainer:
    """Return a trainer of `m2s-offset` with a candidate, outside of `train`.

    Args:
        name: The candidate.
        steps: The steps for which it has batches.
        run: The folder of a run whose weights it has; None: it has initial weights.
    """
    train_x, held_out = plateau.draw(plateau.EXAMPLES, 1), plateau.draw(plateau.HELD_OUT, 2)
    config = resolve(replace(configure("m2s-offset", name, 1, Path("run")), "steps", steps))
    source = Sequences(train_x, plateau.VOCAB, validation_x=held_out)
    model, head, description = make_objects(config, source)
    if run is not None:
        load_weights(model, description, str(run))
    parts = (config, source, World.start("cpu"), model, head, description)
    return CandidateTrainer(CANDIDATES[name], plateau.unigram_logits(train_x), *parts)


def gradient_variance(name: str, run: Path) -> dict[str, list[float]]:
    """Return the variance of the gradient of a batch in each group of batches, of all parameters and of the last layer's bias.

    Args:
        name: The candidate.
        run: The folder of a run that trained its network.
    """
    first = 10_000  # steps with other noise than those of the training
    found: dict[str, list[float]] = {"all": [], "bias": []}
    with make_trainer(name, first + GROUPS * BATCHES, run) as trainer:
        for group in range(GROUPS):
            gradients: dict[str, list[Tensor]] = {"all": [], "bias": []}
            for one in range(BATCHES):
                trainer.progress.step = first + group * BATCHES + one
                batch = trainer.local_batch(trainer.progress.step)
                assert batch is not None
                trainer.gradient(batch)
                bias = last_bias(trainer.model).grad
                assert bias is not None
                gradients["all"].append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
                gradients["bias"].append(bias.clone())
            for part, values in gradients.items():
                found[part].append(float(torch.stack(values).double().var(0).sum()))
    return found


def measure_variance(network: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train a network and return the variance of its gradient with each candidate.

    Args:
        network: The candidate that trains the network.
        steps: Training steps.
        folder: The folder of the run.
    """
    measure("m2s-offset", network, 1, folder, steps)
    values = {name: gradient_variance(name, folder) for name in (network, *VARIANCE[network])}
    return {"network": network, "steps": steps, "variance": values, **provenance(torch.device("cpu"))}


def measure_cost() -> dict[str, Any]:
    """Return the seconds of training steps of each candidate, one after the other in turn, per token of the batch.

    `batch-schedule` is left out: its steps have two sizes.
    """
    names = [name for name, candidate in CANDIDATES.items() if not candidate.sizes]
    trainers = {name: make_trainer(name, TIMED) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for step in range(TIMED):
        for name, trainer in trainers.items():
            begin = time.process_time()
            batch = trainer.local_batch(step)
            assert batch is not None
            losses, weights = trainer.gradient(batch)
            norm = trainer.gradient_norm()
            trainer.update_weights(norm, torch.stack([losses.sum() / weights, norm.double()]))()
            trainer.progress.step += 1
            seconds[name].append((time.process_time() - begin) / batch.batch.x_0.numel())
    for trainer in trainers.values():
        trainer.close()
    return {"seconds_per_token": seconds, **provenance(torch.device("cpu"))}


def ratio_and_error(values: list[float], others: list[float]) -> tuple[float, float]:
    """Return the ratio of two means over paired groups, and its jackknife error.

    Args:
        values: The values of the numerator, one for each group.
        others: Those of the denominator.
    """
    count = len(values)
    left = [(sum(values) - one) / (sum(others) - other) for one, other in zip(values, others, strict=True)]
    return sum(values) / sum(others), math.sqrt((count - 1) / count) * math.dist(left, [statistics.fmean(left)] * count)


def summarize_variance(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratio of the variance of each candidate to that of the objective that trained the network.

    Args:
        rows: What `measure_variance` returned.
    """
    found = []
    for row in rows:
        for name in VARIANCE[row["network"]]:
            mine, plain = row["variance"][name], row["variance"][row["network"]]
            ratios = {
                part: dict(zip(("ratio", "error"), ratio_and_error(mine[part], plain[part]), strict=True)) for part in mine
            }
            found.append({"network": row["network"], "steps": row["steps"], "candidate": name, **ratios})
    return found


def format_variance(summaries: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of variances.

    Args:
        summaries: What `summarize_variance` returns.
    """
    heads = [f"{part} after {steps} steps" for part in ("all parameters", "bias") for steps in TRAINED]
    lines = [f"| candidate | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in (name for names in VARIANCE.values() for name in names):
        mine = {one["steps"]: one for one in summaries if one["candidate"] == name}
        cells = [mine[steps][part] for part in ("all", "bias") for steps in TRAINED]
        texts = [f"{cell['ratio']:.2f} ± {cell['error']:.2f}" for cell in cells]
        lines.append(f"| `{name}` | {' | '.join(texts)} |")
    return lines


def nats_at(row: dict[str, Any], tokens: int) -> float:
    """Return the NELBO of a row at a validation, in nats per token.

    Args:
        row: The row.
        tokens: The tokens trained on, at which there was a validation.
    """
    return float(row["trace"]["nats"][row["trace"]["tokens"].index(tokens)])


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean of values and its standard error.

    Args:
        values: At least two values.
    """
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each method and candidate the differences to the baseline at all points.

    Args:
        rows: All rows.
    """
    by_name = {(row["method"], row["candidate"], row["seed"]): row for row in rows}
    found = []
    for method, names in ROWS.items():
        base = [by_name[method, BASELINE, seed] for seed in SEEDS]
        summaries: list[dict[str, Any]] = []
        for name in names:
            mine = [by_name[method, name, seed] for seed in SEEDS]
            points: list[dict[str, Any]] = []
            for tokens in POINTS:
                gaps = [nats_at(one, tokens) - nats_at(other, tokens) for one, other in zip(mine, base, strict=True)]
                mean, error = mean_and_error(gaps)
                nats = statistics.fmean(nats_at(one, tokens) for one in mine)
                points.append({"tokens": tokens, "nats": nats, "difference": mean, "error": error})
            summaries.append({"method": method, "candidate": name, "points": points})
        for at in range(len(POINTS)):
            errors = [summary["points"][at]["error"] for summary in summaries if summary["candidate"] != BASELINE]
            pooled = math.sqrt(statistics.fmean(error**2 for error in errors)) if errors else 0.0
            for summary in summaries:
                point = summary["points"][at]
                limit = -2 * max(point["error"], pooled)
                point |= {"pooled_error": pooled, "wins": summary["candidate"] != BASELINE and point["difference"] < limit}
        found += summaries
    return found


def time_ratios(cost: dict[str, Any]) -> dict[str, float]:
    """Return the ratio of the median time per token of each candidate to that of the baseline.

    Args:
        cost: What `measure_cost` returned.
    """
    medians = {name: statistics.median(values) for name, values in cost["seconds_per_token"].items()}
    return {name: median / medians[BASELINE] for name, median in medians.items()}


def format_table(summaries: list[dict[str, Any]], method: str, ratios: dict[str, float]) -> list[str]:
    """Return the lines of the table of a method.

    Args:
        summaries: What `summarize` returns.
        method: The method.
        ratios: The ratios of times, which were measured with `m2s-offset`.
    """
    mine = [summary for summary in summaries if summary["method"] == method]
    timed = method == "m2s-offset"
    heads = [f"`{method}`", *(f"{tokens:,} tokens" for tokens in POINTS), *(["time"] if timed else [])]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for summary in mine:
        name = summary["candidate"]
        cells = [f"{point['difference']:+.3f} ± {point['error']:.3f}" for point in summary["points"]]
        cells = [f"**{cell}**" if point["wins"] else cell for cell, point in zip(cells, summary["points"], strict=True)]
        if name == BASELINE:
            cells = [f"{point['nats']:.3f}" for point in summary["points"]]
        cells += [f"{ratios[name]:.2f}" if name in ratios else "-"] if timed else []
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    pooled = [f"{point['pooled_error']:.3f}" for point in mine[0]["points"]]
    return [*lines, f"| pooled error | {' | '.join(pooled)} |{' |' if timed else ''}"]


def write_table(rows: list[Path], variances: list[Path], cost: Path, results: Path) -> None:
    """Write the result file and print the tables.

    Args:
        rows: The files of all rows.
        variances: The files of all variances.
        cost: The file of the times.
        results: The result file.

    Raises:
        UserError: A file does not exist.
    """
    missing = [path for path in (*rows, *variances, cost) if not path.exists()]
    if missing:
        raise UserError(f"{missing[0].parent} has no {missing[0].name}: compute the rows first, without --table")
    found, spread, costs = ([read(path) for path in paths] for paths in (rows, variances, [cost]))
    summaries, variance_ratios, ratios = summarize(found), summarize_variance(spread), time_ratios(costs[0])
    parts = {"summaries": summaries, "variance_ratios": variance_ratios, "time_ratios": ratios}
    write_json(results, {"command": command(), **parts, "rows": found, "variance_rows": spread, "cost": costs[0]})
    for lines in (*(format_table(summaries, method, ratios) for method in ROWS), format_variance(variance_ratios)):
        print("\n".join([*lines, ""]))


def read(path: Path) -> Any:
    """Return the content of a JSON file.

    Args:
        path: The file.
    """
    return json.loads(path.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    """Compute the rows that are not finished, or write the table; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of each row, in place of those of its candidate")
    parser.add_argument("--table", action="store_true", help="write the result file from the rows")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="the result file")
    options = parser.parse_args(arguments)
    out, wanted = options.out, [(method, name, seed) for method, names in ROWS.items() for seed in SEEDS for name in names]
    rows = {key: out / "-".join(map(str, (*key[:2], f"{key[2]}.json"))) for key in wanted}
    cost = out / "cost.json"
    variances = {(name, steps): out / f"variance-{name}-{steps}.json" for name in VARIANCE for steps in TRAINED}
    try:
        if options.table:
            write_table([*rows.values()], [*variances.values()], cost, options.results)
            return 0
        output_folder(out)
        for (method, name, seed), path in rows.items():
            if not path.exists():
                row = measure(method, name, seed, out / "runs" / path.stem, options.steps)
                write_json(path, row)
                print(f"{path.stem}: NELBO {row['trace']['nats'][-1]:.3f}, {row['core_seconds']:.0f} s", flush=True)
        for (name, steps), path in variances.items():
            if not path.exists():
                write_json(path, measure_variance(name, options.steps or steps, out / "runs" / path.stem))
        if not cost.exists():
            write_json(cost, measure_cost())
        return 0
    except UserError as error:
        print(f"candidates.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
