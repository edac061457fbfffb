"""The configuration of a run: methods, options that parts read, and invalid values."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import m2s
from m2s.data import prepare_text
from m2s.data.tokenizer import Bytes
from m2s.errors import UserError
from m2s.methods import METHODS
from m2s.presets import PRESETS
from m2s.training import config as config_module
from m2s.training import resolve, train
from m2s.training.build import make_head, make_process, open_data
from small_runs import InMemorySource, random_rows, small


def test_a_given_option_wins_over_the_method():
    def made(**changes):
        config = resolve(small(Path("x"), **changes))
        return make_head(config.head, make_process(config.process, 9))

    assert repr(made(method="m2s")) == "Posterior(Uniform(9, Linear()), offset='none')"
    assert repr(made(method="gidd")) == "Posterior(Hybrid(9, p_uniform=0.1), offset='exact')"
    assert isinstance(made(method="neural-ctmc"), m2s.FactorizedRate)
    assert isinstance(made(method="sedd-absorb").process, m2s.Absorbing)
    assert made(method="m2s", head__offset="exact").offset == "exact"
    assert isinstance(made(method="m2s", process__schedule="cosine").process.schedule, m2s.Cosine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0, but it must be at least 1"),
        ({"micro_batch": 3}, "micro_batch is 3, but it must be a divisor of batch = 8"),
        ({"t_min": 0.5}, "t_min is 0.5"),
        ({"importance": -1.0}, "importance is -1.0"),
        ({"optimizer__lr": math.nan}, "optimizer.lr is nan"),
        ({"optimizer__ema": 1.0}, "optimizer.ema is 1.0"),
        ({"optimizer__clip": -1.0}, "optimizer.clip is -1.0"),
        ({"head__loss": "masked"}, "head.loss is .masked., but"),
        (
            {"network__kind": "unet", "network__depth": None, "network__heads": None},
            "a U-Net is for images, and the data is text",
        ),
        ({"network__layers": 3}, "network.layers is .*, but it is for network.kind unet"),
        ({"network__groups": 32}, "network.groups is .*, but it is for network.kind unet"),
        ({"network__sinusoids": "sin-first"}, "network.sinusoids is .*, but it is for network.kind unet"),
        ({"network__heads": 3}, "network.width is 16, but"),
        (
            {"network__kind": "unet", "network__depth": None, "network__heads": None, "network__norm_bias": True},
            "network.norm_bias is True, but it is for network.kind dit, not unet",
        ),
        ({"network__labels": True}, "the data has no labels"),
        ({"method": "gidd", "process__p_uniform": 1.5}, r"p_uniform is 1.5, but it must be in \[0, 1\)$"),
        ({"method": "gidd", "process__p_uniform": -0.1}, r"p_uniform is -0.1, but it must be in \[0, 1\)$"),
        ({"method": "gidd", "process__p_uniform": math.nan}, r"p_uniform is nan, but it must be in \[0, 1\)$"),
        ({"method": "gidd", "process__p_uniform": 1.0}, "give --process.kind uniform in its place"),
        (
            {"method": "gidd", "process__schedule": "cosine"},
            "process.schedule is .cosine., but it is for .*, not hybrid: leave it",
        ),
        ({"method": "d3pm-uniform", "process__schedule": "cosine"}, "process.schedule is .cosine.*, not chain-uniform"),
        ({"method": "ar", "process__schedule": "cosine"}, "process.schedule is .cosine.*, not none"),
        (
            {"method": "md4", "process__p_uniform": 5.0},
            "process.p_uniform is 5.0, but it is for process.kind hybrid, not absorb",
        ),
        ({"method": "md4", "process__p_uniform": math.nan}, "process.p_uniform is nan, but it is for process.kind hybrid"),
        (
            {"method": "md4", "process__chain_steps": -3},
            "process.chain_steps is -3, but it is for process.kind chain-uniform, ",
        ),
        (
            {"method": "md4", "process__jump_width": -2.0},
            "process.jump_width is -2.0, but it is for process.kind gaussian, not",
        ),
        (
            {"method": "m2s", "process__stationary_width": 3.0},
            "process.stationary_width is 3.0, but it is for process.kind gauss",
        ),
        ({"method": "md4", "process__horizon": 3.0}, "process.horizon is 3.0, but it is for process.schedule exponential, not"),
        ({"method": "md4", "process__eps": 0.1}, "process.eps is 0.1, but it is for process.schedule log-linear, not linear"),
        ({"method": "md4", "process__sigma_min": 0.1}, "process.sigma_min is 0.1, but it is for process.schedule geometric"),
        ({"method": "md4", "process__sigma_max": 9.0}, "process.sigma_max is 9.0, but it is for process.schedule geometric"),
        ({"method": "d3pm-uniform", "process__horizon": 3.0}, "for process.schedule exponential, not that of chain-uniform"),
        (
            {"method": "d3pm-uniform", "head__loss": "score-entropy"},
            "a finite chain has no rates.*give --head.loss chain or d3pm$",
        ),
        ({"method": "neural-ctmc", "process__kind": "chain-uniform"}, "--head.loss chain or d3pm, with --head.kind posterior$"),
        ({"head__loss": "udlm", "process__kind": "absorbing"}, r"over m2s.Uniform \(--process.kind uniform\), not for"),
        ({"device": "abacus"}, "device is 'abacus', but it must be cpu, cuda"),
        (
            {"method": "sedd", "head__offset": "exact"},
            "head.offset is .exact., but it is for head.kind posterior or ordinal, not log-score",
        ),
        ({"init": "nowhere"}, "--init nowhere"),
        (
            {"method": "mdlm", "process__rescale": 1e-4},
            "process.rescale is 0.0001, but it is for process.schedule linear or",
        ),
        ({"method": "gidd", "process__rescale": 1e-4}, "process.rescale is 0.0001, .*, not that of hybrid: leave it out"),
        ({"method": "md4", "process__rescale": 0.5}, r"process.eps is 0.5, but it must be in \(0, 0.5\)"),
        ({"method": "gidd-clipped", "head__max_weight": 0.0}, "head.max_weight is 0.0, but it must be a positive number"),
        ({"method": "gidd", "head__max_weight": 2.0}, "head.max_weight is 2.0, but it is for head.loss gidd-clipped, not "),
    ],
)
def test_invalid_values_are_errors_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(small(tmp_path / "run", **changes), random_rows())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["posterior", "factorized-rate"])
def test_the_options_of_a_methods_head_are_not_for_another_head(kind):
    config = resolve(small(Path("x"), method="sedd-absorb", head__kind=kind))
    assert config.head.scale == "none"
    make_head(config.head, make_process(config.process, 9))


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "gidd", "process__p_uniform": 0.3},
        {"method": "m2s", "process__kind": "hybrid", "process__p_uniform": 0.3},
        {"method": "d3pm-absorbing", "process__chain_steps": 7},
        {"method": "tauldr", "process__jump_width": 2.0, "process__stationary_width": 9.0, "process__sigma_max": 5.0},
        {"method": "md4", "process__schedule": "exponential", "process__horizon": 3.0},
        {"method": "sedd", "process__schedule": "log-linear", "process__eps": 0.01},
        {"method": "md4", "process__rescale": 0.0125},
        {"method": "md4", "process__schedule": "cosine", "process__rescale": 0.0125},
        {"method": "d3pm-uniform", "process__kind": "uniform", "head__loss": "score-entropy"},
    ],
)
def test_options_of_the_process_are_read_and_resolving_twice_changes_nothing(changes):
    config = resolve(small(Path("x"), **changes))
    made = repr(make_process(config.process, 9))
    for key, value in changes.items():
        if key.startswith("process__") and isinstance(value, float) and "width" not in key:
            assert str(value) in made
    assert resolve(config) == config


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["auto", "uniform", "absorbing", "hybrid", "chain-absorbing", "none"])
def test_a_method_on_another_process_has_no_option_that_nothing_reads(method, kind):
    """The method's own schedule does not count as given, resolved once or twice."""
    config = resolve(small(Path("x"), method=method, process__kind=kind))
    assert resolve(config) == config
    make_process(config.process, 9)


