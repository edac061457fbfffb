"""The paper's repair experiment: samples on the same noise, with the scores as they are and with projected scores.

Pairs are compared directly (`count_changes`), and by a metric: generative perplexity (`compare_by_judge`, paired over
sequences) or FID (`fid_difference`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.evaluation.fid import Statistics, frechet
from m2s.evaluation.genppl import Samples, paired_difference, score, summarize
from m2s.evaluation.judge import Judge
from m2s.realizability import SCORE_CLASSES

ARMS = ("unprojected", "projected")
TITLES = {"unprojected": "score as it is", "projected": "projected score"}


def count_changes(unprojected: Int[Tensor, "n L"], projected: Int[Tensor, "n L"]) -> dict[str, int]:
    """Count what the projection changed.

    Args:
        unprojected: Samples of the scores as they are, [n, L].
        projected: Samples of the projected scores on the same noise, [n, L].

    Returns:
        Tokens and samples, how many of them changed, and how many samples of each set are distinct.
    """
    differ = unprojected != projected
    return {
        "tokens": differ.numel(),
        "tokens_changed": int(differ.sum()),
        "samples": len(differ),
        "samples_changed": int(differ.any(-1).sum()),
        "distinct_unprojected": len(unprojected.unique(dim=0)),
        "distinct_projected": len(projected.unique(dim=0)),
    }


def fid_difference(
    unprojected: Float[Tensor, "n D"],
    projected: Float[Tensor, "m D"],
    reference: Statistics,
    resamples: int = 100,
    seed: int = 0,
) -> dict[str, float]:
    """Compute FID(projected) - FID(unprojected), with the 95% percentile bootstrap interval over pairs.

    A resample has fewer distinct images than the samples, which raises both FIDs; their difference is still meaningful.

    Args:
        unprojected: Features of the samples of the scores as they are, [n, D].
        projected: Features of the samples of the projected scores, [n, D]. Sample i of both is a pair.
        reference: The features of the data.
        resamples: The number of bootstrap resamples, at least 100.
        seed: The seed of the bootstrap.

    Returns:
        "value", "low" and "high".

    Raises:
        ValueError: The sets have different sizes, or `resamples` is too small.
    """
    if unprojected.shape != projected.shape or len(unprojected) < 2:
        raise ValueError(
            f"features have shapes {list(unprojected.shape)} and {list(projected.shape)}, but both must be "
            "the same [n, D] with n at least 2"
        )
    if resamples < 100:
        raise ValueError(f"resamples is {resamples}, but an interval needs at least 100")
    generator = np.random.default_rng(seed)
    everyone = np.arange(len(unprojected))
    indices = [everyone, *(generator.integers(len(unprojected), size=len(unprojected)) for _ in range(resamples))]

    def distance(features: Tensor, at: Any) -> float:
        statistics = Statistics.empty(features.shape[1])
        statistics.update(features[torch.from_numpy(at)])
        return frechet(statistics, reference)

    value, *drawn = (distance(projected, at) - distance(unprojected, at) for at in indices)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high)}


def compare_by_judge(
    unprojected: Samples, projected: Samples, judge: Judge, batch_size: int = 8, resamples: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Score both sets of samples by one judge, and compare them in pairs.

    Args:
        unprojected: Samples of the scores as they are.
        projected: Samples of the projected scores.
        judge: The language model.
        batch_size: Sequences that the judge reads at once.
        resamples: The number of bootstrap resamples.
        seed: The seed of the bootstrap.

    Returns:
        The summaries of both sets and their difference.
    """
    scores = {arm: score(samples, judge, batch_size) for arm, samples in zip(ARMS, (unprojected, projected), strict=True)}
    return {
        "kind": "genppl",
        **{arm: summarize(one, resamples, seed) for arm, one in scores.items()},
        "difference": paired_difference(scores["projected"], scores["unprojected"], resamples, seed),
    }


def format_table(result: Mapping[str, Any]) -> str:
    """Format the result as text: the paper's table of the projection experiment, and the classes of the scores.

    Args:
        result: The contents of repair.json.

    Returns:
        Lines of text.
    """
    lines = [f"{result['checkpoint']}: {result['head']}", *_format_measure(result["measure"])]
    counts = result["changes"]
    lines += [
        "",
        f"{'':16} {'outside':>10} {'material':>10} {'boundary':>10} {'realizable':>10} {'w < 0':>10} {'distinct':>9}",
    ]
    for arm in ARMS:
        overall = result["audits"][arm]["overall"]
        sites, before = overall["position_steps"], overall["before"]
        fractions = " ".join(f"{_fraction(before['classes'][name], sites):>10}" for name in SCORE_CLASSES)
        weights = _fraction(before["negative_weights"], sites)
        lines.append(f"{TITLES[arm]:16} {fractions} {weights:>10} {counts[f'distinct_{arm}']:>9,}")
    lines.append(
        f"{counts['tokens_changed'] / counts['tokens']:.2%} of {counts['tokens']:,} tokens and {counts['samples_changed']:,} "
        f"of {counts['samples']:,} samples differ; the same noise for both."
    )
    audited = result["audits"]["unprojected"]["settings"].get("audited")
    if audited is not None:
        lines.append(f"The scores of the batches of the first {audited:,} pairs are classified, and no others.")
    return "\n".join(lines)


def _fraction(count: int | None, total: int) -> str:
    """Return count / total in per cent; "-" where nothing was counted."""
    return "-" if count is None or not total else f"{count / total:.4%}"


def _format_measure(measure: Mapping[str, Any] | None) -> Sequence[str]:
    """Format the metric of both sets, where there is one."""
    if measure is None:
        return ()
    if measure["kind"] == "fid":
        gap, network = measure["difference"], measure["network"]
        lines = ["", f"{'score input':16} {'FID':>10}"]
        lines += [f"{TITLES[arm]:16} {measure[arm]:>10.4f}" for arm in ARMS]
        if gap is None:
            lines.append("too many samples for an interval over pairs")
        else:
            interval = f"[{gap['low']:+.4f}, {gap['high']:+.4f}]"
            lines.append(f"projected minus unprojected: {gap['value']:+.4f}, 95% of resampled pairs {interval}")
        if network["name"] != "inception-2015-12-05":
            lines.append(f"features of {network['file']}, which is not FID's Inception: compare with no published figure")
        return lines
    lines = ["", f"{'score input':16} {'average NLL':>12} {'GenPPL':>10} {'95% interval':>22}  judge"]
    judge = Path(measure["unprojected"]["judge"]["name"]).name
    for arm in ARMS:
        nats, perplexity = measure[arm]["nats_per_token"], measure[arm]["perplexity"]
        interval = f"[{perplexity['low']:.2f}, {perplexity['high']:.2f}]"
        lines.append(f"{TITLES[arm]:16} {nats['value']:>12.5f} {perplexity['value']:>10.2f} {interval:>22}  {judge}")
    gap = measure["difference"]["nats_per_token"]
    lines.append(
        f"projected minus unprojected, in pairs: {gap['value']:+.4f} nats a token by {judge}, "
        f"95% bootstrap [{gap['low']:+.4f}, {gap['high']:+.4f}]"
    )
    first = measure["unprojected"]
    return [*lines, *(f"not as in the protocol {first['protocol']['name']}: {what}" for what in first["departures"])]
