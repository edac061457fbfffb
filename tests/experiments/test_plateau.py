"""The plateau experiment: its data, the crossing of a level, and its files."""

import contextlib
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

import m2s
from m2s.data.sequences import Sequences
from m2s.distributed import World
from m2s.methods.build import nelbo_loss
from m2s.presets import PRESETS
from m2s.training.config import resolve
from m2s.training.trainer import Trainer
from m2s.training.validate import validate

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


def test_the_unigram_level_is_on_the_noise_of_the_validations():
    """The trainer's validation of a network without context gives the level. Its mean over seeds is the unigram entropy."""
    train_x, held_out = plateau.draw(2000, 1), plateau.draw(plateau.HELD_OUT, 2)
    counts = torch.bincount(train_x.flatten(), minlength=plateau.VOCAB).float() + 1

    class Unigram(torch.nn.Module):
        def forward(self, x_t, t, label=None):
            return (counts / counts.sum()).log().expand(*x_t.shape, plateau.VOCAB)

    levels = []
    for seed in range(1, 13):
        config = resolve(plateau.configure("owt", seed, Path("run"), 5))
        head = m2s.Posterior(m2s.Uniform(plateau.VOCAB, m2s.Linear()), offset="exact")
        levels.append(plateau.unigram_nelbo(head, config.run, train_x, held_out))
        if seed == 1:
            source = Sequences(train_x, plateau.VOCAB, validation_x=held_out)
            parts = {"source": source, "world": World(0, 1, torch.device("cpu")), "model": Unigram(), "head": head}
            trainer = Trainer.__new__(Trainer)  # only what a validation needs
            parts |= {"config": config, "autocast": contextlib.nullcontext, "nelbo_loss": nelbo_loss(config.head)}
            vars(trainer).update(parts)
            assert validate(trainer)["validation_bits"] * math.log(2) == pytest.approx(levels[0], rel=1e-5)
    error = torch.tensor(levels).std().item() / math.sqrt(len(levels))
    assert abs(sum(levels) / len(levels) - plateau.unigram_entropy(train_x, held_out)) < 3 * error


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