def test_labels_of_udlm_and_norms_of_radd_are_options(tmp_path):
    """They are saved, loaded and trained. Without labels there is nothing to add after a SiLU."""
    label = torch.arange(64) % 3
    rows = InMemorySource(random_rows().rows, 5, label=label)
    options = {"steps": 3, "network__labels": True, "network__label_after_silu": True, "network__norm_bias": True}
    train(small(tmp_path / "run", **options), rows)
    model, _ = m2s.load(tmp_path / "run")
    assert model.config.label_after_silu and model.config.norm_bias
    assert not (model.norm.bias == 1).all() and (model.norm.bias - 1).abs().max() < 0.1
    train(small(tmp_path / "plain", steps=3, network__labels=True), rows)
    plain, _ = m2s.load(tmp_path / "plain")
    assert not plain.config.label_after_silu and plain.norm.bias is None
    with pytest.raises(UserError, match=r"network\.label_after_silu is True, but the network has no classes"):
        train(small(tmp_path / "x", network__label_after_silu=True), random_rows())
    other = {"network__labels": True, "network__label_after_silu": True, "init": str(tmp_path / "plain")}
    with pytest.raises(UserError, match="label_after_silu is False there and True here"):
        train(small(tmp_path / "x", **other), rows)


def test_a_run_with_an_option_that_nothing_reads_can_be_resumed(tmp_path, monkeypatch):
    config = small(tmp_path / "run", method="gidd", process__schedule="cosine", steps=2)
    monkeypatch.setattr(config_module, "_check_unread_process", lambda _: None)  # as an older version started it
    train(config, random_rows())
    monkeypatch.undo()
    assert train(config, random_rows()).step == 2
    with pytest.raises(UserError, match=r"holds another run: process\.schedule was cosine and is now linear"):
        train(small(tmp_path / "run", method="gidd", steps=2), random_rows())


