"""Certificates and measurements as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from m2s.evaluation.likelihood.certificate import Certificate

PROOF = """sum exp(-b) > 1 proves that b is the bound of no distribution. margin: the smallest b(x) + log p(x) in nats, below 0
where b is less than the exact NLL of the reverse process. A network that knows the distribution makes bounds tight."""
MEASURED = """limit: one-sided 95 % limit of the mean, Student's t over independent sequences. drop: how much less than the
NELBO, on the same sequences. variance: of one pass over one sequence by its noise, in nats squared. x calls: times the network
calls of a pass."""


def verdict(found: Certificate) -> str:
    """Return the result of a certificate in words.

    Args:
        found: The certificate.
    """
    if found.passed:
        return "bound" if not found.missing else "bound here"
    return "NO BOUND" if found.satisfies_kraft else "NO BOUND of any distribution"


def format_certificates(found: Sequence[Certificate]) -> list[str]:
    """Format certificates as a table, one group of lines for each world.

    Args:
        found: The certificates.

    Returns:
        Lines.
    """
    lines: list[str] = []
    world = None
    for each in found:
        if each.world != world:
            world = each.world
            lines += ["", world, f"  {'estimator':16s}{'sum exp(-b)':>12s}{'margin':>12s}  {'verdict':30s}lacks"]
        numbers = f"{each.kraft:12.6f}{each.margin:12.6f}"
        lines.append(f"  {each.estimator:16s}{numbers}  {verdict(each):30s}{', '.join(each.missing) or '-'}")
    return [*lines[1:], *PROOF.splitlines()]


def format_measurements(
    rows: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Sequence[str]], units: Sequence[str]
) -> list[str]:
    """Format what was measured on data as a table, one line for each estimator and one for each of its terms.

    Args:
        rows: The summaries (`Draws.summary`) by estimator.
        missing: What each estimator lacks for an upper bound.
        units: The units of a sequence, such as ("token", "byte").

    Returns:
        Lines.
    """
    heads = "".join(f"{f'bits/{unit}':>17s}" for unit in units)
    lines = [
        f"{'estimator':16s}{'nats':>11s}{'± rows':>9s}{'limit':>11s}{heads}{'drop, nats':>12s}{'±':>9s}{'calls':>6s}"
        f"{'variance':>10s}{'x calls':>10s}  upper bound"
    ]
    for name, row in rows.items():
        bits = "".join(f"{row[f'bits_per_{unit}']:17.5f}" for unit in units)
        kind = "yes" if not missing[name] else f"no: lacks {', '.join(missing[name])}"
        lines.append(
            f"{name:16s}{row['nats']:11.3f}{row['error']:9.3f}{row['upper']:11.3f}{bits}{row['drop']:12.4f}{row['drop_error']:9.4f}"
            f"{row['calls']:6.2f}{row['noise_variance']:10.3g}{row['variance_times_calls']:10.3g}  {kind}"
        )
    heavy = [name for name, row in rows.items() if row["heavy_tailed"]]
    lines += _terms(rows, units)
    if heavy:
        lines.append(
            f"The limits of {', '.join(heavy)} are doubtful: fewer than 20 sequences, or one sequence has more than a fifth of "
            "the variance. Take more sequences or passes."
        )
    return [*lines, *MEASURED.splitlines()]


def _terms(rows: Mapping[str, Mapping[str, Any]], units: Sequence[str]) -> list[str]:
    """The terms of the NELBO, which other estimators drop, in nats and in bits per unit."""
    if "nelbo" not in rows:
        return []
    row, lines = rows["nelbo"], ["", "terms of the NELBO"]
    for name, nats in row["terms"].items():
        bits = "".join(f"{nats * row[f'bits_per_{unit}'] / row['nats']:17.5f}" for unit in units)
        lines.append(f"  {name:14s}{nats:11.4f}{'':20s}{bits}")
    return [*lines, ""]
