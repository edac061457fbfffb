"""The plateau experiment: its data, the crossing of a level, and its files."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from m2s.presets import PRESETS

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("plateau", ROOT / "experiments" / "plateau.py")
plateau = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plateau)


def test_sequences_follow_the_chain_from_its_stationary_distribution():
    x = plateau.draw(2000, seed=3)
    successors, probability = plateau.chain()
    allowed = torch.zeros(plateau.VOCAB, plateau.VOCAB).scatter_(1, successors, 1.0).bool()
    assert allowed[x[:, :-1], x[:, 1:]].all()
    torch.testing.assert_close(probability.sum(-1), torch.ones(plateau.VOCAB, dtype=torch.float64))
    counts = [torch.bincount(x[:, place], minlength=plateau.VOCAB).double() / len(x) for place in (0, 1, plateau.LENGTH - 1)]
    apart = [(counts[0] - other).abs().sum() / 2 for other in counts[1:]]
    same = (
        torch.bincount(plateau.draw(2000, seed=4)[:, 0], minlength=plateau.VOCAB).double() / 2000 - counts[0]
    ).abs().sum() / 2
    assert max(apart) < 1.25 * same  # two samples of one distribution are as far apart


def test_context_is_worth_much_more_than_the_level():
    """The conditional entropy under the chain is nats below the unigram entropy, so that the level can be reached."""
    x = plateau.draw(500, seed=3)
    successors, probability = plateau.chain()
    transition = torch.zeros(plateau.VOCAB, plateau.VOCAB, dtype=torch.float64).scatter_add_(1, successors, probability)
    conditional = -transition[x[:, :-1], x[:, 1:]].log().mean()
    assert plateau.unigram_entropy(x, x) - conditional > 2


def test_crossing_is_interpolated():
    tokens = [100, 200, 300]
    assert plateau.crossing(tokens, [5.0, 4.0, 3.0], 3.25) == pytest.approx(275)
    assert plateau.crossing(tokens, [3.0, 4.0, 5.0], 3.0) == 100
    assert plateau.crossing(tokens, [5.0, 4.0, 3.0], 2.0) is None


def test_rows_have_the_recipes_of_the_presets():
    configs = {name: plateau.configure(name, 1, Path("run"), 5) for name in plateau.RECIPES}
    for name, config in configs.items():
        preset = PRESETS[name]
        assert config.run.importance == preset.run.importance
        assert (config.network.gates, config.network.embedding_std) == (preset.network.gates, preset.network.embedding_std)
        for key in ("kind", "lr", "beta1", "beta2", "clip", "weight_decay"):
            assert getattr(config.optimizer, key) == getattr(preset.optimizer, key)
    assert configs["owt"].network.width == configs["owt-fast"].network.width
    assert configs["owt"].run.batch == configs["owt-fast"].run.batch


def test_rows_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plateau, "SEEDS", (1,))
    out, results = tmp_path / "out", tmp_path / "plateau.json"
    assert plateau.main([str(out), "--table", "--results", str(results)]) == 2
    assert "owt-1.json" in capsys.readouterr().err and not results.exists()
    assert plateau.main([str(out), "--steps", "2"]) == 0
    row = json.loads((out / "owt-1.json").read_text())
    assert row["trace"]["tokens"] == [2 * 16 * plateau.LENGTH] and row["tokens_to_leave"] is None
    for recipe, tokens in (("owt", 300.0), ("owt-fast", 100.0)):
        (out / f"{recipe}-1.json").write_text(json.dumps({**row, "recipe": recipe, "tokens_to_leave": tokens}))
    assert plateau.main([str(out), "--table", "--results", str(results)]) == 0
    assert json.loads(results.read_text())["ratio"] == 3
    assert plateau.summarize([{"recipe": name, "tokens_to_leave": None} for name in plateau.RECIPES])["median_tokens"] == {
        "owt": math.inf,
        "owt-fast": math.inf,
    }
