"""The paper's Figure 1, computed: three tokens, uniform corruption, and a score that no posterior stands behind.

At one time t and one current token k the exact score s* is varied along s^(c) = (c s*_{y1}, s*_{y2}). The questions:
(a) does score entropy see where the scores stop being realizable? (b) what does the error do to the law that is generated?
(c) where does the path run in the plane of the two scores?

The data law is an example, chosen among seven after seeing (b): with it projection lowers the error at every c shown.
It need not: with the law (0.8, 0.15, 0.05) it raises it slightly for c above 5.5. `m2s figure toy --seed N` draws another law.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import NullLocator
from torch import Tensor

import m2s
from m2s.errors import UserError
from m2s.io import atomic_write, output_file, write_json

DATA_DISTRIBUTION = (0.7, 0.2, 0.1)
TIME = 0.5
SUFFIXES = (".png", ".pdf", ".svg")
START, END = 1e-10, 1e-9  # the reverse process runs from t = 1 - START to t = END
STEP = 0.02  # of the integrator, in sigma; the figure shows the result of half of it
CHUNK = 12  # steps at once: small enough that torch keeps to one thread, which for such small work is the faster way

Array = Float[np.ndarray, "..."]


@dataclass(frozen=True)
class ToyData:
    """Every number of the figure. Arrays over c are in the order of `c`, vectors over tokens in that of the data law."""

    distribution: tuple[float, ...]
    time: float
    rho: float
    current: int  # k, the current token: the rarest
    first: int  # y1, whose score is varied
    second: int  # y2
    posterior: tuple[float, ...]  # Pr(X_0 = . | X_t = k)
    score: tuple[float, float]  # s*: exact scores of y1 and y2
    box: tuple[float, float]  # [c_-, c_+]: where s^(c) is in the coordinate box
    band: tuple[float, float]  # where it is in the bridge polytope
    c: Array
    excess: Array  # h(c s*, s*), nats
    gradient: Array  # its derivative in the log-score of y1
    signed: Array  # [c, 3]: the signed posterior of s^(c)
    tv: Array  # terminal total variation of the process whose score of y1 is c times too large
    tv_projected: Array  # the same with the score projected onto the bridge polytope at every time
    integrator_error: float  # largest change of tv and tv_projected when the step is halved
    triangle: tuple[tuple[float, float], ...]  # the corners of the bridge polytope: certainty of k, y1, y2
    c_a: float  # point A is s^(c_a)
    a: tuple[float, float]
    a_signed: tuple[float, ...]
    b: tuple[float, float]  # the realizable score nearest to A
    b_posterior: tuple[float, ...]

    def at(self, values: Array, c: float) -> float:
        """The entry of an array over c at one of its c."""
        return float(values[int(np.abs(np.log(self.c / c)).argmin())])


def random_distribution(seed: int) -> tuple[float, ...]:
    """A data law on three tokens, none rarer than 0.05: 0.05 + 0.85 times a flat Dirichlet draw."""
    if seed < 0:
        raise UserError(f"the seed is {seed}, but it must not be negative")
    draw = np.random.default_rng(seed).dirichlet((1.0, 1.0, 1.0))
    return tuple(float(p) for p in 0.05 + 0.85 * draw)


def toy_data(
    distribution: tuple[float, ...] = DATA_DISTRIBUTION, time: float = TIME, points: int = 121, step: float = STEP
) -> ToyData:
    """Compute the three panels for a data law of full support and a time in (0, 1), under Uniform(3, Linear()).

    The current token is the rarest one and y1 the middle one, so that the optimum lies inside the polytope.
    """
    if len(distribution) != 3 or min(distribution) < 0.01 or abs(sum(distribution) - 1) > 1e-9:
        raise UserError(f"the law is {distribution}, but it must be three probabilities of at least 0.01 that sum to one")
    if not 0.01 <= time <= 0.99:
        raise UserError(f"the time is {time}, but it must lie in [0.01, 0.99]")
    process = m2s.Uniform(3, m2s.Linear())
    p = torch.tensor(distribution, dtype=torch.float64)
    k, y1, y2 = (int(i) for i in p.argsort(stable=True))
    x_t, t = torch.tensor([k]), torch.tensor([time], dtype=torch.float64)
    exact = m2s.score_from_leave_one_out(p[None], x_t, t, process)
    posterior = m2s.posterior_from_leave_one_out(p[None], x_t, t, process)[0]
    low, high = m2s.box(x_t, t, process)
    box = (float(low[0, y1] / exact[0, y1]), float(high[0, y1] / exact[0, y1]))
    band = _band(exact, y1, x_t, t, process)
    outer, inner = max(zip(box, band, strict=True), key=lambda ends: abs(ends[0] - ends[1]))
    c_a = inner + 0.6 * (outer - inner)
    grid = np.geomspace(box[0] / 2, box[1] * 2, points)
    c = np.unique(np.concatenate([grid, [1.0, *box, *band, c_a]]))
    path = _scaled(exact, y1, torch.from_numpy(c))
    excess, gradient = _excess(path, posterior, k, y1, time, process)
    signed = m2s.affine_inverse(path, x_t.expand(len(c)), t.expand(len(c)), process)
    a = _scaled(exact, y1, torch.tensor([c_a], dtype=torch.float64))
    a_signed = m2s.affine_inverse(a, x_t, t, process)
    b_posterior = m2s.project(a, x_t, t, process)
    b = m2s.score_from_posterior(b_posterior, x_t, t, process)
    corners = m2s.score_from_posterior(torch.eye(3, dtype=torch.float64)[[k, y1, y2]], x_t.expand(3), t.expand(3), process)
    ends = terminal_distribution(p, c, y1, process, step)
    finer = terminal_distribution(p, c, y1, process, step / 2)
    tv, tv_finer = (0.5 * (distributions - p).abs().sum(-1).numpy() for distributions in (ends, finer))

    def pair(score: Tensor) -> tuple[float, float]:
        return float(score[y1]), float(score[y2])

    return ToyData(
        distribution=tuple(distribution),
        time=time,
        rho=float(process.rho(t)),
        current=k,
        first=y1,
        second=y2,
        posterior=tuple(posterior.tolist()),
        score=pair(exact[0]),
        box=box,
        band=band,
        c=c,
        excess=excess,
        gradient=gradient,
        signed=signed.numpy(),
        tv=tv_finer[0],
        tv_projected=tv_finer[1],
        integrator_error=float(np.abs(tv - tv_finer).max()),
        triangle=tuple(pair(corner) for corner in corners),
        c_a=c_a,
        a=pair(a[0]),
        a_signed=tuple(a_signed[0].tolist()),
        b=pair(b[0]),
        b_posterior=tuple(b_posterior[0].tolist()),
    )


def _scaled(score: Float[Tensor, "1 3"], y: int, c: Float[Tensor, "C"]) -> Float[Tensor, "C 3"]:
    """The score with its entry y multiplied by each c."""
    scaled = score.repeat(len(c), 1)
    scaled[:, y] *= c
    return scaled


def _band(exact: Float[Tensor, "1 3"], y1: int, x_t: Tensor, t: Tensor, process: m2s.Uniform) -> tuple[float, float]:
    """The c at which s^(c) enters and leaves the bridge polytope: zeros of the signed posterior, which is affine in c."""
    ends = torch.cat([_scaled(exact, y1, torch.tensor([value], dtype=torch.float64)) for value in (0.0, 1.0)])
    at_zero, at_one = m2s.affine_inverse(ends, x_t.expand(2), t.expand(2), process)
    zeros, slope = -at_zero / (at_one - at_zero), at_one - at_zero
    return float(zeros[slope > 0].max()), float(zeros[slope < 0].min())


def _excess(
    path: Float[Tensor, "C 3"], posterior: Float[Tensor, "3"], k: int, y1: int, time: float, process: m2s.Uniform
) -> tuple[Array, Array]:
    """(E[score entropy | x_t = k] along the path, less its value at s*) / n_t(k), which is h(c s*, s*) (Proposition 4.3).

    And its gradient in the log-score of y1: both from `m2s.score_entropy` of a free score and autograd, not from the formula.
    """
    head = m2s.LogScore(process)
    x_t = torch.full((3,), k)
    t = torch.full((3,), time, dtype=torch.float64)
    rate = process.rates_into(x_t[:1], t[:1])[0, y1]

    def risk(log_score: Float[Tensor, "C 3"]) -> Float[Tensor, "C"]:
        rows = len(log_score)
        output = log_score.unsqueeze(-2).expand(rows, 3, 3)
        times = t[:1].expand(rows)
        loss = m2s.score_entropy(head, output, torch.arange(3).expand(rows, 3), x_t.expand(rows, 3), times)
        return loss @ posterior / rate

    log_path = path.log().requires_grad_()
    values = risk(log_path)
    (gradient,) = torch.autograd.grad(values.sum(), log_path)
    exact = m2s.score_from_posterior(posterior[None], x_t[:1], t[:1], process)
    return (values.detach() - risk(exact.log())).numpy(), gradient[:, y1].numpy()


def reverse_generators(
    p: Float[Tensor, "3"], c: Float[Tensor, "C"], y1: int, t: Float[Tensor, "T"], process: m2s.Uniform
) -> Float[Tensor, "T 2 C 3 3"]:
    """The generator [from x, to y] of the reverse chain per unit of sigma: Q_t(y -> x) s_y(x) / sigma'(t) off the diagonal.

    The scores are exact for the data law p, except that in every state x != y1 the score of jumping to y1 is multiplied by c.
    Index 0 of the second axis uses them as they are, index 1 after projection onto the bridge polytope of x at t.
    """
    shape = (len(t), len(c), 3)
    x_t = torch.arange(3).expand(shape)
    score = m2s.score_from_leave_one_out(p.expand(*shape, 3), x_t, t, process)
    score[..., y1] *= c[:, None]
    nearest = m2s.score_from_posterior(m2s.project(score, x_t, t, process), x_t, t, process)
    into = process.rates_into(x_t, t) / process.schedule.sigma_prime(t)[:, None, None, None]
    jumps = into.unsqueeze(1) * torch.stack([score, nearest], 1)
    return jumps - torch.diag_embed(jumps.sum(-1))


def terminal_distribution(
    p: Float[Tensor, "3"], c: Array, y1: int, process: m2s.Uniform, step: float = STEP
) -> Float[Tensor, "2 C 3"]:
    """What the reverse equation dq/d(-sigma) = q R_sigma makes of the uniform reference law, for every c at once.

    It is integrated in sigma = -log alpha_t, in which the rates stay bounded, from t = 1 - 1e-10 to t = 1e-9, by the classical
    Runge-Kutta method of order four with equal steps. Index 0: the score as it is; 1: projected (see `reverse_generators`).
    """
    last, first = -math.log(START), -math.log1p(-END)
    steps = math.ceil((last - first) / step)
    h = (last - first) / steps
    nodes = torch.linspace(last, first, 2 * steps + 1, dtype=torch.float64)
    times = -torch.expm1(-nodes)
    factors = torch.from_numpy(np.asarray(c, dtype=np.float64))
    distribution = process.reference().expand(2, len(factors), 3)
    for start in range(0, steps, CHUNK):
        inside = times[2 * start : 2 * min(start + CHUNK, steps) + 1]
        generators = reverse_generators(p, factors, y1, inside, process)
        for i in range(0, len(inside) - 1, 2):
            distribution = _runge_kutta(distribution, generators[i], generators[i + 1], generators[i + 2], h)
    return distribution


def _runge_kutta(distribution: Tensor, left: Tensor, middle: Tensor, right: Tensor, h: float) -> Float[Tensor, "2 C 3"]:
    """One step of q' = q R from the generators at the start, the middle and the end of the step."""

    def flow(q: Tensor, generator: Tensor) -> Tensor:
        return (q.unsqueeze(-2) @ generator).squeeze(-2)

    k1 = flow(distribution, left)
    k2 = flow(distribution + h / 2 * k1, middle)
    k3 = flow(distribution + h / 2 * k2, middle)
    k4 = flow(distribution + h * k3, right)
    return distribution + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


