"""The audit against brute force over the same trajectories, its invariances; `m2s audit`, its figure, and invalid input."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
import m2s.hub
from m2s.cli import main
from m2s.data import load
from m2s.evaluation.audit import (
    TOLERANCE,
    Audit,
    LogHistogram,
    StepStats,
    audit,
    audit_sampling,
    merge_stats,
    stats_from_json,
)
from m2s.models import DiT, DiTConfig
from m2s.ops import use_backend
from m2s.realizability import SCORE_CLASSES
from m2s.report.audit import CLASS_LABELS, NAMES, format_table, plot_audit, read_audit
from m2s.samplers import Trajectory
from m2s.samplers.options import SamplingOptions
from m2s.samplers.shards import SampleShards
from m2s.training import train
from oracle import CASES, Case, Oracle
from small_runs import InMemorySource, small

PNG = b"\x89PNG"
END, T_MIN = 1e-5, 1e-3  # of the analytic grid, and of what the network sees
SMALLEST = -0.5 * TOLERANCE


class Signed:
    """An unconstrained score, made from signed posteriors of every class, one for each noisy sequence and site."""

    def __init__(self, oracle: Oracle, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.oracle = oracle
        shape = (len(oracle.noisy), oracle.length, oracle.noise.states)
        mu = rng.dirichlet(np.ones(oracle.noise.vocab), shape[:2])
        kind = rng.integers(4, size=shape[:2])
        worst = mu.argmin(-1)[..., None]
        for which, value in ((1, SMALLEST), (2, -0.02), (3, -0.3)):
            moved = mu.copy()
            np.put_along_axis(moved, worst, value, -1)
            moved /= moved.sum(-1, keepdims=True)
            mu = np.where((kind == which)[..., None], moved, mu)
        self.mu = np.zeros(shape)
        self.mu[..., : oracle.noise.vocab] = mu
        self.noise = np.where((kind == 3)[..., None], rng.normal(size=shape), 0.0)

    def log_score(self, x: np.ndarray, t: float) -> np.ndarray:
        score = self.oracle.bridge(self.mu[self.oracle.index(x)], x, t)
        return np.log(np.maximum(np.abs(score), 1e-4)) + self.noise[self.oracle.index(x)]

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        assert len(t.unique()) == 1
        return torch.from_numpy(self.log_score(x_t.numpy(), float(t[0])))


def seen(t: float) -> float:
    """A time as the network sees it, in float32."""
    return float(np.float32(min(max(t, T_MIN), 1 - T_MIN)))


def clock(sampler: str, steps: int) -> list[tuple[float, float]]:
    """Return the time before and after each call. The last step inverts the noise at the time that the network sees."""
    ends = [1 - m / steps for m in range(steps)] + [0.0]
    if sampler == "analytic":
        ends = [END + (1 - END) * end for end in ends] + [0.0]
    return [(min(max(t, T_MIN) if s == 0 else t, 1 - T_MIN), s) for t, s in itertools.pairwise(ends)]


def nearest(matrix: np.ndarray, score: np.ndarray) -> np.ndarray:
    """argmin |matrix mu - score| over the simplex: every support is tried, and on each the plane's least squares."""
    best, found = np.inf, None
    for size in range(1, matrix.shape[1] + 1):
        for support in itertools.combinations(range(matrix.shape[1]), size):
            mu = np.zeros(matrix.shape[1])
            mu[list(support)] = on_plane(matrix[:, support], score)
            distance = np.linalg.norm(matrix @ mu - score)
            if (mu > -1e-12).all() and distance < best:
                best, found = distance, mu
    assert found is not None
    return found


def on_plane(matrix: np.ndarray, score: np.ndarray) -> np.ndarray:
    """argmin |matrix mu - score| over sum(mu) = 1, signs free: mu = e_0 + D v, D the differences from the first column."""
    rest = np.linalg.lstsq(matrix[:, 1:] - matrix[:, :1], score - matrix[:, 0], rcond=None)[0]
    return np.append(1 - rest.sum(), rest)


