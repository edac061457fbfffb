"""Tokens until a network uses context, with the recipe of `owt` and that of `owt-fast`: a plateau on a CPU.

    python experiments/plateau.py out/plateau            # half an hour on two cores; finished rows are skipped
    python experiments/plateau.py out/plateau --table    # writes experiments/results/plateau.json

The data are sequences of a Markov chain over 512 tokens. Each token has a few successors, so the conditional entropy is far
below the unigram entropy. A row is one training run of `m2s-offset` with a small transformer. It records the NELBO on held-out
sequences over the tokens trained on, and the tokens at which it is first 0.1 nats below the unigram entropy, by linear
interpolation between validations. The learning rate is constant after the warmup, so the length of a run does not matter. The
recipes are those of the two presets: optimizer, learning rate, beta2, density of t and initialization.

The noise of a validation moves its NELBO by about 0.1 nats. So the unigram entropy is estimated on the same noise: as the NELBO
of a network that predicts the unigram distribution everywhere, whose expectation it is.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import m2s
from m2s.data.sequences import Sequences
from m2s.errors import UserError
from m2s.io import output_folder, write_json
from m2s.presets import PRESETS
from m2s.provenance import command, provenance
from m2s.rng import derived_seed
from m2s.training import train
from m2s.training.config import Config, DataConfig, NetworkConfig, RunConfig, replace

RESULTS = Path(__file__).parent / "results" / "plateau.json"
VOCAB, SUCCESSORS, LENGTH, EXAMPLES, HELD_OUT = 512, 8, 64, 8192, 64
RECIPES = {"owt": 700, "owt-fast": 300}
"""The presets, and the training steps of a row: enough to leave the plateau."""
SEEDS = (1, 2, 3, 4, 5)
BELOW = 0.1  # nats below the unigram entropy
SHARED = {
    "method": "m2s-offset",
    "batch": 16,
    "micro_batch": None,
    "validation_samples": HELD_OUT,
    "validation_passes": 2,
    "validate_every": 25,
    "log_every": 25,
    "save_every": 1000,
    "device": "cpu",
    "optimizer.warmup": 50,
    "optimizer.decay": "constant",
    "optimizer.ema": 0.9,
}


def chain(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the successors of each token [VOCAB, SUCCESSORS] and their probabilities, in the same shape.

    Successors are drawn from a Zipf distribution, so that tokens have unequal frequencies, as in text.

    Args:
        seed: Chooses the chain.
    """
    generator = torch.Generator().manual_seed(seed)
    frequency = 1 / torch.arange(1, VOCAB + 1, dtype=torch.float64)
    successors = torch.stack([torch.multinomial(frequency, SUCCESSORS, generator=generator) for _ in range(VOCAB)])
    return successors, torch.softmax(torch.randn(VOCAB, SUCCESSORS, generator=generator, dtype=torch.float64), -1)


