"""experiments/repair.py: the forms of a score, what is counted, and the files."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import m2s
from m2s.presets import PRESETS

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("repair_script", ROOT / "experiments" / "repair.py")
repair = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(repair)
K = 5


def scores(spread: float):
    """A head, its input, and scores near those of a posterior (small spread) or anywhere."""
    generator = torch.Generator().manual_seed(0)
    process = m2s.Uniform(K, m2s.Linear())
    x_t = torch.randint(K, (40, 3), generator=generator)
    t = torch.rand(40, generator=generator) * 0.8 + 0.1
    mu = torch.softmax(2 * torch.randn(40, 3, K, generator=generator, dtype=torch.float64), -1)
    score = m2s.score_from_posterior(mu, x_t, t, process)
    output = score.log() + spread * torch.randn(score.shape, generator=generator, dtype=torch.float64)
    return m2s.LogScore(process), output, x_t, t, mu


def off_sum(score, x_t):
    return score.scatter(-1, x_t.unsqueeze(-1), 0.0).sum(-1)


def test_every_form_leaves_the_score_of_a_posterior_as_it_is():
    head, output, x_t, t, mu = scores(0.0)
    for name, repaired in repair.forms(head).items():
        assert torch.allclose(repaired.posterior(output, x_t, t), mu, atol=1e-9), name


def test_rate_kept_is_the_nearest_score_of_a_posterior_with_the_same_sum():
    """Against a search: no other posterior with the same current entry has a nearer score."""
    head, output, x_t, t, _ = scores(0.3)
    repaired, process = repair.RateKept(head), head.process
    raw, kept = (one.log_score(output, x_t, t).exp() for one in (head, repaired))
    signed = m2s.affine_inverse(raw, x_t, t, process)
    current = signed.gather(-1, x_t.unsqueeze(-1)).squeeze(-1)
    inside = (current > 0) & (current < 1)
    assert inside.float().mean() > 0.5 and (signed.amin(-1) < -1e-3).float().mean() > 0.2
    assert torch.allclose(off_sum(kept, x_t)[inside], off_sum(raw, x_t)[inside], rtol=1e-9)
    mu = repaired.posterior(output, x_t, t)
    assert mu.min() >= 0 and torch.allclose(mu.sum(-1), torch.ones_like(current))
    assert torch.allclose(m2s.score_from_posterior(mu, x_t, t, process), kept)
    distance = lambda score: (score - raw).scatter(-1, x_t.unsqueeze(-1), 0.0).square().sum(-1)  # noqa: E731
    generator = torch.Generator().manual_seed(1)
    projected = m2s.Projected(head).log_score(output, x_t, t).exp()
    assert (distance(projected) <= distance(kept) + 1e-9).all()  # the projection has one constraint less
    for size in (1e-3, 0.1, 1.0):
        moved = (mu + size * torch.rand(mu.shape, generator=generator, dtype=mu.dtype)).scatter(-1, x_t.unsqueeze(-1), 0.0)
        moved = moved / moved.sum(-1, keepdim=True) * (1 - current.clamp(0, 1)).unsqueeze(-1)
        other = m2s.score_from_posterior(
            moved.scatter(-1, x_t.unsqueeze(-1), current.clamp(0, 1).unsqueeze(-1)), x_t, t, process
        )
        assert (distance(other) >= distance(kept) - 1e-9)[inside].all()


def test_clipped_is_the_positive_part():
    head, output, x_t, t, _ = scores(0.3)
    signed = head.posterior(output, x_t, t)
    positive = torch.where(signed > 0, signed, 0)
    expected = positive / positive.sum(-1, keepdim=True)
    assert torch.allclose(repair.Clipped(head).posterior(output, x_t, t), expected)


def test_changes_and_dropped_mass_are_those_of_the_diagnostics():
    head = m2s.LogScore(m2s.Uniform(K, m2s.Linear()))

    def model(x_t, t, condition=None):
        return torch.sin(7.0 * x_t.double().unsqueeze(-1) + torch.arange(K) + t.double()[:, None, None])

    tokens, counts = repair.draw(model, head, 4, 6, 32)
    options = {"sampler": "analytic", "grid": "linear", "seed": 0, "micro_batch": repair.MICRO_BATCH}
    again, found = m2s.sample(model, head, (32, 6), steps=4, diagnostics=True, **options)
    assert torch.equal(tokens, again) and counts.mass > 0
    assert (counts.changes, counts.sites) == (found.total("jumps"), found.total("sites"))
    assert counts.mass == pytest.approx(found.total("negative_mass"))


def test_parts_of_the_projection_are_raised_lowered_early_and_late():
    head, output, x_t, t, _ = scores(0.3)
    raw, projected = (one.log_score(output, x_t, t) for one in (head, m2s.Projected(head)))
    found = {name: one.log_score(output, x_t, t) for name, one in repair.parts(head).items()}
    assert torch.equal(found["only raised"], torch.maximum(raw, projected))
    assert torch.equal(found["only lowered"], torch.minimum(raw, projected))
    late = (t < repair.BOUNDARY)[:, None, None]
    assert late.any() and not late.all()
    assert torch.equal(found["only late"], torch.where(late, projected, raw))
    assert torch.equal(found["only early"], torch.where(late, raw, projected))


def test_score_errors_are_those_of_the_objective():
    """Of a network whose scores are those of a posterior, and of one that gives the true token nothing."""
    process = m2s.Uniform(K, m2s.Linear())
    head = m2s.LogScore(process)
    x_0 = torch.arange(24).reshape(6, 4) % K

    def model(x_t, t):
        mu = torch.full((*x_t.shape, K), 1 / K, dtype=torch.float64)
        return m2s.score_from_posterior(mu, x_t, t, process).log()

    found = repair.score_errors(model, repair.forms(head), x_0)
    posterior = m2s.Posterior(process)
    for number, one in enumerate(found):
        t = torch.full((6,), one["t"])
        noise = torch.Generator().manual_seed(repair.derived_seed(0, number))
        x_t = process.corrupt(x_0, t, generator=noise)
        expected = float(m2s.score_entropy(posterior, torch.zeros(6, 4, K), x_0, x_t, t).mean())
        assert all(value == pytest.approx(expected, rel=1e-4) for value in one["score_entropy"].values())
        assert set(one["zero"].values()) == {0.0} and one["above"] == one["below"] == 0.0

    def wrong(x_t, t):
        scores = model(x_t, t).exp()
        return torch.where(torch.nn.functional.one_hot(x_0, K).bool(), 1e-3 * scores, scores).log()

    for number, one in enumerate(repair.score_errors(wrong, repair.forms(head), x_0)):
        noise = torch.Generator().manual_seed(repair.derived_seed(0, number))
        changed = process.corrupt(x_0, torch.full((6,), one["t"]), generator=noise) != x_0
        assert {one["zero"][name] for name in ("as it is", "projected", "clipped")} == {float(changed.float().mean())}


def test_rows_and_tables(tmp_path, monkeypatch, capsys):
    for name, value in {"SEEDS": (1,), "STATES": (1, 2), "STEPS": (2,), "MANY": 2}.items():
        monkeypatch.setattr(repair, name, value)
    network = replace(PRESETS["digits"].network, width=16, layers=1, multipliers=(1,))
    monkeypatch.setitem(PRESETS, "digits", replace(PRESETS["digits"], network=network))
    monkeypatch.setattr(repair, "TIMES", repair.TIMES[:3])
    out, results = tmp_path / "out", tmp_path / "repair.json"
    assert repair.main([str(out), "--table", "--results", str(results)]) == 2
    assert "1-1.json" in capsys.readouterr().err and not results.exists()
    assert repair.main([str(out), "--samples", "8"]) == 0
    first, second = (json.loads((out / f"1-{state}.json").read_text()) for state in (1, 2))
    assert first["steps"][0]["distances"] != second["steps"][0]["distances"]
    assert m2s.load(out / "states" / "1-1").config["extra"]["step"] == 1
    assert repair.main([str(out), "--table", "--results", str(results)]) == 0
    said = capsys.readouterr().out
    change = second["steps"][0]["differences"]["projected - as it is"]["value"]
    assert f"| {change:+.3f} ± 0.000 |" in said
    rows = json.loads(results.read_text())["rows"]
    assert [row["state"] for row in rows] == [1, 2] and rows[0]["parts"] != rows[1]["parts"]
    gap = rows[1]["parts"]["only late"] - second["steps"][0]["distances"]["as it is"]["value"]
    assert f"| {gap:+.3f} ± 0.000 |" in said
    loss = rows[0]["score_errors"][2]["score_entropy"]
    assert f"| 1 | {repair.TIMES[2]} | {loss['as it is']:.3f} ± 0.000 | {loss['projected'] - loss['as it is']:+.3f}" in said