def brute_force(case: Case, network: Signed, states: np.ndarray, times: list[tuple[float, float]], weighs: bool) -> list[dict]:
    """Every score vector on the way of `states` [calls + 1, n, L], examined one by one with the oracle's matrices alone."""
    noise, found = case.noise, []
    for x, (t, s) in zip(states, times, strict=False):
        kernel, rates = noise.transition_matrix(t), noise.rates(t)
        score = np.exp(network.log_score(x, seen(t)))
        step = noise.step(s, t) if weighs else None
        stats = {"sites": 0, "scores": 0, "classes": [0] * 4, "strict": [0] * 4, "coordinates": 0, "signed": 0, "overlap": 0}
        stats["coordinates_strict"] = 0
        stats |= {"signed_mass": 0.0, "negative": 0, "negative_mass": 0.0, "moved": 0.0, "excess": []}
        for at in np.ndindex(x.shape):
            k = x[at]
            others = [y for y in range(noise.states) if y != k]
            counted = [y for y in others if rates[y, k] > 0]
            reach = [z for z in range(noise.vocab) if kernel[z, k] > 0]
            if not counted or reach == [k]:
                continue
            matrix = (kernel[reach] / kernel[reach][:, [k]]).T[counted]
            value = score[at][counted]
            low, high = matrix.min(1), matrix.max(1)
            mu = on_plane(matrix, value)
            if np.linalg.matrix_rank(matrix[:, 1:] - matrix[:, :1]) < len(reach) - 1:  # several signed posteriors: none counts
                mu = np.maximum(nearest(matrix, value), 0)
            off = np.linalg.norm(matrix @ mu - value) / np.linalg.norm(value)
            inside = 1 if mu.min() < -TOLERANCE or off > TOLERANCE else 2 if mu.min() < 0 else 3
            strict = ((value < low) | (value > high)).sum()
            tolerant = ((value < low * (1 - TOLERANCE)) | (value > high * (1 + TOLERANCE))).sum()
            stats["sites"] += 1
            stats["scores"] += len(counted)
            stats["classes"][0 if tolerant else inside] += 1
            stats["strict"][0 if strict else inside] += 1
            stats["coordinates"] += tolerant
            stats["coordinates_strict"] += strict
            stats["signed"] += mu.min() < -TOLERANCE
            stats["overlap"] += mu.min() < -TOLERANCE and strict > 0
            stats["signed_mass"] += -np.minimum(mu, 0).sum()
            stats["moved"] += np.linalg.norm(matrix @ nearest(matrix, value) - value) / np.linalg.norm(value)
            stats["excess"].append(value.sum() / high[0] - 1)
            if step is not None:
                full = score[at].copy()
                full[k] = 1
                weights = np.linalg.solve(step.T, full) * step[:, k]
                mass = -np.minimum(weights, 0).sum()
                stats["negative"] += mass > 1e-12
                stats["negative_mass"] += mass
        found.append(stats)
    return found


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("uniform-linear", "analytic"),
        ("uniform-linear", "euler"),
        ("absorbing-linear", "analytic"),
        ("hybrid-0.2", "analytic"),
        ("gaussian", "euler"),
        ("birth-death", "euler"),
        ("tabulated-absorbing", "euler"),
    ],
    ids=str,
)
def test_counts_are_those_of_brute_force(name, sampler):
    case = CASES[name]
    network, head, trajectory = Signed(case.oracle()), m2s.LogScore(case.process), Trajectory()
    n, steps, length = 5, 5, case.length
    m2s.sample(network, head, (n, length), steps=steps, sampler=sampler, grid="linear", seed=3, callback=trajectory)
    found = audit(network, head, (n, length), steps=steps, sampler=sampler, seed=3, batch_size=3)
    times = clock(sampler, steps)
    weighs = sampler == "analytic"
    expected = brute_force(case, network, trajectory.states.numpy(), times, weighs)
    assert len(found.calls) == len(expected) == steps + weighs
    for stats, right, (t, s) in zip(found.calls, expected, times, strict=True):
        assert (stats.samples, stats.sites, stats.scores) == (n, right["sites"], right["scores"])
        assert stats.t / n == pytest.approx(t, rel=1e-14) and stats.s / n == pytest.approx(s, rel=1e-14)
        for field in ("classes", "strict", "coordinates", "coordinates_strict", "signed", "overlap", "negative"):
            assert getattr(stats.before, field) == right[field], field
        assert stats.before.signed_mass == pytest.approx(right["signed_mass"], rel=1e-6, abs=1e-10)
        assert stats.before.negative_mass == pytest.approx(right["negative_mass"], rel=1e-6, abs=1e-10)
        assert stats.moved == pytest.approx(right["moved"], rel=1e-6, abs=1e-10)
        assert sum(stats.before.classes) == sum(stats.before.strict) == sum(stats.after.classes) == stats.sites
        assert stats.after.classes[:2] == [0, 0]
        assert (stats.after.coordinates, stats.after.signed, stats.after.negative) == (0, 0, 0)
        if name == "absorbing-linear":
            assert stats.excess.count == stats.sites
            assert stats.excess.total == pytest.approx(sum(right["excess"]), rel=1e-9)
    total = found.overall()
    assert total.sites == sum(right["sites"] for right in expected[:steps])
    assert total.before.strict == np.sum([right["strict"] for right in expected[:steps]], 0).tolist()
    counted = [right for right in expected[:steps] if right["sites"]]
    averages = found.averages()
    outside = np.mean([right["coordinates_strict"] / right["scores"] for right in counted])
    assert averages["before"]["coordinates_outside"] == pytest.approx(outside)
    negative = np.mean([right["negative"] / right["sites"] for right in counted])
    assert averages["before"]["negative_weights"] == (pytest.approx(negative) if weighs else None)
    assert averages["after"]["negative_weights"] == (0 if weighs else None)
    if name == "uniform-linear":
        assert min(total.before.strict) > 0, "every class occurs"
        assert outside > 0 and (negative > 0 or not weighs)


