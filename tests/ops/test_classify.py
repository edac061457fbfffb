"""The kernel of score measures against the definition, and both against least squares in rational numbers.

On a GPU where there is one, in Triton's interpreter elsewhere.
"""

from fractions import Fraction

import pytest
import torch
from test_project import DEVICE, JUNK, padded, sites
from test_projection import GPT2, KINDS, RANK_ONE, scores
from torch import Tensor

import m2s
from m2s.conversions.inverse import box
from m2s.ops import use_backend
from m2s.ops.classify import ProjectedMeasures, ScoreMeasures, measure_projected, measure_scores

triton = pytest.importorskip("triton")

from m2s.ops.classify.triton import measure_projected as projected_with_tiles  # noqa: E402
from m2s.ops.classify.triton import measure_scores as with_tiles  # noqa: E402

TOLERANCE = 1e-6
COUNTS = ("outside", "beyond", "negative_weights")


def kernel(rows: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None, process: m2s.Process, log: bool = False) -> ScoreMeasures:
    """Measures by the Triton kernel."""
    with use_backend("fused"):
        moved = (value if value is None else value.to(DEVICE) for value in (rows, x_t, t, s))
        return ScoreMeasures(*(value.cpu() for value in measure_scores(*moved, process, TOLERANCE, log)))


def reference(rows: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None, process: m2s.Process, log: bool = False) -> ScoreMeasures:
    """Measures by the definition."""
    with use_backend("reference"):
        return measure_scores(rows, x_t, t, s, process, TOLERANCE, log)


def rounding(score: Tensor, x_t: Tensor, t: Tensor, process: m2s.Process) -> Tensor:
    """Bound of the rounding error of the definition in float64: it shifts mu~ by numbers that nearly cancel, and adds up K."""
    site = process.at(x_t, t)
    unit = torch.where(site.m_k > 0, site.m_k, 1) / site.alpha
    delta, delta_mask = site.clean / site.stay, site.mask / site.stay
    finite = torch.where(score.isfinite(), score, 1).scatter(-1, x_t.unsqueeze(-1), 1.0)
    total = (finite[:, : process.vocab] - delta.unsqueeze(-1)).abs().sum(-1) + 1
    last = finite[:, -1].abs() + delta_mask
    return 1e-12 + 1e-15 * process.vocab * (1 + unit * (delta * total + delta_mask * last))


