"""An audit (`m2s.evaluation.audit`) as people read it: the paper's table of four classes, and a figure of four panels."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from m2s.errors import UserError
from m2s.evaluation.audit import CLASSES, ROUNDING
from m2s.io import atomic_write, output_file
from m2s.report.toy import BAND, BLUE, BOX, GREEN, INK, MUTED, SMALL, SUFFIXES, TEXT, TITLE, VERMILLION

Found = Mapping[str, Any]  # what `m2s audit` writes
KEYS = {"checkpoint", "process", "head", "settings", "overall", "steps", "denoiser"}

NAMES = {
    "outside": "outside C",
    "material": "in C, not in P, material",
    "boundary": "in C, not in P, boundary",
    "realizable": "in P",
}
WORDS = {
    "outside": "outside (out of range)",
    "material": "material (contradictory)",
    "boundary": "boundary (within 1e-6)",
    "realizable": "realizable (a posterior)",
}
COLOURS = {"outside": VERMILLION, "material": "#E69F00", "boundary": BOX, "realizable": BAND}


def read(path: Path) -> Found:
    """What `m2s audit` wrote to `path`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the audit.json that m2s audit wrote") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): give the audit.json that m2s audit wrote") from error
    if not isinstance(found, dict) or not found.keys() >= KEYS:
        raise UserError(f"{path} is no audit: give the audit.json that m2s audit wrote")
    return found


def table(found: Found, rows: int | None = None) -> str:
    """The four classes as in the paper, what else was counted, before and after projection, and `rows` of the steps."""
    return "\n".join([*heading(found), "", *_classes(found), "", *_others(found), "", *_steps(found, rows)])


def heading(found: Found) -> list[str]:
    return [f"{found['checkpoint']}: {found['head']}", counted(found)]


def counted(found: Found) -> str:
    settings, overall = found["settings"], found["overall"]
    return (
        f"{overall['position_steps']:,} position-steps of {settings['n']:,} samples of {settings['length']:,} tokens; "
        f"{settings['steps']} steps, sampler {settings['sampler']}, grid {settings['grid']}, seed {settings['seed']}"
    )


def criteria(found: Found) -> dict[str, str]:
    if found["process"] == "Absorbing":
        return {
            "outside": "a score outside [0, c]",
            "material": "sum(s) is not c, or min mu~ < -1e-6",
            "boundary": "sum(s) = c, -1e-6 <= min mu~ < 0",
            "realizable": "s >= 0, sum(s) = c = alpha/(1-alpha)",
        }
    limits = "[rho, 1/rho]" if found["process"] == "Uniform" else "the bounds of its coordinate"
    return {
        "outside": f"a score outside {limits}",
        "material": "min mu~ < -1e-6" if found["process"] == "Uniform" else "no posterior within 1e-6",
        "boundary": "-1e-6 <= min mu~ < 0",
        "realizable": "mu~ is a posterior",
    }


def _share(count: int, of: int) -> str:
    return f"{count / of:.4%}" if of else "-"


def _classes(found: Found) -> list[str]:
    """The paper's table: its count has no tolerance on the box; the two columns after it have 1e-6."""
    overall, named = found["overall"], criteria(found)
    sites, before, after = overall["position_steps"], overall["before"], overall["after"]
    lines = [f"{'position-step class':25} {'criterion':37} {'fraction':>9} {'count':>13} {'tolerant':>13} {'projected':>13}"]
    lines.append("-" * len(lines[0]))
    for name in CLASSES:
        strict, tolerant, projected = before["strict"][name], before["classes"][name], after["classes"][name]
        lines.append(
            f"{NAMES[name]:25} {named[name]:37} {_share(strict, sites):>9} {strict:>13,} {tolerant:>13,} {projected:>13,}"
        )
    lines.append(
        "C: the coordinate box, P: the scores that have a posterior, mu~: the signed posterior. fraction, count: as in"
    )
    lines.append("the paper, no tolerance on the box; tolerant: 1e-6 on it; projected: the same, of the projected scores.")
    return lines


def _others(found: Found) -> list[str]:
    overall = found["overall"]
    before, after = overall["before"], overall["after"]
    sites, coordinates = overall["position_steps"], overall["coordinates"]

    def line(name: str, value: Callable[[Found], str]) -> str:
        return f"{name:45} {value(before):>26} {value(after):>26}"

    def mass(name: str) -> Callable[[Found], str]:
        return lambda counts: f"{counts[name]['mean']:.3e} / {counts[name]['most']:.3e}" if counts[name] else "-"

    def positions(name: str) -> Callable[[Found], str]:
        return lambda counts: "-" if counts[name] is None else f"{_share(counts[name], sites)} ({counts[name]:,})"

    lines = [
        f"{'':45} {'before':>26} {'projected':>26}",
        line("single scores outside the box", lambda counts: _share(counts["coordinates_outside"], coordinates)),
        line("  with no tolerance", lambda counts: _share(counts["coordinates_outside_strict"], coordinates)),
        line("positions with mu~ below -1e-6", positions("signed")),
        line("  of them outside the box", positions("overlap")),
        line("negative mass of mu~, mean / most", mass("signed_mass")),
        line("positions with negative sampler weights", positions("negative_weights")),
        line("negative mass of the weights, mean / most", mass("negative_mass")),
        f"moved by the projection, |s' - s| / |s|: mean {overall['moved']['mean']:.3e}, most {overall['moved']['most']:.3e}",
    ]
    if overall["excess"]:
        quantiles = ", ".join(f"{float(q):.0%} {value:+.3g}" for q, value in overall["excess"]["quantiles"].items())
        lines.append(f"sum(s)/c - 1: mean {overall['excess']['mean']:+.4g}; quantiles {quantiles}")
    if found["denoiser"]:
        counts = found["denoiser"]["before"]["strict"]
        counted = ", ".join(f"{name} {counts[name]:,}" for name in CLASSES)
        lines.append(f"the denoising call after the last step, not counted above: {counted}")
    return lines


