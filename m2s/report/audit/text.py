"""The paper's table of an audit as plain text: the four classes, other counts, and the steps of the sampler."""

from collections.abc import Callable

from m2s.realizability import SCORE_CLASSES
from m2s.report.audit.result import NAMES, AuditResult, criteria, format_heading


def format_table(audit: AuditResult, rows: int | None = None) -> str:
    """Return the paper's table of an audit.

    Args:
        audit: The audit.
        rows: Number of sampler steps to list, evenly spaced. None lists all of them.

    Returns:
        The four classes as in the paper, what else was counted, both before and after projection, and the steps.
    """
    return "\n".join(
        [*format_heading(audit), "", *_class_lines(audit), "", *_other_lines(audit), "", *_step_lines(audit, rows)]
    )


def _fraction(count: int, total: int) -> str:
    """Return count / total in per cent."""
    return f"{count / total:.4%}" if total else "-"


def _class_lines(audit: AuditResult) -> list[str]:
    """Return the paper's table. Its count has no tolerance on the box; the two columns after it have 1e-6."""
    overall, criterion = audit["overall"], criteria(audit)
    total, before, after = overall["position_steps"], overall["before"], overall["after"]
    lines = [f"{'position-step class':25} {'criterion':37} {'fraction':>9} {'count':>13} {'tolerant':>13} {'projected':>13}"]
    lines.append("-" * len(lines[0]))
    for name in SCORE_CLASSES:
        strict, tolerant, projected = before["strict"][name], before["classes"][name], after["classes"][name]
        fraction = _fraction(strict, total)
        lines.append(f"{NAMES[name]:25} {criterion[name]:37} {fraction:>9} {strict:>13,} {tolerant:>13,} {projected:>13,}")
    lines.append(
        "C: the coordinate box, P: the scores that have a posterior, mu~: the signed posterior. fraction, count: as in"
    )
    lines.append("the paper, no tolerance on the box; tolerant: 1e-6 on it; projected: the same, of the projected scores.")
    return lines


def _other_lines(audit: AuditResult) -> list[str]:
    """Return what else was counted, before and after projection."""
    overall = audit["overall"]
    before, after = overall["before"], overall["after"]
    total, coordinates = overall["position_steps"], overall["coordinates"]

    def line(name: str, value: Callable[[AuditResult], str]) -> str:
        return f"{name:45} {value(before):>26} {value(after):>26}"

    def mass(name: str) -> Callable[[AuditResult], str]:
        return lambda counts: f"{counts[name]['mean']:.3e} / {counts[name]['most']:.3e}" if counts[name] else "-"

    def positions(name: str) -> Callable[[AuditResult], str]:
        return lambda counts: "-" if counts[name] is None else f"{_fraction(counts[name], total)} ({counts[name]:,})"

    lines = [
        f"{'':45} {'before':>26} {'projected':>26}",
        line("single scores outside the box", lambda counts: _fraction(counts["coordinates_outside"], coordinates)),
        line("  with no tolerance", lambda counts: _fraction(counts["coordinates_outside_strict"], coordinates)),
        line("positions with mu~ below -1e-6", positions("signed")),
        line("  of them outside the box", positions("overlap")),
        line("negative mass of mu~, mean / most", mass("signed_mass")),
        line("positions with negative sampler weights", positions("negative_weights")),
        line("negative mass of the weights, mean / most", mass("negative_mass")),
        f"moved by the projection, |s' - s| / |s|: mean {overall['moved']['mean']:.3e}, most {overall['moved']['most']:.3e}",
    ]
    lines += _average_lines(audit)
    if overall["excess"]:
        quantiles = ", ".join(f"{float(q):.0%} {value:+.3g}" for q, value in overall["excess"]["quantiles"].items())
        lines.append(f"sum(s)/c - 1: mean {overall['excess']['mean']:+.4g}; quantiles {quantiles}")
    if audit["denoiser"]:
        counts = audit["denoiser"]["before"]["strict"]
        listed = ", ".join(f"{name} {counts[name]:,}" for name in SCORE_CLASSES)
        lines.append(f"the denoising call after the last step, not counted above: {listed}")
    return lines


def _average_lines(audit: AuditResult) -> list[str]:
    """Return the rates averaged over steps; none for audits of earlier versions."""
    averages = audit.get("averages", {"before": {}, "after": {}})
    names = {
        "coordinates_outside": "of single scores outside the box",
        "negative_weights": "of positions with negative weights",
    }
    rates = {name: [averages[when].get(name) for when in ("before", "after")] for name in names}
    return [
        f"averaged over steps: {before:.3%} {names[name]}, projected {after:.3%}"
        for name, (before, after) in rates.items()
        if before is not None and after is not None
    ]


def _step_lines(audit: AuditResult, rows: int | None) -> list[str]:
    """Return one line for each of `rows` steps, the first and the last among them."""
    steps = audit["steps"]
    chosen = list(range(len(steps)))
    if rows is not None and rows < len(steps):
        chosen = sorted({round(i * (len(steps) - 1) / (rows - 1)) for i in range(rows)})
    names = ("outside", "material", "boundary", "realizable", "scores out", "w < 0", "mass < 0", "moved", "unreal. proj.")
    lines = [f"{'step':>5} {'t':>8} {'sites':>9} | " + " ".join(f"{name:>10}" for name in names)]
    lines.append("-" * len(lines[0]))
    lines += [_step_line(number, steps[number]) for number in chosen]
    lines.append(
        "shares of positions (scores out: of single scores), no tolerance; mass < 0: mean negative mass of mu~; moved:"
    )
    lines.append("mean |s' - s| / |s| by the projection; unreal. proj.: still outside or material after it, tolerance 1e-6.")
    return lines


def _step_line(number: int, step: AuditResult) -> str:
    """Return the line of one step."""
    total, before, after = step["position_steps"], step["before"], step["after"]
    start = f"{number:>5} {step['t']:>8.5f} {total:>9,} | "
    if not total:
        return start + "nothing to audit"
    fractions = [before["strict"][name] / total for name in SCORE_CLASSES]
    fractions.append(before["coordinates_outside_strict"] / step["coordinates"])
    weights = f"{'-':>10}" if before["negative_weights"] is None else f"{before['negative_weights'] / total:>10.2%}"
    unrealizable = (after["classes"]["outside"] + after["classes"]["material"]) / total
    values = " ".join(f"{fraction:>10.2%}" for fraction in fractions)
    mass, moved = before["signed_mass"]["mean"], step["moved"]["mean"]
    return f"{start}{values} {weights} {mass:>10.2e} {moved:>10.2e} {unrealizable:>13.2%}"
