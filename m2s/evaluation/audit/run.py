"""Draw samples and audit every score on the way."""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.evaluation.audit.auditor import Audit
from m2s.evaluation.audit.stats import StepStats, stats_from_json
from m2s.heads import Head
from m2s.io import parse_json, read_regular, write_json
from m2s.ops.last_layer import Output
from m2s.realizability.quadratic import LIMIT
from m2s.rng import draw_seed
from m2s.samplers import StepEvent, default_sampler, sample
from m2s.samplers.options import SamplingOptions
from m2s.samplers.shards import CorruptShardError, SampleShards


def check_auditable(head: Head) -> None:
    """Check that a head has scores that can be audited.

    Args:
        head: The head.

    Raises:
        TypeError: It has none. The message says why, and what to use instead.
    """
    validation.instance("head", head, Head, "a head such as m2s.LogScore(process)")
    process = head.process
    if head.exact:
        raise TypeError(f"{head} has no noise, so there are no scores to audit: audit a diffusion model, such as one of sedd")
    if process.chain is not None:
        raise TypeError(
            f"{head} is for a finite chain, which has no rates and so no scores to audit: "
            "train a score over m2s.Uniform, m2s.Absorbing, m2s.Hybrid or m2s.RateMatrix"
        )
    if process.rank_one is None and process.states > LIMIT:
        raise TypeError(
            f"{process} has {process.states} states, but scores of tabulated processes are projected up to {LIMIT}: "
            "audit a rank-one process (m2s.Uniform, m2s.Absorbing, m2s.Hybrid)"
        )


def audit_sampling(
    model: Callable[..., Output], options: SamplingOptions, callback: Callable[[StepEvent], None] | None = None
) -> tuple[Int[Tensor, "n L"], Audit]:
    """Draw samples and audit every score.

    Args:
        model: The network.
        options: What to sample, and how.
        callback: Called after every step, for a progress bar.

    Returns:
        The samples [n, L], which are those of `m2s.sample`, and the counts.

    Raises:
        ValueError: The network returned NaN.
    """
    found = Audit(options.head, options.sampler_object.name, options.steps, options.seed)

    def examine(step: StepEvent) -> None:
        found(step)
        if callback is not None:
            callback(step)

    with validation.checked():
        return sample(model, callback=examine, **_arguments(options)), found


def _arguments(options: SamplingOptions) -> dict[str, Any]:
    """The options as arguments of `m2s.sample`."""
    return {part.name: getattr(options, part.name) for part in fields(options)}


def audit(
    model: Callable[..., Output],
    head: Head,
    shape: tuple[int, int],
    steps: int = 128,
    sampler: str = "auto",
    grid: str = "linear",
    seed: int | None = None,
    batch_size: int | None = None,
) -> Audit:
    """Draw samples as `m2s.sample` does, and audit every score on the way.

    The network is called in evaluation mode, as `m2s.sample` calls it.

    Args:
        model: The network, called as model(x_t, t).
        head: What its output means.
        shape: The number of samples and the number of tokens of each, (n, L).
        steps: The number of sampling steps.
        sampler: The name of a sampler. "auto": analytic, as in SEDD's release, or euler where rates are tabulated.
        grid: The time grid.
        seed: The seed of the samples; None: drawn from torch's global CPU generator. `Audit.seed` has the number that was used.
        batch_size: Samples that are drawn together; None: 64, or one micro-batch if that is more.

    Returns:
        The counts. They print as the fractions of the four classes; `summary()` has all of them.

    Raises:
        TypeError: The head has no scores to audit.

    Example:
        >>> m2s.audit(model, m2s.LogScore(m2s.Uniform(6, m2s.Linear())), (5, 5), steps=4)
        Audit(31.00% outside, 54.00% material, 0.00% boundary, 15.00% realizable of 100 scores)
    """
    check_auditable(head)
    if batch_size is not None:
        validation.positive_int("batch_size", batch_size)
    sampler = default_sampler(head, for_audit=True) if sampler == "auto" else sampler
    drawn = draw_seed() if seed is None else seed
    options = SamplingOptions(head, shape, steps, sampler, grid, drawn, batch_size=batch_size)
    size = batch_size or max(64, options.call_rows)
    total = Audit(head, options.sampler_object.name, steps, options.seed)
    for first in range(0, shape[0], size):
        batch = replace(options, shape=(min(size, shape[0] - first), shape[1]), start=first)
        total.merge(audit_sampling(model, batch)[1].calls)
    return total


def audit_parts(
    model: Callable[..., Output],
    options: SamplingOptions,
    parts: SampleShards,
    callback: Callable[[StepEvent], None] | None = None,
    audited: int | None = None,
) -> Audit:
    """Audit samples in batches that are stored on disk, so that an interrupted audit resumes.

    Args:
        model: The network.
        options: What to sample, and how.
        parts: Where the tokens of each batch are stored. A JSON file beside each holds its counts. Batches that are already
            there are not drawn again.
        callback: Called after every step, for a progress bar.
        audited: Audit only the batches that begin before this sample. The others are drawn without; None: audit all.

    Returns:
        The counts over all batches.

    Raises:
        TypeError: The head has no scores to audit.
        CorruptShardError: A stored file is damaged.
    """
    check_auditable(options.head)
    for first, count in parts.missing():
        batch = replace(options, shape=(count, options.shape[1]), start=options.start + first)
        calls: list[StepStats] = []
        if audited is None or first < audited:
            tokens, found = audit_sampling(model, batch, callback)
            calls = found.calls
        else:
            tokens = sample(model, callback=callback, **_arguments(batch))
        write_json(_counts_file(parts, first), [asdict(stats) for stats in calls])
        parts.write(first, tokens)
    total = Audit(options.head, options.sampler_object.name, options.steps, options.seed)
    for first in parts.starts():
        path = _counts_file(parts, first)
        try:
            total.merge(stats_from_json(parse_json(read_regular(path), kind=list)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptShardError(
                f"{path} is damaged ({error!s:.300}): delete {parts.folder} and run the same command again"
            ) from None
    return total


def _counts_file(parts: SampleShards, first: int) -> Path:
    """Return the path of the counts of a batch."""
    return parts.folder / f"{first:09d}.json"