def assert_agree(ours: ScoreMeasures, theirs: ScoreMeasures, tolerance: Tensor, process: m2s.Process) -> None:
    """Counts are equal; sums agree within the tolerance of each row."""
    for name in COUNTS:
        assert torch.equal(getattr(ours, name).long(), getattr(theirs, name).long()), name
    for name in ("lowest", "signed_mass", "negative_mass"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert ((a - b).abs() <= tolerance * (1 + b.abs())).all(), (name, float(((a - b).abs() / tolerance).max()))
    if process.mask is None:
        assert (ours.off_plane == 0).all()


@pytest.mark.parametrize("t", [1e-3, 0.5, 0.999])
@pytest.mark.parametrize("vocab", [2, 3, 257])
@pytest.mark.parametrize("name", RANK_ONE)
def test_equals_the_definition(name: str, vocab: int, t: float) -> None:
    """All kinds of scores and times, with junk in columns that are ignored."""
    process = RANK_ONE[name](vocab)
    for kind in KINDS:
        x_t, times, _ = sites(process, 3, t)
        score = scores(kind, process, x_t, times)
        ours = kernel(padded(score, x_t), x_t, times, 0.8 * times, process)
        theirs = reference(score, x_t, times, 0.8 * times, process)
        assert_agree(ours, theirs, rounding(score, x_t, times, process), process)


@pytest.mark.parametrize("name", RANK_ONE)
def test_float32_rows_log_scores_and_no_step(name: str) -> None:
    """Rows in float32, log-scores, and no analytic step."""
    process = RANK_ONE[name](1001)
    x_t, times, _ = sites(process, 3, 0.6)
    score = scores("log-normal", process, x_t, times)
    for rows, log in ((score.float(), False), (score.log().float(), True), (score.log(), True)):
        exact = rows.double().exp() if log else rows.double()
        tolerance = rounding(exact, x_t, times, process)
        ours = kernel(padded(rows, x_t), x_t, times, None, process, log)
        assert_agree(ours, reference(exact, x_t, times, None, process), tolerance, process)
        assert (ours.negative_weights == 0).all() and (ours.negative_mass == 0).all()


@pytest.mark.parametrize("name", RANK_ONE)
def test_gpt2_vocabulary(name: str) -> None:
    process = RANK_ONE[name](GPT2)
    for kind, t in (("peaked", 0.3), ("log-normal", 0.9), ("realizable", 0.9)):
        x_t, times, _ = sites(process, 2, t)
        score = scores(kind, process, x_t, times)
        ours = kernel(score, x_t, times, 0.9 * times, process)
        assert_agree(ours, reference(score, x_t, times, 0.9 * times, process), rounding(score, x_t, times, process), process)


@pytest.mark.parametrize("name", RANK_ONE)
def test_no_comparison_is_rounded(name: str) -> None:
    """Scores in float32 next to the ends of the box, with and without the tolerance, and next to the levels at which weights
    turn negative."""
    process = RANK_ONE[name](31)
    for t in (1e-3, 0.5, 0.999):
        x_t, times, _ = sites(process, 6, t)
        score = scores("log-normal", process, x_t, times).float()
        low, high = (ends.double() for ends in box(x_t, times, process))
        _, mixing = process.step(0.8 * times, times)
        for column in range(process.vocab - 2):
            end = (low * (1 - TOLERANCE), low, high, high * (1 + TOLERANCE))[column % 4][:, column]
            end = end.clamp(max=3e38).float()
            score[:, column] = (end, end.nextafter(end + 1), end.nextafter(end - 1))[column // 4 % 3]
        total = score.double().scatter(-1, x_t.unsqueeze(-1), 1.0).sum(-1)
        score[:, -2] = (mixing.clean * total).clamp(max=3e38).float()
        ours = kernel(padded(score, x_t), x_t, times, 0.8 * times, process)
        theirs = reference(score, x_t, times, 0.8 * times, process)
        assert torch.equal(ours.outside, theirs.outside) and torch.equal(ours.beyond, theirs.beyond)
        assert (ours.outside > ours.beyond).any()
        assert_agree(ours, theirs, rounding(score.double(), x_t, times, process), process)


@pytest.mark.parametrize(("block", "lines"), [(64, 1), (64, 2), (128, 4)])
def test_tile_sizes(block: int, lines: int) -> None:
    """Rows of several full tiles and a rest, with k and non-finite scores in either."""
    process = m2s.Hybrid(700, p_uniform=0.3)
    x_t = torch.tensor([0, 1, 3, 600, 699, 700])
    times = torch.full((6,), 0.4, dtype=torch.float64)
    score = scores("log-normal", process, x_t, times).float()
    score[1, 5], score[3, 690], score[4, 0] = torch.nan, torch.inf, -torch.inf
    given = [value.to(DEVICE) for value in (padded(score, x_t), x_t, times, 0.7 * times)]
    ours = ScoreMeasures(*(value.cpu() for value in with_tiles(*given, process, TOLERANCE, False, block, lines, 4)))
    assert_agree(
        ours, reference(score, x_t, times, 0.7 * times, process), rounding(score.double(), x_t, times, process), process
    )


def test_non_finite_scores_are_outside() -> None:
    """NaN and infinity count as outside the box and as 1 in everything else."""
    for make in RANK_ONE.values():
        process = make(20)
        x_t, times, _ = sites(process, len(JUNK), 0.4)
        score = scores("log-normal", process, x_t, times)
        for column in (7, process.states - 1):
            broken = score.clone()
            broken[:, column] = torch.tensor(JUNK)
            ours = kernel(broken, x_t, times, 0.5 * times, process)
            theirs = reference(broken, x_t, times, 0.5 * times, process)
            assert_agree(ours, theirs, rounding(broken, x_t, times, process), process)
            assert all(value.isfinite().all() for value in ours)


def assert_projected_agree(
    rows: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None, process: m2s.Process, ours: ProjectedMeasures | None = None
) -> None:
    """Measures by the kernel are those of the definition, which rounds mu~ in proportion to the greatest score over b.

    Where the score does not matter, at a token that is certainly clean, an audit counts nothing.
    """
    if ours is None:
        with use_backend("fused"):
            given = (value if value is None else value.to(DEVICE) for value in (padded(rows, x_t), x_t, t, s))
            ours = measure_projected(*given, process, TOLERANCE)
    with use_backend("reference"):
        theirs = measure_projected(rows, x_t, t, s, process, TOLERANCE)
    site = process.at(x_t, t)
    at = site.m_k > 0
    score = rows.double().exp()
    score = score.where(score.isfinite(), 1).scatter(-1, x_t.unsqueeze(-1), 1.0)
    unit = site.m_k / site.alpha
    before = rounding(score, x_t, t, process)
    after = before + 1e-14 * process.vocab * (1 + unit * score.amax(-1))
    some = [ScoreMeasures(*(value.cpu()[at] for value in one)) for one in (*ours[:2], *theirs[:2])]
    assert_agree(some[0], some[2], before[at], process)
    for name in ("lowest", "signed_mass", "negative_mass"):
        a, b = getattr(some[1], name), getattr(some[3], name)
        assert ((a - b).abs() <= after[at] * (1 + b.abs())).all(), name
    sure = after[at] < 1e-9  # elsewhere the rounding of the definition exceeds its tolerance
    assert (some[1].beyond[sure] == 0).all() and (some[3].beyond[sure] == 0).all()
    assert (some[1].off_plane[sure] < TOLERANCE).all()
    for name in ("distance", "total"):
        a, b = (getattr(one, name).cpu()[at] for one in (ours, theirs))
        assert ((a - b).abs() <= 1e-9 * (1 + b.abs())).all(), name


@pytest.mark.parametrize("t", [1e-3, 0.5, 0.999])
@pytest.mark.parametrize("vocab", [2, 3, 257])
@pytest.mark.parametrize("name", RANK_ONE)
def test_projected_scores_equal_the_definition(name: str, vocab: int, t: float) -> None:
    """All kinds of scores and times, as log-scores of both precisions, with junk in columns that are ignored."""
    process = RANK_ONE[name](vocab)
    for kind in KINDS:
        x_t, times, _ = sites(process, 3, t)
        rows = scores(kind, process, x_t, times).clamp(min=1e-30).log()
        assert_projected_agree(rows.float(), x_t, times, 0.8 * times, process)
        assert_projected_agree(rows, x_t, times, None, process)


@pytest.mark.parametrize("name", RANK_ONE)
def test_projected_scores_at_the_gpt2_vocabulary(name: str) -> None:
    process = RANK_ONE[name](GPT2)
    for kind, t in (("peaked", 0.3), ("log-normal", 0.9)):
        x_t, times, _ = sites(process, 2, t)
        rows = scores(kind, process, x_t, times).clamp(min=1e-30).log().float()
        assert_projected_agree(rows, x_t, times, 0.9 * times, process)


@pytest.mark.parametrize(("block", "lines"), [(64, 1), (64, 2), (128, 4)])
def test_projected_scores_with_other_tiles(block: int, lines: int) -> None:
    """Rows of several full tiles and a rest, with k in either, and scores that overflow in float32 or in float64."""
    process = m2s.Hybrid(700, p_uniform=0.3)
    x_t = torch.tensor([0, 1, 3, 600, 699, 700])
    times = torch.full((6,), 0.4, dtype=torch.float64)
    rows = scores("log-normal", process, x_t, times).log().float()
    rows[1, 5], rows[2, 690], rows[3, 0], rows[4, 7] = torch.inf, 800.0, -torch.inf, torch.nan
    given = [value.to(DEVICE) for value in (padded(rows, x_t), x_t, times, 0.7 * times)]
    ours = projected_with_tiles(*given, process, TOLERANCE, block, lines, 4)
    assert_projected_agree(rows, x_t, times, 0.7 * times, process, ours)


def test_projected_scores_far_above_the_range_of_the_start() -> None:
    """The start in float32 takes scores above e^74 as e^74: Newton's method in float64 finds sigma from there."""
    process = m2s.Uniform(300, m2s.Linear())
    x_t, times, _ = sites(process, 4, 0.5)
    rows = scores("log-normal", process, x_t, times).log().float() + 90
    with use_backend("fused"):
        found = measure_projected(*(value.to(DEVICE) for value in (rows, x_t, times)), None, process, TOLERANCE)
    assert (found.before.beyond > 0).all() and (found.after.beyond == 0).all()
    assert (found.distance.cpu() - 1).abs().max() < 1e-12


def solve(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction]:
    """Solve a linear system by Gauss-Jordan elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        pivot = next(j for j in range(i, len(rows)) if rows[j][i] != 0)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(len(rows)):
            if j != i and rows[j][i] != 0:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] for row in rows]


def brute_force(score: list[float], k: int, t: float, s: float, process: m2s.Process) -> dict[str, object]:
    """All fields of m2s.diagnose in rational numbers.

    mu~ minimizes |B mu - s|^2 over sum(mu) = 1, where the candidates are the states with a rate into k; the weights are
    (s P_{t|s}^{-1})_y P_{t|s}(k|y).
    """
    time = torch.tensor(t, dtype=torch.float64)
    site = process.at(torch.tensor([k]), time.reshape(1))
    alpha, clean, mask = (Fraction(float(value)) for value in (site.alpha, site.clean, site.mask))
    mixing = [clean] * process.vocab + ([mask] if process.mask is not None else [])
    kernel_t = [[mixing[y] + (alpha if y == z else 0) for y in range(process.states)] for z in range(process.vocab)]
    s_exact = [Fraction(1) if y == k else Fraction(value) for y, value in enumerate(score)]
    candidates = [y for y in range(process.states) if y != k and float(site.rate) > 0]
    reachable = [z for z in range(process.vocab) if kernel_t[z][k] > 0]
    bridge = [[kernel_t[z][y] / kernel_t[z][k] for z in reachable] for y in candidates]
    size = len(reachable)
    if size == 1:
        signed = [Fraction(1)]
    else:
        normal = [[sum(row[a] * row[b] for row in bridge) for b in range(size)] + [Fraction(1)] for a in range(size)]
        right = [sum(row[a] * s_exact[y] for row, y in zip(bridge, candidates, strict=True)) for a in range(size)]
        signed = solve([*normal, [Fraction(1)] * size + [Fraction(0)]], [*right, Fraction(1)])[:size]
    gap = sum(
        (sum(c * m for c, m in zip(row, signed, strict=True)) - s_exact[y]) ** 2
        for row, y in zip(bridge, candidates, strict=True)
    )
    length = sum(s_exact[y] ** 2 for y in candidates)
    lowest = min([*signed, *([Fraction(0)] if size < process.vocab else [])])
    off_plane = float(gap / length) ** 0.5 if candidates else 0.0

    ends = [(min(row), max(row)) for row in bridge]
    loose = Fraction(TOLERANCE)
    outside = sum(not low <= s_exact[y] <= high for (low, high), y in zip(ends, candidates, strict=True))
    beyond = sum(
        not low * (1 - loose) <= s_exact[y] <= high * (1 + loose) for (low, high), y in zip(ends, candidates, strict=True)
    )
    stay, q = process.step(torch.tensor([s], dtype=torch.float64), time.reshape(1))
    stay_exact, q_exact = Fraction(float(stay)), [Fraction(float(q.clean))] * process.vocab
    q_exact += [Fraction(float(q.mask))] if process.mask is not None else []
    total = sum(s_exact)
    weights = [
        (s_exact[y] - q_exact[y] * total) / stay_exact * (q_exact[k] + (stay_exact if y == k else 0))
        for y in range(process.states)
    ]
    material = lowest < -loose or off_plane > TOLERANCE
    inside = 1 if material else 2 if lowest < 0 else 3
    return {
        "classes": 0 if beyond else inside,
        "strict": 0 if outside else inside,
        "outside": outside,
        "beyond": beyond,
        "lowest": float(lowest),
        "signed_mass": float(-sum(min(value, Fraction(0)) for value in signed)),
        "off_plane": off_plane,
        "negative_weights": sum(value < 0 for value in weights),
        "negative_mass": float(-sum(min(value, Fraction(0)) for value in weights)),
    }


@pytest.mark.parametrize("t", [0.05, 0.6, 0.97])
@pytest.mark.parametrize("name", RANK_ONE)
def test_every_field_against_rational_numbers(name: str, t: float) -> None:
    """Every field of m2s.diagnose, on both backends."""
    process = RANK_ONE[name](4)
    for kind in ("peaked", "log-normal", "wide log-normal", "active", "far below the box"):
        x_t, times, _ = sites(process, 3, t)
        score = scores(kind, process, x_t, times)
        expected = [brute_force(row, k, t, 0.7 * t, process) for row, k in zip(score.tolist(), x_t.tolist(), strict=True)]
        for which, where in (("fused", DEVICE), ("reference", "cpu")):
            arguments = [value.to(where) for value in (score, x_t, times)]
            with use_backend(which):
                found = m2s.diagnose(*arguments, process, s=0.7 * arguments[2])
            for row, fields in enumerate(expected):
                for field, value in fields.items():
                    ours = getattr(found, field)[row].item()
                    if field == "off_plane":  # where it is zero, it is as large as rounding makes it
                        assert abs(ours - value) < 1e-12 / min(1.0, float(score[row].norm())), (which, field)
                    elif isinstance(value, float):
                        assert abs(ours - value) < 1e-12 * (1 + abs(value)), (which, field)
                    else:
                        assert ours == value, (which, field)


def test_diagnose_and_classify_use_the_kernel() -> None:
    process = m2s.Uniform(50, m2s.Linear())
    x_t, t = torch.arange(12).reshape(3, 4).to(DEVICE), torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, device=DEVICE)
    score = torch.cat([scores(kind, process, x_t.cpu(), t.cpu()) for kind in ("realizable", "peaked")], 0).to(DEVICE)
    x_t, t = x_t.repeat(2, 1), t.repeat(2)
    with use_backend("fused"):
        fused, classes = m2s.diagnose(score, x_t, t, process, s=t / 2), m2s.classify(score, x_t, t, process)
        assert m2s.classify(score[:0], x_t[:0], t[:0], process).shape == (0, 4)
    with use_backend("reference"):
        plain = m2s.diagnose(score, x_t, t, process, s=t / 2)
    assert torch.equal(classes, fused.classes) and (classes[:3] == 3).all() and (classes[3:] < 3).all()
    for name, ours, theirs in zip(plain._fields, fused, plain, strict=True):
        assert ours.shape == x_t.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name, check_dtype=True)