def _steps(found: Found, rows: int | None) -> list[str]:
    steps = found["steps"]
    chosen = range(len(steps))
    if rows is not None and rows < len(steps):
        chosen = sorted({round(i * (len(steps) - 1) / (rows - 1)) for i in range(rows)})  # type: ignore[assignment]
    names = ("outside", "material", "boundary", "realizable", "scores out", "w < 0", "mass < 0", "moved", "unreal. proj.")
    lines = [f"{'step':>5} {'t':>8} {'sites':>9} | " + " ".join(f"{name:>10}" for name in names)]
    lines.append("-" * len(lines[0]))
    for number in chosen:
        step = steps[number]
        sites, before, after = step["position_steps"], step["before"], step["after"]
        start = f"{number:>5} {step['t']:>8.5f} {sites:>9,} | "
        if not sites:
            lines.append(start + "nothing to audit")
            continue
        shares = [before["strict"][name] / sites for name in CLASSES] + [
            before["coordinates_outside_strict"] / step["coordinates"]
        ]
        weights = f"{'-':>10}" if before["negative_weights"] is None else f"{before['negative_weights'] / sites:>10.2%}"
        left = (after["classes"]["outside"] + after["classes"]["material"]) / sites
        mass = before["signed_mass"]["mean"]
        values = " ".join(f"{share:>10.2%}" for share in shares)
        lines.append(f"{start}{values} {weights} {mass:>10.2e} {step['moved']['mean']:>10.2e} {left:>13.2%}")
    lines.append(
        "shares of positions (scores out: of single scores), no tolerance; mass < 0: mean negative mass of mu~; moved:"
    )
    lines.append("mean |s' - s| / |s| by the projection; unreal. proj.: still outside or material after it, tolerance 1e-6.")
    return lines


def draw(found: Found) -> Figure:
    """Four panels over the time of the run: the classes; violations before and after projection; negative mass; how far the
    projection moves a score, or, for masks, how far sum(s) is from c."""
    figure = Figure(figsize=(11, 8.2), layout=layout())
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    steps, t = _looked_at(found)
    _draw_classes(panels[0, 0], found)
    _draw_violations(panels[0, 1], steps, t)
    _draw_mass(panels[1, 0], steps, t)
    if found["overall"]["excess"]:
        _draw_excess(panels[1, 1], steps, t)
    else:
        _draw_moved(panels[1, 1], steps, t)
    for axes in panels.flat:
        _over_time(axes)
    figure.supxlabel("\n".join(heading(found)), fontsize=SMALL, color=MUTED)
    return figure


def layout() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.04)


def _looked_at(found: Found) -> tuple[list[Any], Float[np.ndarray, "n"]]:
    """The steps that had positions to audit, and their times."""
    steps = [step for step in found["steps"] if step["position_steps"]]
    return steps, np.array([step["t"] for step in steps])


def _over_time(axes: Axes) -> None:
    axes.set_xlim(1, 0)
    axes.set_xlabel("time t, from noise to data", fontsize=TEXT, color=INK)
    _frame(axes)


def _frame(axes: Axes) -> None:
    axes.tick_params(labelsize=SMALL, colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)


def title(axes: Axes, letter: str, text: str, pad: int = 40) -> None:
    """Above a panel, with room for a legend between them."""
    axes.set_title(f"({letter})  {text}", loc="left", fontsize=TITLE, color=INK, fontweight="bold", pad=pad)


def legend(axes: Axes) -> None:
    """Between the title and the panel, where it hides nothing."""
    if handles := axes.get_legend_handles_labels()[0]:
        legend = axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            borderaxespad=0.3,
            ncols=max(2, (len(handles) + 1) // 2),
            columnspacing=1.2,
            handlelength=1.6,
            fontsize=SMALL - 0.5,
            frameon=False,
            labelcolor=INK,
        )
        legend.set_in_layout(False)


def _draw_classes(axes: Axes, found: Found) -> None:
    title(axes, "a", "Is there a posterior behind the score?")
    steps, t = _looked_at(found)
    shares = [[_part(step, name) for step in steps] for name in CLASSES]
    labels = [f"{WORDS[name]}: {_part(found['overall'], name):.3%}" for name in CLASSES]
    axes.stackplot(t, shares, labels=labels, colors=[COLOURS[name] for name in CLASSES], lw=0)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of positions", fontsize=TEXT, color=INK)
    legend(axes)