INK, MUTED = "#1A1A1A", "#5A5A5A"
ORTHANT, BOX, BAND = "#F4F4F2", "#D3E4F3", "#7FB3DE"
VERMILLION, BLUE, GREEN = "#D55E00", "#004F8A", "#007A5A"  # Okabe and Ito's, the last two darkened for text
SMALL, TEXT, TITLE = 9.5, 10.5, 12.0


def draw(data: ToyData) -> Figure:
    """The three panels."""
    figure = Figure(figsize=(13, 4.8), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03))
    FigureCanvasAgg(figure)
    entropy, terminal, plane = figure.subplots(1, 3, width_ratios=(1.0, 0.95, 1.1))
    _draw_entropy(entropy, data)
    _draw_terminal(terminal, data)
    _draw_plane(plane, data)
    distribution = ", ".join(f"{p:.2g}" for p in data.distribution)
    figure.supxlabel(
        f"Three tokens of law ({distribution}), uniform corruption, t = {data.time:g}, \u03c1 = {data.rho:.3g}; "
        "the current token is the rarest.   "
        "Light blue: inside the coordinate box.   Dark blue: a posterior exists (M2S).",
        fontsize=SMALL,
        color=MUTED,
    )
    for axes in (entropy, terminal, plane):
        axes.tick_params(labelsize=SMALL, colors=MUTED)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(MUTED)
    return figure