@pytest.mark.parametrize("sampler", ["analytic", "euler"])
@pytest.mark.parametrize(
    "head",
    [
        m2s.LogScore(m2s.Uniform(70, m2s.Linear())),
        m2s.LogScore(m2s.Absorbing(70, m2s.Linear())),
        m2s.LogScore(m2s.Absorbing(70, m2s.LogLinear()), scale="sigma"),
        m2s.LogScore(m2s.Hybrid(70, 0.3)),
    ],
    ids=repr,
)
def test_kernels_count_as_the_definition_does(head, sampler):
    """Float32 log-scores, with padding. After projection the least entry of a signed posterior is 0 up to rounding, so that its
    sign, which separates boundary from realizable, depends on the order of sums."""
    pytest.importorskip("triton")
    states = head.process.states
    table = 0.5 * torch.randn(states, states + 3, generator=torch.Generator().manual_seed(0))
    options = SamplingOptions(head, (2, 4), 3, sampler, "linear", 1, micro_batch=2)
    found = []
    for backend in ("fused", "reference"):
        with use_backend(backend):
            tokens, one = audit_sampling(lambda x, t, condition=None: table[x], options)
        after = [step.after for step in one.calls]
        for counts in after:
            assert counts.signed_mass < 1e-9 * (1 + sum(counts.classes))
            for classes in (counts.classes, counts.strict):
                classes[2:] = [sum(classes[2:]), 0]
            counts.signed_mass = counts.signed_mass_most = 0.0
        found.append((tokens, [dataclasses.asdict(step) for step in one.calls]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1][0]["before"]["classes"] != [0] * 4
    assert_close(found[0][1], found[1][1])


def test_kernels_audit_projected_scores_too():
    """Projected scores are realizable up to rounding, and a second projection does not move them."""
    pytest.importorskip("triton")
    head = m2s.Projected(m2s.LogScore(m2s.Hybrid(70, 0.3)))
    states = head.process.states
    table = 0.5 * torch.randn(states, states + 3, generator=torch.Generator().manual_seed(0))
    options = SamplingOptions(head, (2, 4), 3, "analytic", "linear", 1, micro_batch=2)
    found = []
    for backend in ("fused", "reference"):
        with use_backend(backend):
            found.append(audit_sampling(lambda x, t, condition=None: table[x], options)[1].calls)
    for ours, theirs in zip(*found, strict=True):
        assert (ours.sites, ours.scores, ours.samples) == (theirs.sites, theirs.scores, theirs.samples) and ours.sites
        for step in (ours, theirs):
            assert step.before.classes[:2] == step.after.classes[:2] == [0, 0] and step.moved < 1e-9


def assert_close(ours: object, theirs: object) -> None:
    """Equal integers, and floats that agree to 1e-9, in any nesting."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, list):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_close(*pair)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
    else:
        assert ours == theirs


def test_after_one_projection_nothing_is_left():
    for name in ("uniform-linear", "absorbing-linear", "hybrid-0.2"):
        case = CASES[name]
        head = m2s.Projected(m2s.LogScore(case.process))
        found = audit(Signed(case.oracle()), head, (4, case.length), steps=4, seed=0)
        for stats in found.calls:
            assert stats.before.classes[:2] == [0, 0] and sum(stats.before.classes) == stats.sites
            assert stats.before.coordinates == stats.before.signed == stats.before.negative == 0
            assert stats.moved_most < 1e-9


class Fixed:
    """Random logits in float32 for each site and token; the time shifts them."""

    def __init__(self, states: int, length: int, scale: float) -> None:
        self.table = scale * torch.randn(states, length, states, generator=torch.Generator().manual_seed(5))

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.table[x_t, torch.arange(x_t.shape[1])] * (0.5 + t[:, None, None])


@pytest.mark.parametrize("sampler", ["analytic", "bayes", "euler"])
@pytest.mark.parametrize(
    "process", [m2s.Uniform(5, m2s.Linear()), m2s.Uniform(300, m2s.LogLinear()), m2s.Absorbing(7, m2s.Linear())], ids=repr
)
def test_a_posterior_head_is_never_outside_nor_material(process, sampler):
    head = m2s.Posterior(process, offset="exact" if sampler == "bayes" else "none")
    found = audit(Fixed(process.states, 6, 4.0), head, (5, 6), steps=7, sampler=sampler, seed=0)
    assert found.overall().sites > 0
    for stats in found.calls:
        assert stats.before.classes[:2] == stats.after.classes[:2] == [0, 0]
        assert stats.before.coordinates == stats.before.signed == stats.before.negative == 0


def test_the_run_is_that_of_the_sampler_and_no_batch_changes_a_count():
    process = m2s.Uniform(6, m2s.Linear())
    network, head = Fixed(6, 5, 0.5), m2s.LogScore(process)
    options = SamplingOptions(head, (5, 5), 4, "analytic", "linear", 11)
    tokens, full = audit_sampling(network, options)
    assert torch.equal(tokens, m2s.sample(network, head, (5, 5), steps=4, sampler="analytic", grid="linear", seed=11))
    for size in (2, 64):
        parts = audit(network, head, (5, 5), steps=4, seed=11, batch_size=size)
        assert len(parts.calls) == len(full.calls) == 5
        for a, b in zip(parts.calls, full.calls, strict=True):
            same(dataclasses.asdict(a), dataclasses.asdict(b))


def same(a: dict, b: dict) -> None:
    """Counts to the last digit; sums and times up to their order."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, dict):
            same(value, b[name])
        elif isinstance(value, float):
            assert value == pytest.approx(b[name], rel=1e-12)
        else:
            assert value == b[name], name


def test_histograms_need_no_range_and_can_be_merged():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=4000) * 10.0 ** rng.uniform(-5, 5, 4000), [0.0] * 50])
    distributions = []
    for part in np.split(values, [100, 2500]):
        distributions.append(LogHistogram())
        distributions[-1].add(torch.from_numpy(part))
    distribution = merge_stats(merge_stats(distributions[0], distributions[1]), distributions[2])
    assert distribution.count == len(values) and distribution.total == pytest.approx(values.sum())
    assert len(distribution.bins) < 2 * LogHistogram.PER_DECADE * 18
    for share in (0.0, 0.05, 0.5, 0.77, 1.0):
        right = np.quantile(values, share, method="inverted_cdf")
        assert distribution.quantile(share) == pytest.approx(right, rel=0.012, abs=2e-8)


