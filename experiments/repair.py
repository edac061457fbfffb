"""When does the projection of scores help the samples of SEDD, and why? Several seeds and states of training, on 8 x 8 digits.

    python experiments/repair.py out/repair            # ten minutes on two cores; finished rows are skipped
    python experiments/repair.py out/repair --table    # writes experiments/results/repair.json and prints the tables

A row is one state of one training run of `sedd`. Its scores are used in four forms, on the same noise:

* as it is: the network's scores. The analytic sampler draws from the positive part of its signed weights.
* projected: the nearest score that has a posterior (`m2s.Projected`, Eq. 11). There are no negative weights.
* rate kept: the nearest such score among those with the same sum, which is the rate at which a token changes. For uniform
  noise the sum determines the posterior of the current token, so the other entries of the signed posterior are projected onto
  the simplex.
* clipped: the positive part of the signed posterior, normalized.

For each form and number of steps a row has the Frechet distance of pixels between 256 samples and the training images, paired
differences, and the number of token changes. It also has the mass of negative weights that the sampler drops without
projection, and the mean score on noisy held-out images, which is 1 for exact scores (`m2s.evaluation.comparison.mean_scores`).
On the same noisy images it has the score entropy of each form, and how often a form gives the true pixel no probability.
At 32 steps it also has the distance where the projection only raises or only lowers scores, and where it acts only early or
only late.
"""

import argparse
import json
import sys
from collections import ChainMap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.conversions.bridge import scatter_at
from m2s.errors import UserError
from m2s.evaluation.comparison import TIMES, HalfProjected, mean_scores, with_errors
from m2s.evaluation.pixels import GROUPS, pixel_distances
from m2s.heads import Head
from m2s.heads.unconstrained import UnconstrainedScore
from m2s.io import output_folder, write_json
from m2s.presets import PRESETS
from m2s.provenance import command, provenance
from m2s.rng import derived_seed
from m2s.samplers import StepEvent
from m2s.training import train
from m2s.training.config import replace
from m2s.training.export import export_state

RESULTS = Path(__file__).parent / "results" / "repair.json"
SEEDS, STATES = (1, 2, 3), (200, 600)
STEPS = (4, 8, 16, 32, 64)
SAMPLES, MICRO_BATCH = 256, 128
PARTS = ("", "-scores", "-parts")  # files of a row
MANY, BOUNDARY = 32, 0.3  # sampling steps of the parts of the projection, and the time between early and late
RAW, PROJECTED, KEPT, CLIPPED = "as it is", "projected", "rate kept", "clipped"


def simplex(values: Tensor, mass: Tensor) -> Tensor:
    """Return the nearest vectors without negative entries that have a given sum.

    Args:
        values: The vectors, [*site, S]. Entries of -inf become 0.
        mass: The sums, [*site].
    """
    ordered = values.sort(-1, descending=True).values
    sums = ordered.masked_fill(ordered.isinf(), 0).cumsum(-1)
    count = torch.arange(1, values.shape[-1] + 1, dtype=values.dtype)
    threshold = (sums - mass.unsqueeze(-1)) / count
    support = (ordered > threshold).sum(-1, keepdim=True).clamp(min=1)
    return (values - threshold.gather(-1, support - 1)).clamp(min=0)


class RateKept(m2s.Projected):
    """Scores projected onto those that have a posterior and the same sum, for uniform noise.

    The sum of the scores is (1 - mu_k)(K - 1 + b) + mu_k (K - 1) rho with b = 1/rho - 1, so it determines mu_k, the entry of
    the signed posterior at the current token. It stays, within [0, 1]. The score of y is a + b mu_y with the same a and b for
    all y. So the nearest score has the nearest other entries with sum 1 - mu_k.
    """

    def _nearest(self, output: Any, x_t: Tensor, t: Tensor) -> Tensor:
        signed = m2s.affine_inverse(self.head.log_score(output, x_t, t).double().exp(), x_t, t, self.process)
        current = signed.gather(-1, x_t.unsqueeze(-1)).clamp(0, 1)
        others = simplex(scatter_at(signed, x_t, -torch.inf), 1 - current.squeeze(-1))
        return others.scatter(-1, x_t.unsqueeze(-1), current)


