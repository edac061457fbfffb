"""`m2s repair`: pairs of samples on the same noise, compared directly, by a judge and by FID; and invalid options."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import m2s
import m2s.hub
from m2s.cli import main
from m2s.data import Characters
from m2s.data import load as load_data
from m2s.data.files import sha256
from m2s.evaluation import inception, judge
from m2s.evaluation.fid import Statistics, frechet
from m2s.evaluation.judge import Judge, JudgeOutput, TokenizedText
from m2s.evaluation.repair import count_changes, fid_difference
from m2s.models import DiT, DiTConfig
from m2s.report.samples import picture_grid
from m2s.samplers.shards import SampleShards

LETTERS = Characters(" abcdefg")


def network(states: int, length: int) -> DiT:
    """Return a small network with random weights."""
    torch.manual_seed(3)
    model = DiT(DiTConfig(states=states, width=16, depth=1, heads=2, condition_width=8, length=length))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    data = {"kind": "image", "shape": [8, 8], "levels": 17}
    head = m2s.LogScore(m2s.Uniform(17, m2s.Linear()))
    return str(m2s.hub.save(tmp_path_factory.mktemp("images"), network(17, 64), head, data))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    head = m2s.LogScore(m2s.Uniform(8, m2s.Linear()))
    data = {"kind": "text", "length": 10}
    return str(m2s.hub.save(tmp_path_factory.mktemp("text"), network(8, 10), head, data, tokenizer=LETTERS))


def repair(checkpoint: str, out: Path, n: int, *more: str) -> dict[str, Any]:
    main(["repair", checkpoint, "--out", str(out), "--n", str(n), "--steps", "4", *more])
    return json.loads((out / "repair.json").read_text())


def tokens(path: Path) -> torch.Tensor:
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["tokens"]).long()


def test_pairs_are_drawn_from_one_noise_and_only_the_score_differs(images, tmp_path, capsys):
    found = repair(images, tmp_path, 9, "--measure", "none", "--seed", "5", "--batch-size", "4")
    model, head = m2s.load(images)
    options = {"shape": (9, 64), "steps": 4, "sampler": "analytic", "grid": "linear", "seed": 5}
    unprojected, projected = (m2s.sample(model, one, **options) for one in (head, m2s.Projected(head)))
    assert torch.equal(tokens(tmp_path / "unprojected.npz"), unprojected)
    assert torch.equal(tokens(tmp_path / "projected.npz"), projected)
    differ = [
        [int(a != b) for a, b in zip(*rows, strict=True)] for rows in zip(unprojected.tolist(), projected.tolist(), strict=True)
    ]
    assert found["changes"] == {
        "tokens": 9 * 64,
        "tokens_changed": sum(map(sum, differ)),
        "samples": 9,
        "samples_changed": sum(map(any, differ)),
        "distinct_unprojected": len({tuple(row) for row in unprojected.tolist()}),
        "distinct_projected": len({tuple(row) for row in projected.tolist()}),
    }
    assert found["changes"]["tokens_changed"] > 0 and found["measure"] is None
    before, after = (found["audits"][arm]["overall"]["before"] for arm in ("unprojected", "projected"))
    assert before["classes"]["outside"] + before["classes"]["material"] > 0 and before["negative_weights"] > 0
    assert after["classes"]["outside"] == after["classes"]["material"] == after["negative_weights"] == 0
    from matplotlib.image import imread

    pairs = torch.stack([unprojected[:8], projected[:8]], 1).reshape(16, 64)  # four pairs of columns, four rows
    shown = np.rint(255 * imread(tmp_path / "pairs.png")[..., :3]).astype(np.uint8)
    assert np.array_equal(shown, picture_grid(pairs, (8, 8), 17))
    said = capsys.readouterr().out
    share = found["changes"]["tokens_changed"] / (9 * 64)
    assert f"{share:.2%} of 576 tokens" in said and said.count("0.0000%") >= 3
    assert (tmp_path / "repair.txt").read_text().strip() in said
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"repair.json", "repair.txt", "unprojected.npz", "projected.npz", "pairs.png"}


@pytest.mark.parametrize("audited", [0, 5])
def test_only_the_first_pairs_are_audited_and_all_are_the_same(images, tmp_path, audited):
    full = repair(images, tmp_path / "all", 9, "--measure", "none", "--batch-size", "3")
    first = repair(images, tmp_path / "first", 6, "--measure", "none", "--batch-size", "3")
    some = repair(images, tmp_path / "some", 9, "--measure", "none", "--batch-size", "3", "--audited", str(audited))
    for arm in ("unprojected", "projected"):
        assert torch.equal(tokens(tmp_path / "some" / f"{arm}.npz"), tokens(tmp_path / "all" / f"{arm}.npz"))
        if audited:  # the batches that begin before the fifth pair are the first two
            assert some["audits"][arm]["overall"] == first["audits"][arm]["overall"]
        assert some["audits"][arm]["overall"]["position_steps"] == (6 * 64 * 4 if audited else 0)
    assert some["changes"] == full["changes"]
    text = (tmp_path / "some" / "repair.txt").read_text()
    assert f"The scores of the batches of the first {audited} pairs are classified" in text
    outside, material = next(line for line in text.splitlines() if line.startswith("projected score")).split()[2:4]
    assert outside == material == ("0.0000%" if audited else "-")


def test_changes_by_hand():
    a, b = torch.tensor([[1, 2], [1, 2], [3, 3]]), torch.tensor([[1, 2], [1, 0], [0, 0]])
    assert count_changes(a, b) == {
        "tokens": 6,
        "tokens_changed": 3,
        "samples": 3,
        "samples_changed": 2,
        "distinct_unprojected": 2,
        "distinct_projected": 3,
    }


COSTS = np.array([0.5, 1.0, 2.0, 0.1, 3.0, 0.7, 1.3, 0.2])  # nats of each letter, whatever came before


class Letters(Judge):
    """A judge that knows letters one by one."""

    @property
    def end(self) -> int | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def tokenize_all(self, texts, limit: int | None = None, bos: bool = True) -> list[TokenizedText]:
        return [TokenizedText(LETTERS.encode(text)[:limit], len(text) - 1) for text in texts]

    def read(self, sequences, batch_size: int = 8, skip: int = 0) -> JudgeOutput:
        states = np.zeros((len(sequences), 1), np.float32)
        return JudgeOutput([COSTS[ids[1:]] for ids in sequences], states, states)


def test_text_is_judged_in_pairs(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(judge, "load_judge", lambda name, device: Letters(name, None, None, None, False))
    found = repair(text, tmp_path, 12, "--protocol", "mdlm", "--judge", "letters", "--resamples", "400")["measure"]
    nll = {arm: COSTS[tokens(tmp_path / f"{arm}.npz")[:, 1:]] for arm in ("unprojected", "projected")}
    for arm, costs in nll.items():
        assert found[arm]["nats_per_token"]["value"] == pytest.approx(costs.mean())
        assert found[arm]["perplexity"]["value"] == pytest.approx(np.exp(costs.mean()))
    gap = found["difference"]["nats_per_token"]
    assert gap["value"] == pytest.approx(nll["projected"].mean() - nll["unprojected"].mean())
    each = (nll["projected"] - nll["unprojected"]).mean(1)
    drawn = np.random.default_rng(9).choice(each, (20_000, 12)).mean(1)
    error = 4 * each.std() / np.sqrt(12 * 400) * 3  # of a quantile of 400 resamples
    assert (gap["low"], gap["high"]) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=error)
    assert found["difference"]["same_noise"] is True
    said = capsys.readouterr().out
    assert f"{found['unprojected']['perplexity']['value']:.2f}" in said and f"{gap['value']:+.4f} nats a token" in said
    assert "not as in the protocol mdlm: the judge is letters" in said
    assert LETTERS.decode(tokens(tmp_path / "projected.npz")[3].tolist()) in (tmp_path / "projected.txt").read_text()


class Tiles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(x[:, :1], 2).flatten(1)


def test_images_are_measured_by_fid_in_pairs(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    script = tmp_path / "tiles.pt"
    torch.jit.save(torch.jit.script(Tiles()), str(script))
    monkeypatch.setattr(inception, "KNOWN_SCRIPTS", {sha256(script)})
    options = ("--against", "digits:test", "--inception", str(script))
    found = repair(images, tmp_path / "out", 8, *options)["measure"]
    for arm in ("unprojected", "projected"):
        result = tmp_path / f"{arm}.json"
        main(["evaluate", "fid", str(tmp_path / "out" / f"{arm}.npz"), *options, "--no-kid", "--out", str(result)])
        assert found[arm] == pytest.approx(json.loads(result.read_text())["fid"], rel=1e-9)
    gap = found["difference"]
    assert gap["value"] == pytest.approx(found["projected"] - found["unprojected"], rel=1e-5)
    assert gap["low"] <= gap["high"] and found["samples"] == 8 and found["network"]["features"] == 4
    said = capsys.readouterr().out
    assert "tiles.pt, which is not FID's Inception" in said
    assert f"{found['unprojected']:.4f}" in said and f"[{gap['low']:+.4f}, {gap['high']:+.4f}]" in said


def test_a_difference_of_fids_resamples_pairs():
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(40, 3, generator=draw)
    reference = Statistics.empty(3)
    reference.update(torch.randn(200, 3, generator=draw) + 1)
    nothing = fid_difference(base, base.clone(), reference)
    assert nothing == {"value": 0.0, "low": 0.0, "high": 0.0}
    moved = fid_difference(base, base + 1, reference, seed=1)
    sets = []
    for features in (base, base + 1):
        sets.append(Statistics.empty(3))
        sets[-1].update(features)
    assert moved["value"] == pytest.approx(frechet(sets[1], reference) - frechet(sets[0], reference))
    # a shift by d changes |m - M|^2 alone: its difference over a resample is |d|^2 + 2 d.(m - M)
    random = np.random.default_rng(1)
    rows = [random.integers(40, size=40) for _ in range(100)]
    exact = [3 + 2 * float((base.double()[at].mean(0) - reference.mean).sum()) for at in rows]
    assert (moved["low"], moved["high"]) == pytest.approx(np.quantile(exact, [0.025, 0.975]), rel=1e-6)
    with pytest.raises(ValueError, match="at least 100"):
        fid_difference(base, base, reference, resamples=10)
    with pytest.raises(ValueError, match="both must be the same"):
        fid_difference(base, base[:5], reference)


def test_a_killed_repair_resumes(text, tmp_path, monkeypatch):
    full = repair(text, tmp_path / "whole", 6, "--measure", "none", "--batch-size", "2")
    write, drawn = SampleShards.write, []

    def stops(self: SampleShards, first: int, found: torch.Tensor) -> None:
        drawn.append((self.out.stem, first))
        if len(drawn) == 5:
            raise KeyboardInterrupt
        write(self, first, found)

    monkeypatch.setattr(SampleShards, "write", stops)
    with pytest.raises(SystemExit):
        repair(text, tmp_path / "killed", 6, "--measure", "none", "--batch-size", "2")
    assert repair(text, tmp_path / "killed", 6, "--measure", "none", "--batch-size", "2") == full
    unprojected, projected = ([(arm, first) for first in (0, 2, 4)] for arm in ("unprojected", "projected"))
    assert drawn == [*unprojected, *projected[:2], *projected[1:]]
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def error_line(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Return the one line that invalid input prints; no file is written."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(["repair", *arguments])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and sorted(folder.rglob("*")) == before
    return err


def test_bad_input_is_one_line_and_writes_nothing(images, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    head = m2s.Posterior(m2s.Uniform(17, m2s.Linear()))
    ours = str(m2s.hub.save(tmp_path / "ours", network(17, 64), head, {"kind": "image", "shape": [8, 8], "levels": 17}))
    script = tmp_path / "tiles.pt"
    torch.jit.save(torch.jit.script(Tiles()), str(script))
    monkeypatch.setattr("m2s.evaluation.inception.KNOWN_SCRIPTS", {sha256(script)})
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "unprojected.npz").write_text("somebody's")
    out = ("--out", str(tmp_path / "new"))
    inception = ("--inception", str(script))
    assert load_data("digits").vocab == 17
    for arguments, said in (
        ((ours, *out, "--measure", "none"), "predicts a posterior already"),
        ((images, *out, "--measure", "fd"), "genppl, fid, none"),
        ((images, *out, "--measure", "none", "--n", "0"), "--n is 0"),
        ((images, *out, "--measure", "none", "--sampler", "bayes"), "use --sampler analytic, euler or tau_leaping"),
        ((images, *out), "--protocol mnist-5k or cifar10-50k"),
        ((images, *out, "--against", "digits:test", "--inception", str(tmp_path / "no.pt")), "no.pt is no file"),
        (
            (images, *out, "--against", "digits:test", *inception, "--n", "4"),
            "--n is 4, but it must be at least 5 for this FID",
        ),
        ((images, *out, "--against", "digits:test", *inception, "--resamples", "9"), "at least 100"),
        ((images, *out, "--measure", "genppl"), "has no tokenizer"),
        ((text, *out, "--judge", str(tmp_path / "nobody")), "(--measure none does without)"),
        ((text, *out, "--protocol", "mnist-5k"), "paper, sedd, mdlm"),
        ((text, *out, "--measure", "fid", "--against", "digits:test", *inception), "give data of the same size and levels"),
        ((images, "--out", str(tmp_path / "taken"), "--measure", "none"), "--overwrite"),
    ):
        assert said in error_line(capsys, tmp_path, *arguments)