def draw(count: int, seed: int) -> Tensor:
    """Draw sequences of the chain, [count, LENGTH], that start in its stationary distribution.

    Args:
        count: The number of sequences.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    successors, probability = chain()
    transition = torch.zeros(VOCAB, VOCAB, dtype=torch.float64).scatter_add_(1, successors, probability)
    stationary = torch.linalg.matrix_power(0.99 * transition + 0.01 / VOCAB, 1024)[0]
    x = torch.empty(count, LENGTH, dtype=torch.long)
    x[:, 0] = torch.multinomial(stationary, count, replacement=True, generator=generator)
    for place in range(1, LENGTH):
        chosen = torch.multinomial(probability[x[:, place - 1]], 1, generator=generator)
        x[:, place] = successors[x[:, place - 1]].gather(1, chosen).squeeze(1)
    return x


def unigram_entropy(train_x: Tensor, held_out: Tensor) -> float:
    """Return the cross entropy of held-out tokens under the smoothed frequencies of the training tokens, in nats.

    Args:
        train_x: Training sequences.
        held_out: Held-out sequences.
    """
    counts = torch.bincount(train_x.flatten(), minlength=VOCAB).double() + 1
    return float(-(counts / counts.sum()).log()[held_out].mean())


def unigram_logits(train_x: Tensor) -> Tensor:
    """Return the logarithms of the smoothed frequencies of the training tokens, [VOCAB].

    Args:
        train_x: Training sequences.
    """
    counts = torch.bincount(train_x.flatten(), minlength=VOCAB).float() + 1
    return (counts / counts.sum()).log()


def unigram_nelbo(head: m2s.heads.Head, run: RunConfig, train_x: Tensor, held_out: Tensor) -> float:
    """Return the NELBO of a network without context on the noise of the validations of a run, in nats per token.

    It predicts the smoothed frequencies of the training tokens at every position. That is the leave-one-out distribution of
    independent tokens, so the expectation of its NELBO is `unigram_entropy`.

    Args:
        head: The head of the run, with the exact offset.
        run: The settings of the run.
        train_x: Training sequences.
        held_out: Held-out sequences, which are one call of the network.
    """
    logits = unigram_logits(train_x)
    generator = torch.Generator().manual_seed(derived_seed(run.seed, "validation", 0))
    passes, t_min = run.validation_passes, run.t_min
    found = m2s.elbo(lambda x_t, t: logits.expand(*x_t.shape, VOCAB), head, held_out, passes, t_min, generator=generator)
    return float(found.nats.sum()) / held_out.numel()


def crossing(tokens: list[int], nats: list[float], level: float) -> float | None:
    """Return the tokens at which the NELBO first falls to a level, interpolated; None where it does not.

    Args:
        tokens: Tokens trained on at each validation.
        nats: The NELBO at each validation.
        level: The level.
    """
    for at, value in enumerate(nats):
        if value <= level:
            if not at:
                return float(tokens[0])
            share = (nats[at - 1] - level) / (nats[at - 1] - value)
            return tokens[at - 1] + share * (tokens[at] - tokens[at - 1])
    return None


def configure(recipe: str, seed: int, out: Path, steps: int) -> Config:
    """Return the configuration of a row.

    Args:
        recipe: The preset.
        seed: The seed of the run.
        out: The folder of the run.
        steps: Training steps.
    """
    preset = PRESETS[recipe]
    network = NetworkConfig(kind="dit", size="tiny", depth=3, width=128, heads=4)
    network = replace(Config(network=network), "network.gates", preset.network.gates).network
    config = replace(replace(preset, "network", network), "data", DataConfig(name="sequences"))
    config = replace(config, "network.embedding_std", preset.network.embedding_std)
    for key, value in {**SHARED, "seed": seed, "out": out, "steps": steps}.items():
        config = replace(config, key, value)
    return config


def trace(config: Config, train_x: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Train, and return the tokens trained on and the NELBO in nats per token at each validation.

    Args:
        config: The configuration of the row.
        train_x: Training sequences.
        held_out: Held-out sequences.
    """
    train(config, Sequences(train_x, VOCAB, validation_x=held_out), quiet=True)
    records = [json.loads(line) for line in (config.run.out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = {record["step"]: record["tokens"] for record in records if "tokens" in record}
    found = [record for record in records if "validation_bits" in record]
    nats = [record["validation_bits"] * math.log(2) for record in found]
    return {"tokens": [tokens[record["step"]] for record in found], "nats": nats}


def measure(recipe: str, seed: int, out: Path, steps: int) -> dict[str, Any]:
    """Train one row and return it.

    Args:
        recipe: The preset.
        seed: The seed of the run.
        out: The folder of the run, removed by the caller.
        steps: Training steps.
    """
    train_x, held_out = draw(EXAMPLES, 1), draw(HELD_OUT, 2)
    config = configure(recipe, seed, out, steps)
    found = trace(config, train_x, held_out)
    unigram = unigram_nelbo(m2s.load(out).head, config.run, train_x, held_out)
    return {
        "recipe": recipe,
        "seed": seed,
        "unigram_nats": unigram_entropy(train_x, held_out),
        "unigram_nelbo_nats": unigram,
        "tokens_to_leave": crossing(found["tokens"], found["nats"], unigram - BELOW),
        "trace": found,
        **provenance(torch.device("cpu")),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of tokens for each recipe, and their ratio. A run that does not leave the plateau counts as infinite.

    Args:
        rows: All rows.
    """
    medians = {}
    for recipe in RECIPES:
        found = [
            math.inf if row["tokens_to_leave"] is None else row["tokens_to_leave"] for row in rows if row["recipe"] == recipe
        ]
        medians[recipe] = statistics.median(found)
    return {"median_tokens": medians, "ratio": medians["owt"] / medians["owt-fast"]}


def main(arguments: list[str] | None = None) -> int:
    """Compute the rows that are not finished, or write the table; return the exit code.

    Args:
        arguments: Arguments in place of `sys.argv`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the rows")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of each row, in place of those of its recipe")
    parser.add_argument("--table", action="store_true", help="write the result file from the rows")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="the result file")
    options = parser.parse_args(arguments)
    rows = {(recipe, seed): options.out / f"{recipe}-{seed}.json" for recipe in RECIPES for seed in SEEDS}
    try:
        if options.table:
            missing = [path.name for path in rows.values() if not path.exists()]
            if missing:
                raise UserError(f"{options.out} has no {missing[0]}: compute the rows first, without --table")
            found = [json.loads(path.read_text(encoding="utf-8")) for path in rows.values()]
            write_json(options.results, {"command": command(), **summarize(found), "rows": found})
            print(f"{options.results}: {summarize(found)}")
            return 0
        output_folder(options.out)
        for (recipe, seed), path in rows.items():
            if not path.exists():
                row = measure(recipe, seed, options.out / "runs" / path.stem, options.steps or RECIPES[recipe])
                write_json(path, row)
                print(f"{path.stem}: {row['tokens_to_leave']} tokens, NELBO {row['trace']['nats'][-1]:.3f}", flush=True)
        return 0
    except UserError as error:
        print(f"plateau.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
