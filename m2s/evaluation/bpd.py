"""The bound on the likelihood of a data set, term by term, with the errors of its estimate.

    -log p(x_0) <= integral + prior + reconstruction        (as in m2s.elbo, where the terms are)

Times have the density p(t) ~ 1/(t + 0.01) on [t_min, T] and the weight 1/p(t), for the integrand is noisiest near 0: there a
site is changed with probability ~t and then costs ~1/t. A pass gives each of N rows one time, in its own of N equal intervals
of quantiles, dealt out at random. So the mean of a pass is unbiased, and passes are independent of each other. All noise is a
pure function of (seed, row, pass): the size of a batch and the number of processes change nothing but rounding.

    found = bound(model, head, images.test, passes=4)
    found.estimate("bound")        # nats per site
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from m2s import validation
from m2s.data.encode import encode_document
from m2s.data.files import BadData
from m2s.data.sources import Source
from m2s.data.tokenizer import Tokenizer
from m2s.distributed import World
from m2s.heads import Head
from m2s.heads.output import call_model, check_model
from m2s.losses import chain_kl, score_entropy, zero_integral
from m2s.losses.elbo import prior_nats
from m2s.losses.noise import corrupt_by_counter, sample_times
from m2s.losses.objective import Model
from m2s.ops import probe_triton
from m2s.process import Chain
from m2s.process.chain import snap_times, time_interval
from m2s.rng import derived_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALONE = World(0, 1, torch.device("cpu"))
TERMS = ("bound", "integral", "prior", "reconstruction")
IMPORTANCE = 0.01  # c of the density 1/(t + c) of times
PARTS = 50  # greatest number of parts of the time, for the error over rows
LEVEL = 0.95


@runtime_checkable
class EvaluationSet(Protocol):
    """Rows of tokens by index: a tensor [N, L], an m2s.data.Tokens, or anything like them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any:
        """The rows [n, L] of the indices [n]."""