def test_counts_are_restored_from_json():
    found = audit(
        Signed(CASES["absorbing-linear"].oracle()), m2s.LogScore(CASES["absorbing-linear"].process), (3, 4), steps=5, seed=0
    )
    assert stats_from_json(json.loads(json.dumps([dataclasses.asdict(stats) for stats in found.calls]))) == found.calls
    assert merge_stats(StepStats(), found.calls[0]) == found.calls[0]


def test_scores_that_overflow_are_outside_and_nan_is_an_error():
    head = m2s.LogScore(m2s.Uniform(3, m2s.Linear()))
    found = audit(lambda x, t: torch.full((*x.shape, 3), 1e4), head, (2, 2), steps=3, seed=0)
    assert found.overall().before.classes == [12, 0, 0, 0] and found.overall().after.classes[:2] == [0, 0]
    with pytest.raises(ValueError, match="NaN"):
        audit(lambda x, t: torch.full((*x.shape, 3), torch.nan), head, (2, 2), steps=3, seed=0)


def test_an_audit_prints_the_fractions_of_the_classes():
    process = m2s.Uniform(6, m2s.Linear())
    found = m2s.audit(Fixed(6, 5, 0.5), m2s.LogScore(process), (5, 5), steps=4, seed=0)
    total = found.overall()
    shares = ", ".join(f"{n / 100:.2%} {name}" for n, name in zip(total.before.classes, SCORE_CLASSES, strict=True))
    assert repr(found) == str(found) == f"Audit({shares} of 100 scores)" and total.sites == 100
    assert repr(Audit(m2s.LogScore(process), "analytic", 4)) == "Audit(nothing was counted)"
    assert m2s.audit is audit