def test_missing_or_damaged_data_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, message in (("mnist", "has no train-images"), ("text", "no prepared text")):
        config = dataclasses.replace(PRESETS["digits"].data, name=name, folder=str(tmp_path / "empty"))
        with pytest.raises(UserError, match=message):
            open_data(config)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words " * 50)
    (tmp_path / "texts" / "b.txt").write_text("more words " * 50)
    prepare_text(str(tmp_path / "texts"), tmp_path / "packed", Bytes(), 0.5)
    text = dataclasses.replace(config, name="text", folder=str(tmp_path / "packed"), length=16)
    assert open_data(text).vocab == 257
    shard = next((tmp_path / "packed").glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match="bytes, expected"):
        open_data(text)


def test_a_run_trains_on_prepared_text(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text("some words " * 50)
    prepare_text(str(tmp_path / "texts"), tmp_path / "packed", Bytes(), 0.5)
    changes = {"data__name": "text", "data__folder": str(tmp_path / "packed"), "data__length": 16, "steps": 2}
    train(small(tmp_path / "run", **changes))
    assert m2s.load(tmp_path / "run").tokenizer == Bytes()


def test_init_from_a_score_starts_a_posterior_and_checks_the_vocabulary(tmp_path):
    source = random_rows()
    train(small(tmp_path / "sedd", method="sedd", steps=4), source)
    train(small(tmp_path / "m2s", method="m2s", steps=1, init=str(tmp_path / "sedd"), optimizer__lr=1e-12), source)
    first, second = m2s.load(tmp_path / "sedd"), m2s.load(tmp_path / "m2s")
    assert isinstance(second.head, m2s.Posterior)
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value)
    with pytest.raises(UserError, match="is for 5 states, but data and process here have 7"):
        train(small(tmp_path / "no", init=str(tmp_path / "sedd")), random_rows(vocab=7))
    with pytest.raises(UserError, match="is for 5 states, but data and process here have 6"):
        train(small(tmp_path / "no", init=str(tmp_path / "sedd"), method="md4"), source)
    with pytest.raises(UserError, match=r"holds another network: .*here"):
        train(small(tmp_path / "no", init=str(tmp_path / "sedd"), network__width=32), source)
    assert not (tmp_path / "no").exists()