class Clipped(m2s.Projected):
    """The positive part of the signed posterior, normalized."""

    def _nearest(self, output: Any, x_t: Tensor, t: Tensor) -> Tensor:
        signed = m2s.affine_inverse(self.head.log_score(output, x_t, t).double().exp(), x_t, t, self.process)
        positive = signed.clamp(min=0)
        return positive / positive.sum(-1, keepdim=True)


class Within(UnconstrainedScore):
    """Scores that are projected at some times, and as they are at others.

    Args:
        head: The head that predicts the scores.
        low: The first time at which they are projected.
        high: The time from which on they are not.
    """

    excludes_t_one = True

    def __init__(self, head: Head, low: float, high: float) -> None:
        super().__init__(head.process)
        self.head, self.projected, self.low, self.high = head, m2s.Projected(head), low, high

    def log_score(self, output: Any, x_t: Tensor, t: Tensor) -> Tensor:
        """Return log s_y of every candidate y, [*site, S]."""
        raw, projected = (one.log_score(output, x_t, t) for one in (self.head, self.projected))
        inside = ((t >= self.low) & (t < self.high)).reshape(-1, *[1] * (raw.ndim - 1))
        return torch.where(inside, projected, raw)


def parts(head: Head) -> dict[str, Head]:
    """Return forms in which only a part of the projection acts.

    Args:
        head: The head that predicts the scores.
    """
    return {
        "only raised": HalfProjected(head, raises=True),
        "only lowered": HalfProjected(head, raises=False),
        "only early": Within(head, BOUNDARY, 2.0),
        "only late": Within(head, -1.0, BOUNDARY),
    }


def measure_parts(model: Any, head: Head, samples: int) -> dict[str, float]:
    """Return the distance to the training images for each part of the projection, at many steps.

    Args:
        model: The network.
        head: The head that predicts the scores.
        samples: Number of samples.
    """
    digits = m2s.data.load("digits")
    reference = digits.train.long()
    drawn = {name: draw(model, one, MANY, reference.shape[1], samples)[0] for name, one in parts(head).items()}
    distances = pixel_distances(torch.stack(list(drawn.values())), reference, digits.vocab, 2)[:, 0]
    return dict(zip(drawn, distances.tolist(), strict=True))


def forms(head: Head) -> dict[str, Head]:
    """Return the four forms of a score.

    Args:
        head: The head that predicts it.
    """
    return {RAW: head, PROJECTED: m2s.Projected(head), KEPT: RateKept(head), CLIPPED: Clipped(head)}


class Changes:
    """A callback that counts how many tokens change, and the mass of the negative weights that the sampler drops."""

    def __init__(self) -> None:
        self.changes, self.sites, self.mass = 0, 0, 0.0

    def __call__(self, step: StepEvent) -> None:
        self.changes += int((step.x_s != step.x_t).sum())
        self.sites += step.x_t.numel()
        if "negative_mass" in step.prediction.notes:  # the last step of a posterior has none
            self.mass += float(step.prediction.notes["negative_mass"].sum())


def draw(model: Any, head: Head, steps: int, length: int, samples: int) -> tuple[Tensor, Changes]:
    """Draw samples by SEDD's analytic sampler.

    Args:
        model: The network.
        head: One form of its scores.
        steps: Sampling steps.
        length: Positions of an image.
        samples: Number of samples.

    Returns:
        The samples [samples, length], and what was counted.
    """
    counts = Changes()
    options: dict[str, Any] = {"sampler": "analytic", "grid": "linear", "seed": 0, "micro_batch": MICRO_BATCH}
    return m2s.sample(model, head, (samples, length), steps=steps, callback=counts, **options), counts


