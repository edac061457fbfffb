"""Generative perplexity as JSON and as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from m2s.errors import counted
from m2s.evaluation.bootstrap import bootstrap, paired_bootstrap
from m2s.evaluation.genppl.scores import STATISTICS, Scores


def summarize(scores: Scores, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Summarize the scores of one file, with 95% bootstrap intervals over its sequences.

    Args:
        scores: The scores.
        resamples: The number of bootstrap resamples.
        seed: The seed of the bootstrap.

    Returns:
        Perplexity, NLL and entropy with intervals, counts, settings, and the numbers of each sequence.
    """
    columns = scores.columns
    result = {name: asdict(bootstrap(columns, statistic, resamples, seed)) for name, statistic in STATISTICS.items()}
    return {
        "file": str(scores.samples.path),
        "protocol": asdict(scores.samples.protocol),
        "departures": protocol_departures(scores),
        "judge": scores.judge,
        "samples": len(scores.samples),
        "distinct": scores.distinct,
        "unscored": int((scores.tokens == 0).sum()),
        "tokens": int(scores.tokens.sum()),
        "bytes": int(scores.bytes.sum()),
        "perplexity": result[f"perplexity_over_{scores.samples.protocol.average}"],
        **result,
        "entropy_of_all_bits": scores.corpus_entropy / math.log(2),
        "entropy_of_all_nats": scores.corpus_entropy,
        "entropy_counts_tokens_of": scores.entropy_of,
        "bootstrap": {"resamples": resamples, "seed": seed, "level": 0.95, "unit": "sequence"},
        "settings": scores.samples.settings,
        "sequences": {
            "nll": scores.nll.tolist(),
            "tokens": scores.tokens.astype(int).tolist(),
            "bytes": scores.bytes.astype(int).tolist(),
            "entropy_nats": scores.entropy.tolist(),
        },
    }


def protocol_departures(scores: Scores) -> list[str]:
    """List what differs from the protocol.

    Args:
        scores: The scores.

    Returns:
        One sentence for each departure.
    """
    protocol, count, found = scores.samples.protocol, len(scores.samples), []
    if Path(scores.judge["name"]).name.lower() != Path(protocol.judge).name.lower():
        found.append(f"the judge is {scores.judge['name']}, not {protocol.judge}")
    if protocol.samples not in (None, count):
        found.append(f"{counted(count, 'sample')}, not {protocol.samples}")
    tokens = scores.samples.tokens
    if tokens is None and protocol.tokens is not None:
        found.append(f"the file holds no tokens: texts are cut at {protocol.tokens} tokens of the judge instead of the sample")
    elif tokens is not None and protocol.tokens is not None and tokens.shape[1] < protocol.tokens:
        found.append(f"samples of {tokens.shape[1]} tokens, not {protocol.tokens}")
    return found


def paired_difference(first: Scores, second: Scores, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Compare two sets of samples in pairs, with 95% bootstrap intervals over pairs.

    Args:
        first: The scores of one set.
        second: The scores of the other. Sample i of both is a pair.
        resamples: The number of bootstrap resamples.
        seed: The seed of the bootstrap.

    Returns:
        Every statistic as first minus second, and whether both were drawn on the same noise ("same_noise"; None: unknown).

    Raises:
        ValueError: The sets have different sizes.
    """
    seeds = [(one.samples.settings.get("seed"), one.samples.settings.get("start")) for one in (first, second)]
    unknown = any(None in pair for pair in seeds)
    gaps = {
        name: asdict(paired_bootstrap(first.columns, second.columns, statistic, resamples, seed))
        for name, statistic in STATISTICS.items()
    }
    return {
        "file": str(first.samples.path),
        "against": str(second.samples.path),
        "judge": first.judge["name"],
        "same_noise": None if unknown else seeds[0] == seeds[1],
        "perplexity": gaps[f"perplexity_over_{first.samples.protocol.average}"],
        **gaps,
    }


def _temperatures(results: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """Return the temperature of each file; None unless every file has one and all differ."""
    known = [result["settings"].get("temperature") for result in results]
    return None if None in known or len(set(known)) < len(known) else known


def sort_by_temperature(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort results along the frontier.

    Args:
        results: The summaries of several files.

    Returns:
        The results by temperature, where all temperatures are known and differ; else in the given order.
    """
    return sorted(results, key=lambda result: result["settings"]["temperature"]) if _temperatures(results) else list(results)


def format_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the summaries of several files as a table.

    Args:
        results: The summaries.

    Returns:
        A heading and one line for each file.
    """
    width = max(len(Path(result["file"]).name) for result in results)
    average = results[0]["protocol"]["average"]
    head = (
        f"{'file':{width}s}  {'T':>5s}  {'samples':>7s}  {'distinct':>8s}  {'entropy':>7s}  {'perplexity':>10s}  {'95%':>19s}"
    )
    mean = "mean of PPL" if average == "tokens" else "PPL of mean"
    lines = [f"{head}  {'nats/token':>10s}  {'bits/byte':>9s}  {mean:>11s}  judge"]
    other = "perplexity_over_sequences" if average == "tokens" else "perplexity_over_tokens"
    for result in results:
        p, nats, bits = (result[name] for name in ("perplexity", "nats_per_token", "bits_per_byte"))
        interval = f"{p['low']:.2f} .. {p['high']:.2f}"
        lines.append(
            f"{Path(result['file']).name:{width}s}  {result['settings'].get('temperature', ''):>5}  {result['samples']:>7,}  "
            f"{result['distinct']:>8,}  {result['entropy_bits']['value']:>7.3f}  {p['value']:>10.2f}  {interval:>19s}  "
            f"{nats['value']:>10.4f}  {bits['value']:>9.4f}  {result[other]['value']:>11.2f}  "
            f"{Path(result['judge']['name']).name}"
        )
    return lines


def format_notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Explain the numbers of the table, and list departures from the protocol.

    Args:
        results: The summaries of several files.

    Returns:
        Lines of text.
    """
    result = results[0]
    protocol = result["protocol"]
    average = (
        "exp of the mean NLL over tokens" if protocol["average"] == "tokens" else "mean over sequences of each one's perplexity"
    )
    whose = " or ".join(sorted({f"the {one['entropy_counts_tokens_of']}'s" for one in results}))
    lines = [
        f"perplexity: {average}, by {result['judge']['name']}, protocol {protocol['name']} ({protocol['description']})",
        f"entropy: bits of {whose} tokens within a sequence, mean over sequences (others give nats: bits x 0.693)",
    ]
    for found in dict.fromkeys(found for one in results for found in one["departures"]):
        names = [Path(one["file"]).name for one in results if found in one["departures"]]
        where = "" if len(names) == len(results) else f" ({', '.join(names)})"
        lines.append(f"not as in the protocol{where}: {found}")
    lines += [
        f"{Path(one['file']).name}: no token to score in {counted(one['unscored'], 'sample')}"
        for one in results
        if one["unscored"]
    ]
    return lines