def _title(axes: Axes, letter: str, text: str) -> None:
    axes.set_title(f"({letter})  {text}", loc="left", fontsize=TITLE, color=INK, fontweight="bold", pad=20)


def _shade(axes: Axes, data: ToyData, labels: bool = True) -> None:
    """The coordinate-box interval, and inside it the band of scores with a posterior; the c axis."""
    axes.set_xscale("log")
    axes.axvspan(*data.box, color=BOX, lw=0, zorder=0)
    axes.axvspan(*data.band, color=BAND, lw=0, zorder=0.5)
    axes.axvline(1, color=INK, lw=0.8, ls=(0, (1, 2)), zorder=1)
    if labels:
        for c, name in zip(data.box, ("$c_-$", "$c_+$"), strict=True):
            axes.axvline(c, color=BLUE, lw=0.9, zorder=1)
            axes.annotate(
                name,
                (c, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=TEXT,
                color=BLUE,
            )
        axes.set_xlabel(r"factor $c$ on the score of $y_1$", fontsize=TEXT, color=INK)
    ticks = {1 / 16: "1/16", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1", 2: "2", 4: "4", 8: "8", 16: "16"}
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(data.c[0], data.c[-1])


def _mark(axes: Axes, xy: tuple[float, float], name: str, colour: str, offset: tuple[float, float]) -> None:
    axes.plot(*xy, "o", ms=7, mfc=colour, mec="white", mew=1.2, zorder=6)
    axes.annotate(
        name,
        xy,
        xytext=offset,
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=TEXT,
        color=colour,
        fontweight="bold",
        zorder=6,
    )


def _draw_entropy(axes: Axes, data: ToyData) -> None:
    _title(axes, "a", "Score entropy sees no boundary")
    _shade(axes, data)
    top = float(data.gradient[-1])
    axes.set_ylim(-0.36 * top, 1.02 * top)
    axes.set_ylabel("nats", fontsize=TEXT, color=INK)
    axes.add_patch(Rectangle((0.015, 0.455), 0.62, 0.535, transform=axes.transAxes, fc="white", ec="none", zorder=2))
    inset = axes.inset_axes((0.105, 0.525, 0.505, 0.4))
    for panel in (axes, inset):
        panel.axhline(0, color=MUTED, lw=0.6, zorder=1)
        panel.plot(data.c, data.excess, color=INK, lw=2.2, zorder=3, label=r"excess $h(c\,s^\star_{y_1}, s^\star_{y_1})$")
        panel.plot(
            data.c, data.gradient, color=VERMILLION, lw=2.2, ls=(0, (5, 1.5)), zorder=3, label="its gradient in log-score"
        )
    _mark(axes, (data.c_a, data.at(data.excess, data.c_a)), "A", VERMILLION, (0.0, 11.0))
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.01),
        fontsize=SMALL,
        framealpha=1,
        edgecolor="none",
        handlelength=2.4,
        labelcolor=INK,
        borderaxespad=0.2,
    )
    _shade(inset, data, labels=False)
    margin = (data.band[1] / data.band[0]) ** 0.12
    inset.set_xlim(data.band[0] / margin, data.band[1] * margin)
    low, high = (data.at(data.gradient, c) for c in data.band)
    inset.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
    inset.tick_params(labelsize=SMALL - 1, colors=MUTED, length=2)
    inset.set_title("the realizable band, enlarged", fontsize=SMALL - 0.5, color=BLUE, pad=3)
    for spine in inset.spines.values():
        spine.set_color(BLUE)