def measure(checkpoint: Any, seed: int, state: int, samples: int) -> dict[str, Any]:
    """Return the row of one state.

    Args:
        checkpoint: The network and its head.
        seed: The seed of the run.
        state: Training steps.
        samples: Number of samples of each form.
    """
    digits = m2s.data.load("digits")
    model, every = checkpoint.model, forms(checkpoint.head)
    reference = digits.train.long()
    rows = []
    for steps in STEPS:
        drawn = {name: draw(model, head, steps, reference.shape[1], samples) for name, head in every.items()}
        stacked = torch.stack([tokens for tokens, _ in drawn.values()])
        distances = pixel_distances(stacked, reference, digits.vocab, min(GROUPS, samples // 2))
        counts = drawn[RAW][1]
        rows.append(
            {
                "steps": steps,
                **with_errors(distances, list(every)),
                "negative_mass": counts.mass / counts.sites,
                "changes": {name: found.changes / samples / reference.shape[1] for name, (_, found) in drawn.items()},
            }
        )
        print(f"seed {seed}, state {state}, {steps} steps", flush=True)
    means = mean_scores(model, every, digits.test.long(), seed=0)
    return {"seed": seed, "state": state, "steps": rows, "mean_scores": means, **provenance(torch.device("cpu"))}


@torch.no_grad()
def score_errors(model: Any, every: dict[str, Head], x_0: Tensor) -> list[dict[str, Any]]:
    """Measure how well each form predicts on noisy data, at the times and on the noise of `mean_scores` with seed 0.

    Args:
        model: The network.
        every: The forms of its scores.
        x_0: Clean images, [n, L].

    Returns:
        For each time: "t"; for each form the "score_entropy" in nats per position, with the weight of the objective, and the
        fraction of positions where the posterior of the true token is "zero" or less; and the fraction of positions "above" and
        "below", where the sum of the scores as they are is greater or less than that of any posterior.
    """
    found = []
    for number, time in enumerate(TIMES):
        t = torch.full((len(x_0),), time)
        process = every[RAW].process
        x_t = process.corrupt(x_0, t, generator=torch.Generator().manual_seed(derived_seed(0, number)))
        output = model(x_t, t)
        loss, zero = {}, {}
        for name, head in every.items():
            loss[name] = float(m2s.score_entropy(head, output, x_0, x_t, t).mean())
            posterior = head.posterior(output, x_t, t).gather(-1, x_0.unsqueeze(-1))
            zero[name] = float((posterior <= 0).float().mean())
        current = every[RAW].posterior(output, x_t, t).gather(-1, x_t.unsqueeze(-1))
        above, below = (float(beyond.float().mean()) for beyond in (current < 0, current > 1))
        found.append({"t": time, "score_entropy": loss, "zero": zero, "above": above, "below": below})
    return found


def prepare(out: Path, seed: int) -> Path:
    """Train a run with all states, and return its folder.

    Args:
        out: The folder of all runs.
        seed: The seed.
    """
    folder = out / "runs" / f"sedd-{seed}"
    config = PRESETS["digits"]
    every = min(STATES)
    settings = {"method": "sedd", "seed": seed, "steps": max(STATES), "save_every": every, "keep": max(STATES) // every}
    for key, value in {**settings, "validate_every": 0, "device": "cpu", "optimizer.decay": "constant", "out": folder}.items():
        config = replace(config, key, value)
    train(config, quiet=True)
    return folder


def compute(out: Path, samples: int) -> None:
    """Compute the rows that are not finished.

    Args:
        out: The folder of the rows.
        samples: Number of samples of each form.
    """
    output_folder(out)
    for seed in SEEDS:
        missing = [state for state in STATES if not (out / f"{seed}-{state}.json").exists()]
        run = prepare(out, seed) if missing else out
        for state in missing:
            place = out / "states" / f"{seed}-{state}"
            if not (place / "config.json").exists():
                export_state(run, state, place)
            write_json(out / f"{seed}-{state}.json", measure(m2s.load(place), seed, state, samples))
        for state in STATES:
            checkpoint = m2s.load(out / "states" / f"{seed}-{state}")
            scores, pieces = (out / f"{seed}-{state}{part}.json" for part in PARTS[1:])
            if not scores.exists():
                errors = score_errors(checkpoint.model, forms(checkpoint.head), m2s.data.load("digits").test.long())
                write_json(scores, {"score_errors": errors})
            if not pieces.exists():
                write_json(pieces, {"parts": measure_parts(checkpoint.model, checkpoint.head, samples)})


def format_distances(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: the mass that is dropped, the distances as they are, and how much each form changes them.

    Values are means over seeds; ± is the standard error over seeds.

    Args:
        rows: All rows.
    """
    names = (PROJECTED, KEPT, CLIPPED)
    lines = [f"| training steps | sampling steps | dropped mass | {RAW} | {' | '.join(names)} |", "|---" * 7 + "|"]
    for state in STATES:
        chosen = [row["steps"] for row in rows if row["state"] == state]
        for at, steps in enumerate(STEPS):
            found = [row[at] for row in chosen]
            mass = sum(one["negative_mass"] for one in found) / len(found)
            cells = [spread([one["distances"][RAW]["value"] for one in found])]
            cells += [spread([one["differences"][f"{name} - {RAW}"]["value"] for one in found], "+.3f") for name in names]
            lines.append(f"| {state} | {steps} | {mass:.2e} | {' | '.join(cells)} |")
    return lines


def format_parts(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: how much each part of the projection changes the distance at many steps.

    Args:
        rows: All rows.
    """
    names = list(rows[0]["parts"])
    lines = [f"| training steps | projected, {MANY} steps | {' | '.join(names)} |", "|---" * 6 + "|"]
    for state in STATES:
        chosen = [row for row in rows if row["state"] == state]
        found = [next(one for one in row["steps"] if one["steps"] == MANY) for row in chosen]
        cells = [spread([one["differences"][f"{PROJECTED} - {RAW}"]["value"] for one in found], "+.3f")]
        raw = [one["distances"][RAW]["value"] for one in found]
        cells += [
            spread([row["parts"][name] - value for row, value in zip(chosen, raw, strict=True)], "+.3f") for name in names
        ]
        lines.append(f"| {state} | {' | '.join(cells)} |")
    return lines


def format_means(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: the mean score of each form over time, less one, in per cent.

    Args:
        rows: All rows.
    """
    names = (RAW, PROJECTED, KEPT, CLIPPED)
    lines = [f"| training steps | t | {' | '.join(names)} |", "|---" * 6 + "|"]
    for state in STATES:
        chosen = [row["mean_scores"] for row in rows if row["state"] == state]
        for at, one in enumerate(chosen[0]):
            cells = [spread([100 * (means[at][name] - 1) for means in chosen], "+.1f") for name in names]
            lines.append(f"| {state} | {one['t']} | {' | '.join(cells)} |")
    return lines


def format_errors(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table over time: the score entropy as it is, and how much each form adds to it; and fractions.

    Args:
        rows: All rows.
    """
    names = (PROJECTED, KEPT, CLIPPED)
    heads = [
        "training steps",
        "t",
        RAW,
        *names,
        "true token without probability, as it is",
        PROJECTED,
        "sum above any posterior's",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for state in STATES:
        chosen = [row["score_errors"] for row in rows if row["state"] == state]
        for at, one in enumerate(chosen[0]):
            found = [errors[at] for errors in chosen]
            losses = [each["score_entropy"] for each in found]
            cells = [spread([loss[RAW] for loss in losses])]
            cells += [spread([loss[name] - loss[RAW] for loss in losses], "+.3f") for name in names]
            cells += [f"{sum(each['zero'][name] for each in found) / len(found):.1%}" for name in (RAW, PROJECTED)]
            cells.append(f"{sum(each['above'] for each in found) / len(found):.1%}")
            lines.append(f"| {state} | {one['t']} | {' | '.join(cells)} |")
    return lines


def spread(values: list[float], spec: str = ".3f") -> str:
    """Return the mean of some values with its standard error.

    Args:
        values: One value for each seed.
        spec: The format of the mean.
    """
    found = torch.tensor(values, dtype=torch.float64)
    error = float(found.std()) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{format(float(found.mean()), spec)} ± {format(error, spec.lstrip('+'))}"


def main(arguments: list[str] | None = None) -> int:
    """Compute the rows that are not finished, or write the table; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help="samples of each form (%(default)s)")
    parser.add_argument("--table", action="store_true", help="write the result file from the rows, and print the tables")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="the result file")
    options = parser.parse_args(arguments)
    try:
        if options.samples < 4:
            raise UserError(option="samples", value=options.samples, expected="at least 4, for a standard error")
        if not options.table:
            compute(options.out, options.samples)
            return 0
        paths = [options.out / f"{seed}-{state}{part}.json" for seed in SEEDS for state in STATES for part in PARTS]
        if missing := [path.name for path in paths if not path.exists()]:
            raise UserError(f"{options.out} has no {missing[0]}: compute the rows first, without --table")
        files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        rows = [dict(ChainMap(*files[at : at + len(PARTS)])) for at in range(0, len(files), len(PARTS))]
        write_json(options.results, {"command": command(), "samples": options.samples, "rows": rows})
        tables = (format_distances(rows), format_parts(rows), format_means(rows), format_errors(rows))
        print("\n".join([*(line for table in tables for line in [*table, ""]), f"{options.results} written"]))
        return 0
    except UserError as error:
        print(f"repair.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