def _part(moment: Found, name: str) -> float:
    """The share of the positions of a step, or of all, that are in a class."""
    return float(moment["before"]["strict"][name] / max(1, moment["position_steps"]))


def _draw_violations(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    title(axes, "b", "Violations, before and after projection")
    for key, of, name, colour in (
        ("negative_weights", "position_steps", "negative weights", VERMILLION),
        ("coordinates_outside", "coordinates", "scores out of the box", BLUE),
    ):
        for when, style, more in (("before", "-", ""), ("after", (0, (4, 2)), ", projected")):
            counts = [(step[when][key], step[of]) for step in steps]
            if all(count is not None for count, _ in counts):
                share = [count / total for count, total in counts]
                axes.plot(t, share, color=colour, lw=2.0, ls=style, label=name + more)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of positions, of scores", fontsize=TEXT, color=INK)
    legend(axes)


def _draw_mass(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    title(axes, "c", "Negative mass, mean over positions")
    for key, name, colour in (
        ("signed_mass", r"of the signed posterior $\tilde\mu$", BLUE),
        ("negative_mass", "of the sampler's weights", VERMILLION),
    ):
        mass = np.array([step["before"][key]["mean"] if step["before"][key] else 0.0 for step in steps])
        if (mass > ROUNDING).any():
            axes.plot(t, np.where(mass > ROUNDING, mass, np.nan), color=colour, lw=2.0, label=name, marker=".", ms=4)
    if axes.lines:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1)
        axes.text(0.5, 0.5, "none anywhere", transform=axes.transAxes, ha="center", fontsize=TEXT, color=MUTED)
    axes.set_ylabel("mass", fontsize=TEXT, color=INK)
    legend(axes)


def _draw_moved(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    title(axes, "d", "How far the projection moves a score")
    for key, name, style in (("mean", "mean over positions", "-"), ("most", "the most", (0, (1, 1.5)))):
        axes.plot(t, [step["moved"][key] for step in steps], color=GREEN, lw=2.0, ls=style, label=name)
    axes.set_ylim(0, max(axes.get_ylim()[1], 1e-6))  # less is rounding
    axes.set_ylabel(r"$|s^{proj} - s| \, / \, |s|$", fontsize=TEXT, color=INK)
    legend(axes)


def _draw_excess(axes: Axes, steps: list[Any], t: np.ndarray) -> None:
    title(axes, "d", "How far the scores' sum is from what it must be")
    low, middle, high = ([step["excess"]["quantiles"][q] for step in steps] for q in ("0.05", "0.5", "0.95"))
    axes.axhline(0, color=MUTED, lw=0.8)
    axes.fill_between(t, low, high, color=GREEN, alpha=0.25, lw=0, label="5% to 95% of positions")
    axes.plot(t, middle, color=GREEN, lw=2.0, label="median")
    axes.set_ylabel(r"$\sum_y s_y \, / \, c - 1$", fontsize=TEXT, color=INK)
    legend(axes)


@dataclass(frozen=True)
class Shown:
    """An audit in a figure with others: what it is called there, and its colour."""

    name: str
    colour: str
    found: Found


def draw_shares(axes: Axes, audits: Sequence[Shown]) -> None:
    """The four classes: of one audit over time, of several in all, a bar for each."""
    if len(audits) == 1:
        _draw_classes(axes, audits[0].found)
        _over_time(axes)
        return
    title(axes, "a", "Is there a posterior behind the score?")
    names = [f"{one.name}\n{_part(one.found['overall'], 'realizable'):.3%}\nrealizable" for one in audits]
    left = np.zeros(len(audits))
    for name in CLASSES:
        shares = np.array([_part(one.found["overall"], name) for one in audits])
        axes.barh(names, shares, left=left, color=COLOURS[name], label=WORDS[name])
        left += shares
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of positions, over all steps", fontsize=TEXT, color=INK)
    _frame(axes)
    legend(axes)


def draw_weights(axes: Axes, audits: Sequence[Shown]) -> None:
    """Where weights of the sampler's step are negative, so that it is no law: a curve for each audit, dashed if projected."""
    title(axes, "b", "Where the sampler's weights are negative")
    for one in audits:
        if one.found["overall"]["before"]["negative_weights"] is None:
            raise UserError(
                f"the audit of {one.found['checkpoint']} counted no weights, which {one.found['settings']['sampler']} does not "
                "have: give one with --sampler analytic"
            )
        steps, t = _looked_at(one.found)
        for when, style, more in (("before", ".-", ""), ("after", "--", ", projected")):
            share = [step[when]["negative_weights"] / step["position_steps"] for step in steps]
            axes.plot(t, share, style, color=one.colour, lw=1.6, ms=6, label=one.name + more)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of positions", fontsize=TEXT, color=INK)
    _over_time(axes)
    legend(axes)


def write_figure(found: Found, out: Path) -> None:
    """The four panels at `out`."""
    output_file(out, SUFFIXES)
    with atomic_write(out) as temporary:
        draw(found).savefig(temporary, dpi=200)