def _draw_terminal(axes: Axes, data: ToyData) -> None:
    _title(axes, "b", "Error of the law it generates")
    _shade(axes, data)
    axes.plot(data.c, data.tv, color=VERMILLION, lw=2.2, zorder=3, label="score as it is (free)")
    axes.plot(data.c, data.tv_projected, color=BLUE, lw=2.2, ls=(0, (5, 1.5)), zorder=3, label="projected at every time")
    _mark(axes, (data.c_a, data.at(data.tv, data.c_a)), "A", VERMILLION, (-11.0, 3.0))
    axes.set_ylim(0, 1.08 * max(float(data.tv.max()), float(data.tv_projected.max())))
    axes.set_ylabel("total variation from the data law", fontsize=TEXT, color=INK)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0.02, 0.98),
        fontsize=SMALL,
        frameon=True,
        framealpha=1,
        edgecolor="none",
        handlelength=2.4,
        labelcolor=INK,
    )


def _draw_plane(axes: Axes, data: ToyData) -> None:
    _title(axes, "c", "Three nested sets of scores")
    low, high = data.rho, 1 / data.rho
    end = 1.2 * high
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    axes.set_xlabel("score of $y_1$", fontsize=TEXT, color=INK)
    axes.set_ylabel("score of $y_2$", fontsize=TEXT, color=INK)
    axes.set_facecolor(ORTHANT)
    axes.add_patch(Rectangle((low, low), high - low, high - low, fc=BOX, ec=BLUE, lw=0.9, zorder=1))
    axes.add_patch(Polygon(data.triangle, fc=BAND, ec=BLUE, lw=1.2, zorder=2))
    axes.set_xticks([low, 1, high], [r"$\rho$", "1", r"$1/\rho$"])
    axes.set_yticks([low, 1, high], [r"$\rho$", "1", r"$1/\rho$"])
    s1, s2 = data.score
    axes.plot([0, end], [s2, s2], color=INK, lw=1.1, ls=(0, (4, 2)), zorder=3)
    axes.annotate(
        "path $s^{(c)}$",
        (end, s2),
        xytext=(-3, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=SMALL,
        color=INK,
    )
    for c, name in zip(data.box, ("$c_-$", "$c_+$"), strict=True):
        axes.plot(c * s1, s2, "|", ms=9, mew=1.4, color=BLUE, zorder=4)
        axes.annotate(
            name, (c * s1, s2), xytext=(4, -6), textcoords="offset points", ha="left", va="top", fontsize=TEXT, color=BLUE
        )
    axes.text(end * 0.985, end * 0.985, "positive scores: SEDD", ha="right", va="top", fontsize=SMALL, color=MUTED)
    axes.text(high - 0.03 * end, high - 0.03 * end, "coordinate box", ha="right", va="top", fontsize=SMALL, color=BLUE)
    middle = 0.3 * high if s2 > 0.45 * high else 0.6 * high
    axes.text(0.41 * high, middle, "bridge polytope: M2S", ha="center", va="center", fontsize=SMALL, color=INK, zorder=5)
    axes.plot(s1, s2, "*", ms=15, mfc="#F0E442", mec=INK, mew=1.0, zorder=6)
    axes.annotate("$s^\\star$", (s1, s2), xytext=(9, 8), textcoords="offset points", fontsize=TEXT, color=INK, zorder=6)
    axes.annotate(
        "", data.b, data.a, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 4, "shrinkB": 4}, zorder=5
    )
    _mark(axes, data.a, "A", VERMILLION, (0.0, 11.0))
    _mark(axes, data.b, "B", GREEN, (3.0, -12.0))
    worst = int(np.argmin(data.a_signed))
    name = {data.current: "k", data.first: "{y_1}", data.second: "{y_2}"}[worst]
    axes.annotate(
        f"no posterior:\n$\\tilde\\mu_{name} = {min(data.a_signed):.3f}$",
        data.a,
        xytext=(-4, 22),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=SMALL,
        color=VERMILLION,
        zorder=6,
    )


def save(data: ToyData, out: Path) -> None:
    """The picture at `out`, its numbers at `out` with the ending .json."""
    with atomic_write(out) as temporary:
        draw(data).savefig(temporary, dpi=300)
    values = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in asdict(data).items()}
    write_json(out.with_suffix(".json"), values)


def write_toy(out: Path, seed: int | None = None) -> ToyData:
    """Compute, draw to `out` and write the numbers beside it. With a seed the data law is a random one (`random_law`)."""
    distribution = DATA_DISTRIBUTION if seed is None else random_distribution(seed)
    output_file(out, SUFFIXES)
    output_file(out.with_suffix(".json"), (".json",))
    data = toy_data(distribution)
    save(data, out)
    return data