@pytest.mark.parametrize("kind", [m2s.LogScore, m2s.Posterior, lambda process: m2s.Projected(m2s.LogScore(process))])
def test_the_sampler_fits_the_process(kind):
    """SEDD's analytic step for every head of a rank-one process; Euler's where rates are tabulated."""
    network = Fixed(5, 4, 1.0)
    for process, sampler in ((m2s.Uniform(5, m2s.Linear()), "analytic"), (m2s.RateMatrix.uniform(5, m2s.Linear()), "euler")):
        found, named = (audit(network, kind(process), (3, 4), steps=3, seed=0, **more) for more in ({}, {"sampler": sampler}))
        assert found.summary() == named.summary() and found.has_weights == (sampler == "analytic")


def test_heads_without_scores_are_rejected():
    chain = m2s.Chain(torch.eye(3).expand(4, 3, 3) * 0.9 + 0.1 / 3)
    with pytest.raises(TypeError, match="finite chain, which has no rates"):
        audit(Fixed(3, 2, 1.0), m2s.Posterior(chain), (2, 2), seed=0)
    large = m2s.LogScore(m2s.RateMatrix.uniform(300, m2s.Linear()))
    with pytest.raises(TypeError, match="projected up to 256"):
        audit(Fixed(300, 2, 1.0), large, (2, 2), sampler="euler", seed=0)