@dataclass(frozen=True)
class Shard:
    """`count` rows spread evenly over all, so that a part of an ordered set stands for all of it."""

    rows: EvaluationSet
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Int[Tensor, "n"]) -> Integer[Tensor, "n *L"]:
        return self.rows[index * len(self.rows) // self.count]


@dataclass(frozen=True)
class DatasetNelbo:
    """Nats of each row in each pass. The integral is the integrand at t times its weight; the prior is known exactly."""

    t: Float[Tensor, "P N"]
    weight: Float[Tensor, "P N"]
    integral: Float[Tensor, "P N"]
    reconstruction: Float[Tensor, "P N"]
    prior: Float[Tensor, "N"]
    length: int
    t_min: float
    end: float
    exact: bool = False  # all but the reconstruction is 0, and that is the likelihood

    @property
    def sites(self) -> Float[Tensor, "N"]:
        """Of each row."""
        return torch.full_like(self.prior, self.length)

    def term(self, name: str) -> Float[Tensor, "P N"]:
        """One of TERMS."""
        if name == "bound":
            return self.integral + self.prior + self.reconstruction
        return getattr(self, name).expand_as(self.integral)

    def minus(self, other: "DatasetNelbo") -> "DatasetNelbo":
        """Row by row and pass by pass. Found with the same rows, passes and seed, both had the same times and noise, and the
        errors of the difference leave out what they had in common."""
        timed = other if self.exact else self
        passes, count = timed.t.shape
        for each in (self, other):
            if (len(each.prior), each.length) != (count, self.length) or not (each.exact or len(each.t) == passes):
                raise ValueError("bounds are subtracted that were found on the same rows, with as many passes")

        def gap(name: str) -> Tensor:
            return (getattr(self, name) - getattr(other, name)).expand(passes, -1)

        parts = (timed.t, timed.weight, gap("integral"), gap("reconstruction"), self.prior - other.prior)
        return DatasetNelbo(*parts, self.length, timed.t_min, timed.end, timed.exact)

    def estimate(self, name: str, units: Float[Tensor, "N"] | None = None) -> "Estimate":
        """R = sum of a term / sum of units (sites, unless others are given) in each pass, averaged over passes.

        The error over rows takes out what stratified times do not leave to chance. With v_pi the term of row i in pass p, u_i
        its units, and f_pi the mean of v over all that fell into the same of some equal parts of the quantiles of time:

            sqrt(PN/(PN - parts) sum_i d_i^2) / sum_i u_i,     d_i = mean_p (v_pi - f_pi) - R (u_i - mean u)
        """
        values, units = self.term(name), self.sites if units is None else units
        passes, count = values.shape
        total, each = float(units.sum()), values.sum(1) / units.sum()
        ratio, error, low, high, rows_error = float(each.mean()), None, None, None, None
        if passes > 1:
            error = float(each.std()) / math.sqrt(passes)
            reach = student(passes - 1) * error
            low, high = ratio - reach, ratio + reach
        if count > 1:
            parts = 1 if self.exact else max(1, min(PARTS, count // 4))
            part = self.t.argsort(1).argsort(1) * parts // count
            mean = torch.zeros(parts, dtype=values.dtype).scatter_reduce(
                0, part.flatten(), values.flatten(), "mean", include_self=False
            )
            deviation = (values - mean[part]).mean(0) - ratio * (units - units.mean())
            freedom = 1 - parts / (passes * count)
            rows_error = math.sqrt(float(deviation.square().sum()) / freedom) / total
        return Estimate(ratio, error, low, high, rows_error)


@torch.no_grad()
def dataset_nelbo(
    model: Model,
    head: Head,
    rows: EvaluationSet,
    passes: int = 4,
    t_min: float = 1e-3,
    seed: int = 0,
    batch_size: int = 64,
    labels: Int[Tensor, "N"] | None = None,
    bf16: bool = False,
    world: World = ALONE,
) -> DatasetNelbo:
    """The terms of the bound of every row, at `passes` times each. Processes of a `world` share the batches and all get all.

    With `bf16` the network runs under autocast, as in training; what follows its output is float32 or wider in any case.
    """
    from tqdm import tqdm

    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    validation.positive_int("passes", passes)
    validation.positive_int("seed", seed, 0)
    validation.positive_int("batch_size", batch_size)
    if not 0 < t_min < 0.5:
        raise ValueError(f"t_min is {t_min}, but it must lie in (0, 0.5)")
    count, process, device = len(rows), head.process, world.device
    check_model(model, process)
    probe_triton(device)
    validation.positive_int("len(rows)", count)
    low, end = time_interval(process, t_min)
    integrand = zero_integral if head.exact else chain_kl if isinstance(process, Chain) else score_entropy
    passes = 1 if head.exact else passes  # all would be the same
    seeds = [derived_seed(seed, "bpd", term) for term in ("integral", "reconstruction")]
    everyone = torch.arange(count)
    drawn = [sample_times(everyone, count, seeds[0], number, low, end, IMPORTANCE) for number in range(passes)]
    t, weight = (torch.stack(values) for values in zip(*drawn, strict=True))
    start = snap_times(process, torch.full((count,), low, dtype=torch.float64))
    integral, reconstruction = torch.zeros(2, passes, count, dtype=torch.float64, device=device)
    prior = torch.zeros(count, dtype=torch.float64, device=device)

    def network(x_t: Tensor, t: Tensor, label: Tensor | None) -> Any:
        seen = t.clamp(t_min, 1 - t_min).to(torch.get_default_dtype())
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return call_model(model, process, x_t, seen, label)

    with tqdm(total=count * passes, desc="bound", unit="row", disable=None if world.first else True) as bar:
        for first in range(world.rank * batch_size, count, world.size * batch_size):
            indices = everyone[first : first + batch_size]
            at, early = indices.to(device), start[indices].to(device)
            x_0 = rows[indices].to(device).long()
            label = None if labels is None else labels[indices].to(device)
            at_end = prior_nats(head, functools.partial(network, label=label), x_0, end, shared=label is None)
            prior[at] = at_end.double().sum(-1)
            for number in range(passes):
                time = snap_times(process, t[number, indices].to(device))
                x_t = corrupt_by_counter(process, x_0, time, at, seeds[0], number)
                loss = integrand(head, network(x_t, time, label), x_0, x_t, time)
                integral[number, at] = weight[number, indices].to(device) * loss.double().sum(-1)

                x_t = corrupt_by_counter(process, x_0, early, at, seeds[1], number)
                distribution = head.last_step(network(x_t, early, label), x_t, early)
                reconstruction[number, at] = -distribution.gather(-1, x_0.unsqueeze(-1)).squeeze(-1).double().sum(-1)
                bar.update(len(indices))
    integral, reconstruction, prior = (world.sum(term).cpu() for term in (integral, reconstruction, prior))
    return DatasetNelbo(t, weight, integral, reconstruction, prior, rows[everyone[:1]].shape[1], low, end, head.exact)


@dataclass(frozen=True)
class Estimate:
    """A figure with two standard errors, that mean different things.

    `error` is over passes: times and noise were drawn, the rows are these. [low, high] is Student's 95% interval of it.
    `rows_error` is over rows: had other rows been drawn too, as many, each independent of the others.
    """

    value: float
    error: float | None  # None with a single pass
    low: float | None
    high: float | None
    rows_error: float | None  # None with a single row

    def scaled(self, factor: float) -> "Estimate":
        return Estimate(*(None if x is None else factor * x for x in asdict(self).values()))  # type: ignore[arg-type]

    def exp(self) -> "Estimate":
        """Of exp(value): the interval's ends are mapped, errors are multiplied by the slope."""
        value, low, high = (None if x is None else math.exp(min(x, 700.0)) for x in (self.value, self.low, self.high))
        assert value is not None
        error, rows_error = (None if x is None else value * x for x in (self.error, self.rows_error))
        return Estimate(value, error, low, high, rows_error)


def student(freedom: int, level: float = LEVEL) -> float:
    """The t with Pr(|T| < t) = level for Student's T of `freedom` degrees.

    With theta = atan(t / sqrt(freedom)) that probability is a finite sum of powers of cos theta (Abramowitz and Stegun
    26.7.3, 26.7.4); it is solved for theta by bisection.
    """
    validation.positive_int("freedom", freedom)
    odd = freedom % 2

    def probability(theta: float) -> float:
        cosine, total = math.cos(theta), 0.0
        term = cosine**odd
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= cosine**2 * (power + 1) / (power + 2)
        return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def curve(found: DatasetNelbo, bins: int = 20) -> list[dict[str, Any]]:
    """The integrand in bits per site over equal intervals of t: its mean and standard error in each; None where too few fell.

    mean = sum w h / sum w over the samples inside, h the integrand and w the weight of its time; its error is
    sqrt(n/(n-1) sum w^2 (h - mean)^2) / sum w. The means times the widths add up to about the integral.
    """
    validation.positive_int("bins", bins)
    t, weight = found.t.flatten(), found.weight.flatten()
    height = found.integral.flatten() / weight / found.length / math.log(2)
    edges = np.linspace(found.t_min, found.end, bins + 1).tolist()
    place = (bins * (t - found.t_min) / (found.end - found.t_min)).long().clamp(max=bins - 1)
    result = []
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        w, h = weight[place == number], height[place == number]
        count, total = len(h), float(w.sum())
        mean = float((w * h).sum()) / total if count else math.nan
        spread = float((w * (h - mean)).square().sum())
        error = math.sqrt(count / (count - 1) * spread) / total if count > 1 else None
        result.append({"from": low, "to": high, "samples": count, "bits": mean if count else None, "error": error})
    return result


def sizes(tokenizer: Tokenizer) -> Int[np.ndarray, "V 2"]:
    """Bytes and characters of each token; a character counts where its first byte is, an end of text has neither.

    So they add up, however a window cuts a character.
    """
    pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab)]
    return np.array([(len(piece), sum(byte & 0xC0 != 0x80 for byte in piece)) for piece in pieces])


def measured(rows: EvaluationSet, tokenizer: Tokenizer, chunk: int = 1024) -> dict[str, Float[Tensor, "N"]]:
    """Bytes ("byte") and characters ("character") of each row."""
    table = torch.from_numpy(sizes(tokenizer))
    parts = [table[rows[indices].long()].sum(1) for indices in torch.arange(len(rows)).split(chunk)]
    both = torch.cat(parts).double()
    return {"byte": both[:, 0], "character": both[:, 1]}


def windows(sources: Sequence[Source], tokenizer: Tokenizer, length: int) -> tuple[Int[Tensor, "N L"], int]:
    """The documents of the sources, each with the tokenizer's end after it, as one stream cut into windows of `length`.

    What is left at the end, less than a window, is left out; the second result says how many tokens that are.
    """
    from tqdm import tqdm

    def encoded() -> Iterable[np.ndarray]:
        for source in sources:
            for document in tqdm(source.read(0), desc=source.name, unit="document", disable=None, leave=False):
                if document.text.strip():
                    ids = encode_document(tokenizer, document.text)
                    if isinstance(ids, str):
                        raise BadData(f"{source.name}, document at {document.where} {ids}")
                    yield ids

    parts = list(encoded())
    stream = np.concatenate(parts) if parts else np.zeros(0)
    count, left = divmod(len(stream), length)
    if not count:
        names = ", ".join(source.name for source in sources)
        raise BadData(f"{names} holds {left} tokens, too few for one window of {length}: give more text")
    return torch.from_numpy(stream[: count * length].astype(np.int32).reshape(count, length)), left


def summary(found: DatasetNelbo, text: Mapping[str, Float[Tensor, "N"]] | None = None) -> dict[str, dict[str, Any]]:
    """Every term of TERMS in bits and nats per site and, for text, in bits per each unit of which a row's numbers are given.

    For text also the perplexity, exp(nats per token), of the bound and of the integral alone.
    """
    result: dict[str, dict[str, Any]] = {}
    for name in TERMS:
        nats = found.estimate(name)
        each = {"bits": nats.scaled(1 / math.log(2)), "nats": nats}
        if text is not None:
            each |= {f"bits_per_{unit}": found.estimate(name, n).scaled(1 / math.log(2)) for unit, n in text.items()}
            if name in ("bound", "integral"):
                each["perplexity"] = nats.exp()
        result[name] = {measure: asdict(value) for measure, value in each.items()}
    return result


LEGEND = """bound = integral + prior + reconstruction >= -log p; most papers report the integral alone, which is no bound
± times: standard error over passes (other times and noise, the same rows), with Student's 95% interval; ± rows: over rows"""


EXACT = """-log p itself, known exactly: no bound, no passes, no times; ± rows: standard error over rows"""


def table(result: Mapping[str, Mapping[str, Any]], unit: str, exact: bool = False) -> list[str]:
    """One line for each term, and for each other measure of the bound and of the integral; then what they mean. Where the
    likelihood is known exactly, one line for each measure of it."""
    lines = [f"{f'bits per {unit}':30s}{'':>12s}{'± times':>11s}{'± rows':>11s}   95% (times)"]
    lines += [_line(name, result[name]["bits"]) for name in ("integral", "prior", "reconstruction", "bound")]
    others = {measure: measure.replace("_", " ") for measure in result["bound"] if measure != "bits"}
    others["nats"] = f"nats per {unit}"
    if exact:
        measures = {"bits": "-log p", **others}
        return [lines[0], *(_line(shown, result["bound"][measure]) for measure, shown in measures.items()), EXACT]
    for measure, name in itertools.product(others, ("integral", "bound")):
        lines.append(_line(f"{others[measure]}, {name}", result[name][measure]))
    return [*lines, *LEGEND.splitlines()]


def difference(
    against: str,
    theirs: Mapping[str, Mapping[str, Any]],
    gaps: Mapping[str, Mapping[str, Any]],
    unit: str,
    exact: tuple[bool, bool] = (False, False),
) -> list[str]:
    """The other's bound, and ours minus theirs, term by term; of a likelihood that is known exactly (`exact`, of ours and of
    theirs) there are no terms, and the whole alone is compared."""
    name = "its -log p" if exact[1] else "its bound"
    lines = [f"bits per {unit}, against {against}", _line(name, theirs["bound"]["bits"])]
    if any(exact):
        same = "rows" if all(exact) else "rows; one is -log p itself, the other a bound, which is above its own"
        return [
            *lines,
            _line("difference", gaps["bound"]["bits"]),
            f"difference: the first minus the second, on the same {same}",
        ]
    lines += [_line(f"difference, {name}", gaps[name]["bits"]) for name in TERMS]
    return [*lines, "difference: the first minus the second, on the same rows, times and noise; below 0 the first is better"]


def _line(name: str, value: Mapping[str, float | None]) -> str:
    digits = 2 if (value["value"] or 0) >= 100 else 5
    error, rows_error = ("-" if value[key] is None else f"{value[key]:.{digits}f}" for key in ("error", "rows_error"))
    span = "-" if value["low"] is None else f"{value['low']:.{digits}f} .. {value['high']:.{digits}f}"
    return f"{name:30s}{value['value']:>12.{digits}f}{error:>11s}{rows_error:>11s}   {span}"


INK, MUTED, BLUE = "#1A1A1A", "#5A5A5A", "#004F8A"


def draw(points: Sequence[Mapping[str, Any]], unit: str) -> "Figure":
    """The integrand over t with its standard errors: the area below is the integral."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    known = [point for point in points if point["bits"] is not None]
    left, right = (np.array([point[side] for point in known]) for side in ("from", "to"))
    height, error = (np.array([point[key] or 0.0 for point in known]) for key in ("bits", "error"))
    axes.bar(left, height, right - left, align="edge", color=BLUE, alpha=0.18, lw=0)
    axes.errorbar((left + right) / 2, height, error, (right - left) / 2, fmt="none", color=BLUE, lw=1.6, elinewidth=1.2)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("t", color=INK)
    axes.set_ylabel(f"integrand, bits per {unit}", color=INK)
    axes.set_title("The loss over time; the area is the integral", loc="left", fontsize=11, color=INK)
    axes.tick_params(colors=MUTED, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