@pytest.fixture(scope="module")
def sedd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network, trained a little by score entropy on the fourth row of pixels of the digits."""
    out = tmp_path_factory.mktemp("sedd") / "run"
    rows = load("digits").train[:256, 24:32].long()
    changes = {"run__steps": 60, "run__save_every": 60, "run__validate_every": 60, "optimizer__lr": 1e-2}
    train(small(out, method="sedd", **changes), InMemorySource(rows, 17))
    return out


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = DiT(DiTConfig(states=6, width=16, depth=1, heads=2, condition_width=8, length=4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head = m2s.LogScore(m2s.Absorbing(5, m2s.LogLinear()))
    return m2s.hub.save(tmp_path_factory.mktemp("masks") / "run", model, head, {"kind": "text", "length": 4})


@pytest.fixture(scope="module")
def done(sedd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("done")
    run_audit(sedd, out)
    return out


def same_command(checkpoint: Path, out: Path) -> list[str]:
    return ["audit", str(checkpoint), "--out", str(out), "--n", "6", "--steps", "5", "--batch-size", "3"]


def run_audit(checkpoint: Path, out: Path, *more: str) -> dict:
    main([*same_command(checkpoint, out), *more])
    return json.loads((out / "audit.json").read_text())


def test_a_trained_sedd_model_has_material_positions_and_the_report_says_so(sedd, tmp_path, capsys):
    found = run_audit(sedd, tmp_path)
    said = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.json", "audit.png", "audit.txt"]
    overall = found["overall"]
    assert overall["position_steps"] == 6 * 8 * 5 == sum(overall["before"]["strict"].values())
    assert overall["coordinates"] == 6 * 8 * 5 * 16
    assert overall["before"]["classes"]["material"] >= 0.05 * overall["position_steps"]
    assert overall["after"]["classes"]["outside"] == overall["after"]["classes"]["material"] == 0
    model, head = m2s.load(sedd)
    expected = audit(model, head, (6, 8), steps=5, batch_size=3, seed=0).summary()
    assert {name: found[name] for name in expected} == expected
    assert found["denoiser"]["position_steps"] == 48 and len(found["steps"]) == 5
    text = (tmp_path / "audit.txt").read_text()
    for name in SCORE_CLASSES:
        count = overall["before"]["strict"][name]
        for page in (said, text):
            row = next(line for line in page.splitlines() if line.startswith(f"{NAMES[name]} ")).split()
            counts = (count, overall["before"]["classes"][name], overall["after"]["classes"][name])
            assert row[-4:] == [f"{count / 240:.4%}", *(f"{part:,}" for part in counts)]
    assert all(f"{step['t']:.5f}" in text for step in found["steps"])
    assert (tmp_path / "audit.png").read_bytes().startswith(PNG)


def test_the_figure_shows_the_numbers_of_the_file(done, tmp_path, capsys):
    found = read_audit(done / "audit.json")
    figure = plot_audit(found)
    assert [axes.get_title(loc="left")[:3] for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    assert "How far the projection moves a score" in figure.axes[3].get_title(loc="left")
    overall, steps = found["overall"], found["steps"]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == [
        f"{CLASS_LABELS[name]}: {overall['before']['strict'][name] / overall['position_steps']:.3%}" for name in SCORE_CLASSES
    ]
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[1].lines}
    weights = [step["before"]["negative_weights"] / step["position_steps"] for step in steps]
    assert np.allclose(lines["negative weights"], weights)
    assert not np.any(lines["negative weights, projected"]) and not np.any(lines["scores out of the box, projected"])
    assert np.allclose(figure.axes[3].lines[0].get_ydata(), [step["moved"]["mean"] for step in steps])
    main(["figure", "audit", "--source", str(done / "audit.json"), "--out", str(tmp_path / "again.svg")])
    assert "<svg" in (tmp_path / "again.svg").read_text() and "again.svg written" in capsys.readouterr().out


def test_masks_are_audited_at_masked_positions_only(masks, tmp_path):
    found = run_audit(masks, tmp_path)
    model, head = m2s.load(masks)
    trajectory = Trajectory()
    m2s.sample(model, head, (6, 4), steps=5, sampler="analytic", grid="linear", callback=trajectory, seed=0)
    masked = (trajectory.states == 5).sum((1, 2)).tolist()
    assert [step["position_steps"] for step in found["steps"]] == masked[:5]
    assert found["denoiser"]["position_steps"] == masked[5]
    assert all(step["coordinates"] == 5 * step["position_steps"] for step in found["steps"])
    assert found["overall"]["excess"]["quantiles"]["0"] <= found["overall"]["excess"]["mean"]
    assert "sum(s)/c - 1" in format_table(found) and "[0, c]" in format_table(found)
    last = plot_audit(found).axes[3]
    assert "How far the scores' sum" in last.get_title(loc="left")
    medians = [step["excess"]["quantiles"]["0.5"] for step in found["steps"] if step["position_steps"]]
    assert np.allclose(last.lines[1].get_ydata(), medians)


def test_a_sampler_without_weights_says_nothing_of_them(sedd, tmp_path):
    (tmp_path / "audit.json").write_text("an older one")
    found = run_audit(sedd, tmp_path, "--sampler", "euler", "--overwrite")
    assert found["overall"]["before"]["negative_weights"] is None and found["denoiser"] is None
    assert len(found["steps"]) == 5 and "negative sampler weights" in format_table(found)
    assert next(line.get_label() for line in plot_audit(found).axes[1].lines) == "scores out of the box"


def test_overwrite_replaces_an_unfinished_audit_with_other_settings(sedd, tmp_path):
    expected = run_audit(sedd, tmp_path / "complete", "--sampler", "euler")
    out, parts = tmp_path / "other", tmp_path / "other" / "audit.json.parts"
    parts.mkdir(parents=True)
    (parts / "settings.json").write_text(json.dumps({"seed": 99}))
    (parts / "000000000.npz").write_bytes(b"of another audit")
    with pytest.raises(SystemExit):
        run_audit(sedd, out, "--sampler", "euler")
    found = run_audit(sedd, out, "--sampler", "euler", "--overwrite")
    assert found["overall"] == expected["overall"] and found["steps"] == expected["steps"] and not parts.exists()


@pytest.fixture(scope="module")
def tabulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = DiT(DiTConfig(states=5, width=16, depth=1, heads=2, condition_width=8, length=4))
    head = m2s.LogScore(m2s.RateMatrix.uniform(5, m2s.Linear()))
    return m2s.hub.save(tmp_path_factory.mktemp("tabulated") / "run", model, head, {"kind": "text", "length": 4})


def test_by_default_the_sampler_fits_the_checkpoint(sedd, tabulated, done, tmp_path, capsys):
    assert read_audit(done / "audit.json")["settings"]["sampler"] == "analytic"
    assert run_audit(tabulated, tmp_path / "audit")["settings"]["sampler"] == "euler"
    main(["repair", str(tabulated), "--n", "3", "--steps", "2", "--measure", "none", "--out", str(tmp_path / "repair")])
    audits = json.loads((tmp_path / "repair" / "repair.json").read_text())["audits"]
    assert {arm["settings"]["sampler"] for arm in audits.values()} == {"euler"}
    assert "use --sampler euler" in error_line(
        capsys, tmp_path, *same_command(tabulated, tmp_path / "new"), "--sampler", "analytic"
    )


def test_the_default_sampler_resumes_an_audit_of_the_same_sampler(sedd, done, tmp_path, monkeypatch):
    """The settings record the sampler itself, not "auto"."""
    write = SampleShards.write

    def killed(self: SampleShards, first: int, tokens: torch.Tensor) -> None:
        write(self, first, tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr(SampleShards, "write", killed)
    with pytest.raises(SystemExit):
        run_audit(sedd, tmp_path / "begun", "--sampler", "analytic")
    monkeypatch.setattr(SampleShards, "write", write)
    assert run_audit(sedd, tmp_path / "begun") == read_audit(done / "audit.json")


def test_a_killed_audit_resumes_to_the_same_result(sedd, done, tmp_path, monkeypatch, capsys):
    write, drawn = SampleShards.write, []

    def killed(self: SampleShards, first: int, tokens: torch.Tensor) -> None:
        if first == 3:
            raise KeyboardInterrupt
        write(self, first, tokens)

    def counted(self: SampleShards, first: int, tokens: torch.Tensor) -> None:
        drawn.append(first)
        write(self, first, tokens)

    monkeypatch.setattr(SampleShards, "write", killed)
    with pytest.raises(SystemExit):
        run_audit(sedd, tmp_path / "killed")
    assert "n 6 there and 9 here" in error_line(capsys, tmp_path, *same_command(sedd, tmp_path / "killed"), "--n", "9")
    monkeypatch.setattr(SampleShards, "write", counted)
    assert run_audit(sedd, tmp_path / "killed") == read_audit(done / "audit.json") and drawn == [3]
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["audit.json", "audit.png", "audit.txt"]
    for name in ("audit.txt", "audit.png"):
        assert (tmp_path / "killed" / name).read_bytes() == (done / name).read_bytes()


def error_line(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Return the one line that invalid input prints; no file is written."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and sorted(folder.rglob("*")) == before
    return err


def test_bad_input_is_one_line_and_writes_nothing(sedd, done, tmp_path, capsys):
    chain = m2s.Posterior(m2s.Chain(torch.eye(17).expand(4, 17, 17) * 0.9 + 0.1 / 17))
    model = m2s.load(sedd).model
    finite = m2s.hub.save(tmp_path / "chain", model, chain, {"kind": "text", "length": 4})
    silent = m2s.hub.save(tmp_path / "silent", model, m2s.LogScore(m2s.Uniform(17, m2s.Linear())))
    out = ("--out", str(tmp_path / "new"))
    for arguments, said in (
        ((str(finite), *out), "cannot be audited: Posterior(Chain"),
        ((str(tmp_path / "nowhere"), *out), "nowhere"),
        ((str(silent), *out), "give --length"),
        ((str(sedd), *out, "--sampler", "bayes"), "use --sampler analytic, euler or tau_leaping"),
        ((str(sedd), *out, "--sampler", "analytik"), "did you mean analytic?"),
        ((str(sedd), *out, "--grid", "square"), "linear, cosine"),
        ((str(sedd), *out, "--n", "0"), "--n is 0"),
        ((str(sedd), *out, "--steps", "0"), "steps is 0"),
        ((str(sedd), *out, "--batch-size", "0"), "--batch-size is 0"),
        ((str(sedd), "--out", str(finite / "config.json")), "is a file"),
    ):
        assert said in error_line(capsys, tmp_path, "audit", *arguments)
    assert "--overwrite" in error_line(capsys, done, "audit", str(sedd), "--out", str(done))


def test_the_figure_rejects_other_files(tmp_path, capsys):
    picture = ("--out", str(tmp_path / "x.png"))
    (tmp_path / "other.json").write_text('{"steps": []}')
    (tmp_path / "cut.json").write_text('{"steps": [')
    for arguments, said in (
        (("audit", *picture), "give --source"),
        (("audit", *picture, "--source", str(tmp_path / "no.json")), "cannot be read"),
        (("audit", *picture, "--source", str(tmp_path / "cut.json")), "is not JSON"),
        (("audit", *picture, "--source", str(tmp_path / "other.json")), "is no audit"),
        (("audit", *picture, "--source", str(tmp_path / "other.json"), "--seed", "1"), "leave out --seed"),
        (("toy", *picture, "--source", str(tmp_path / "other.json")), "leave out --source"),
    ):
        assert said in error_line(capsys, tmp_path, "figure", *arguments)


def test_an_audit_starts_empty():
    found = Audit(m2s.LogScore(m2s.Uniform(3, m2s.Linear())), "analytic", 4)
    assert found.overall() == StepStats() and found.denoiser is None
    assert found.summary()["overall"]["position_steps"] == 0
