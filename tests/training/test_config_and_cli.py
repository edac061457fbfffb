"""Training from the outside: presets, methods, the command line, what it refuses; and the law of the times it draws."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import m2s
from m2s.cli import main, parse
from m2s.cli.train import Run, with_settings
from m2s.data import prepare_text
from m2s.data.source import Batch, open_source
from m2s.data.tokenizer import Bytes
from m2s.distributed import World
from m2s.errors import UserError
from m2s.losses.noise import corrupt_by_counter, sample_times
from m2s.methods import METHODS
from m2s.models import build
from m2s.presets import PRESETS, SUMMARIES
from m2s.training import OptimizerConfig, resolve, train
from m2s.training import config as config_module
from m2s.training import log as log_module
from m2s.training.build import describe_network, make_head, make_objects, make_process
from m2s.training.trainer import Trainer, learning_rate
from m2s.training.validate import validate
from small_runs import Rows, losses, outcome, random_rows, small


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("m2s: ") and err.count("\n") == 1
    return err


QUICK = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", "--device", "cpu"]


def test_train_digits_then_load_it_and_go_on(tmp_path, capsys):
    command = ["train", "digits", "--method", "sedd", "--steps", "3", "--out", str(tmp_path / "run"), *QUICK]
    main(command)
    said = capsys.readouterr()
    assert "3 steps, bound on held-out data" in said.out and "validation_bits" in said.err
    checkpoint = m2s.load(tmp_path / "run")
    assert isinstance(checkpoint.head, m2s.LogScore) and checkpoint.data == {"kind": "image", "shape": [8, 8], "levels": 17}
    main(command)
    assert "going on from step 3 of 3" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["config"]["head"]["kind"] == "log-score" and len(record["starts"]) == 2


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_digits(tmp_path, method):
    out = tmp_path / "run"
    main(["train", "digits", "--method", method, "--steps", "2", "--out", str(out), *QUICK])
    assert all(math.isfinite(x) for x in losses(out) or [1.0])
    assert m2s.load(out).config["extra"]["method"] == method


def test_options_and_settings_say_the_same(tmp_path, capsys):
    given = Run(**vars(PRESETS["mnist"]), settings=("head.offset=exact", "steps=7", "network.multipliers=1,2", "clip=0"))
    with pytest.raises(UserError, match=r"no setting 'clip'"):
        with_settings(given)
    given = dataclasses.replace(given, settings=given.settings[:3])
    config = with_settings(given)
    assert config.head.offset == "exact" and config.run.steps == 7 and config.network.multipliers == (1, 2)
    assert config.data == PRESETS["mnist"].data
    with pytest.raises(UserError, match=r"'head.ofset': did you mean head.offset"):
        with_settings(dataclasses.replace(given, settings=("head.ofset=exact",)))
    with pytest.raises(UserError, match=r"steps=many.*--steps.*'many'"):
        with_settings(dataclasses.replace(given, settings=("steps=many",)))
    main(["train", "digits", "head:posterior", "--head.offset", "exact", "--steps", "1", "--out", str(tmp_path / "x"), *QUICK])
    main(["train", "digits", "--out", str(tmp_path / "run"), *QUICK, "steps=1", "head.offset=exact"])
    assert m2s.load(tmp_path / "run").head.offset == "exact"


def test_presets_are_the_papers_runs():
    assert PRESETS.keys() == SUMMARIES.keys()
    parameters = {"cifar10": (256, (32, 32, 3), 28_427_520), "owt": (50_257, None, 169_697_920)}
    for name, (vocab, shape, count) in parameters.items():
        config = resolve(PRESETS[name])
        source = Rows(torch.zeros(1, 512, dtype=torch.long), vocab)
        source.shape = shape
        process = make_process(config.process, vocab)
        with torch.device("meta"):
            model = build(describe_network(config.network, process, source))
        assert sum(p.numel() for p in model.parameters()) == count
    assert PRESETS["owt"].run.batch == 1584 and PRESETS["owt"].run.steps * 1584 * 512 == pytest.approx(131e9, rel=0.01)


def test_a_method_is_a_head_a_process_and_a_loss_and_gives_way_to_options():
    def made(**changes):
        config = resolve(small(Path("x"), **changes))
        return make_head(config.head, make_process(config.process, 9))

    assert repr(made(method="m2s")) == "Posterior(Uniform(9, Linear()), offset='none')"
    assert repr(made(method="gidd")) == "Posterior(Hybrid(9, p_uniform=0.1), offset='exact')"
    assert isinstance(made(method="neural-ctmc"), m2s.FactorizedRate)
    assert isinstance(made(method="sedd-absorb").process, m2s.Absorbing)
    assert made(method="m2s", head__offset="exact").offset == "exact"
    assert isinstance(made(method="m2s", process__schedule="cosine").process.schedule, m2s.Cosine)


# what is refused, before anything is written


def test_unknown_names_suggest_the_nearest(tmp_path, capsys):
    assert "m2s train knows no 'digts': did you mean digits?" in refused(capsys, "train", "digts")
    assert "did you mean digits?" in refused(capsys, "train", "digts", "--steps", "3", "head.offset=exact")
    assert "one of these before any option: digits, mnist" in refused(capsys, "train", "--steps", "3", "digits")
    assert "no option --stpes: did you mean --steps?" in refused(capsys, "train", "digits", "--stpes", "3")
    assert "did you mean --head.offset?" in refused(capsys, "train", "digits", "--head.ofset=exact", "--log_every", "5")
    assert "no setting 'clip': did you mean optimizer.clip?" in refused(capsys, "train", "digits", "clip=1")
    assert "did you mean sedd" in refused(capsys, "train", "digits", "--method", "seddd", "--out", str(tmp_path / "x"))
    assert "did you mean mnist" in refused(capsys, "train", "digits", "--data.name", "mnits", "--out", str(tmp_path / "x"))
    assert "tiny" in refused(capsys, "train", "digits", "--network.size", "tinny", "--out", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0, but it must be at least 1"),
        ({"micro_batch": 3}, "micro_batch is 3, but it must divide batch = 8"),
        ({"t_min": 0.5}, "t_min is 0.5"),
        ({"importance": -1.0}, "importance is -1.0"),
        ({"optimizer__lr": math.nan}, "optimizer.lr is nan"),
        ({"optimizer__ema": 1.0}, "optimizer.ema is 1.0"),
        ({"optimizer__clip": -1.0}, "optimizer.clip is -1.0"),
        ({"head__loss": "masked"}, "head.loss is masked"),
        ({"network__kind": "unet", "network__depth": None, "network__heads": None}, "unet, which is for images"),
        ({"network__layers": 3}, "network.layers is an option of a unet"),
        ({"network__groups": 32}, "network.groups is an option of a unet"),
        ({"network__sinusoids": "sin-first"}, "network.sinusoids is an option of a unet"),
        ({"network__heads": 3}, "network: width is 16"),
        (
            {"network__kind": "unet", "network__depth": None, "network__heads": None, "network__norm_bias": True},
            "network.norm_bias is an option of a dit, but network.kind is unet",
        ),
        ({"network__labels": True}, "the data has no labels"),
        ({"method": "gidd", "process__p_uniform": 1.5}, r"p_uniform is 1.5, but it must lie in \[0, 1\)$"),
        ({"method": "gidd", "process__p_uniform": -0.1}, r"p_uniform is -0.1, but it must lie in \[0, 1\)$"),
        ({"method": "gidd", "process__p_uniform": math.nan}, r"p_uniform is nan, but it must lie in \[0, 1\)$"),
        ({"method": "gidd", "process__p_uniform": 1.0}, "give --process.kind uniform in its place"),
        (
            {"method": "gidd", "process__schedule": "cosine"},
            "process.schedule is cosine, which is for .*, not hybrid: leave it",
        ),
        ({"method": "d3pm-uniform", "process__schedule": "cosine"}, "process.schedule is cosine.*, not chain-uniform"),
        ({"method": "ar", "process__schedule": "cosine"}, "process.schedule is cosine.*, not none"),
        (
            {"method": "md4", "process__p_uniform": 5.0},
            "process.p_uniform is 5.0, which is for process.kind hybrid, not absorb",
        ),
        ({"method": "md4", "process__p_uniform": math.nan}, "process.p_uniform is nan, which is for process.kind hybrid"),
        ({"method": "md4", "process__chain_steps": -3}, "process.chain_steps is -3, which is for process.kind chain-uniform, "),
        ({"method": "md4", "process__jump_width": -2.0}, "process.jump_width is -2.0, which is for process.kind gaussian, not"),
        (
            {"method": "m2s", "process__stationary_width": 3.0},
            "process.stationary_width is 3.0, which is for process.kind gauss",
        ),
        ({"method": "md4", "process__horizon": 3.0}, "process.horizon is 3.0, which is for process.schedule exponential, not"),
        ({"method": "md4", "process__eps": 0.1}, "process.eps is 0.1, which is for process.schedule log-linear, not linear"),
        ({"method": "md4", "process__sigma_min": 0.1}, "process.sigma_min is 0.1, which is for process.schedule geometric"),
        ({"method": "md4", "process__sigma_max": 9.0}, "process.sigma_max is 9.0, which is for process.schedule geometric"),
        ({"method": "d3pm-uniform", "process__horizon": 3.0}, "for process.schedule exponential, not that of chain-uniform"),
        (
            {"method": "d3pm-uniform", "head__loss": "score-entropy"},
            "a finite chain has no rates.*give --head.loss chain or d3pm$",
        ),
        ({"method": "neural-ctmc", "process__kind": "chain-uniform"}, "--head.loss chain or d3pm, with --head.kind posterior$"),
        ({"head__loss": "udlm", "process__kind": "absorbing"}, r"over m2s.Uniform \(--process.kind uniform\), not for"),
        ({"device": "abacus"}, "device is 'abacus', but it must be cpu, cuda"),
        ({"method": "sedd", "head__offset": "exact"}, "head.offset is exact, which is for a posterior, not log-score"),
        ({"init": "nowhere"}, "--init nowhere"),
        (
            {"method": "mdlm", "process__rescale": 1e-4},
            "process.rescale is 0.0001, which is for process.schedule linear or",
        ),
        ({"method": "gidd", "process__rescale": 1e-4}, "process.rescale is 0.0001, .*, not that of hybrid: leave it out"),
        ({"method": "md4", "process__rescale": 0.5}, r"process: eps is 0.5, but it must lie in \(0, 0.5\)"),
        ({"method": "gidd-clipped", "head__max_weight": 0.0}, "head.max_weight is 0.0, but it must be a positive number"),
        ({"method": "gidd", "head__max_weight": 2.0}, "head.max_weight is 2.0, which is for head.loss gidd-clipped, not "),
    ],
)
def test_bad_values_are_refused_at_the_door(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(small(tmp_path / "run", **changes), random_rows())
    assert not (tmp_path / "run").exists()


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
def test_what_the_process_reads_is_taken_and_a_resolved_run_is_itself(changes):
    config = resolve(small(Path("x"), **changes))
    made = repr(make_process(config.process, 9))
    for key, value in changes.items():
        if key.startswith("process__") and isinstance(value, float) and "width" not in key:
            assert str(value) in made
    assert resolve(config) == config


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["auto", "uniform", "absorbing", "hybrid", "chain-absorbing", "none"])
def test_a_method_on_another_process_has_no_option_that_nothing_reads(method, kind):
    """What a method says of its own process does not count as given, resolved once or twice."""
    config = resolve(small(Path("x"), method=method, process__kind=kind))
    assert resolve(config) == config
    make_process(config.process, 9)


def test_gidd_without_masks_is_what_the_refusal_says(tmp_path, capsys):
    """`--process.p-uniform 1` is answered with an option, and that trains: on the uniform process, with GIDD's own loss too."""
    out = str(tmp_path / "run")
    said = refused(capsys, "train", "digits", "--method", "gidd", "--process.p-uniform", "1", "--out", out, *QUICK)
    option = re.search(r"give (--process\.kind \w+) in its place", said)
    assert option is not None and not (tmp_path / "run").exists()
    main(
        ["train", "digits", "--method", "gidd", *option[1].split(), "--head.loss", "gidd", "--steps", "1", "--out", out, *QUICK]
    )
    assert repr(m2s.load(out).head) == "Posterior(Uniform(17, Linear()), offset='exact')"


def test_gidds_largest_weight_is_an_option(tmp_path, capsys):
    """The same run with other weights has another loss, and is validated by the same bound."""
    most = {"default": [], "one": ["--head.max-weight", "1"], "two": ["--head.max-weight", "2"], "set": ["head.max_weight=2"]}
    for name, given in most.items():
        main(["train", "digits", "--method", "gidd-clipped", "--steps", "2", "--out", str(tmp_path / name), *QUICK, *given])
    default, one, two, also = (outcome(tmp_path / name) for name in most)
    assert default == one and two == also and two["weights"] != one["weights"]
    assert two["log"][0]["loss"] > one["log"][0]["loss"]  # at the same weights, in the first step
    assert json.loads((tmp_path / "two" / "train.json").read_text())["config"]["head"]["max_weight"] == 2


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_md4s_eps_is_an_option(tmp_path, schedule):
    options = ["--process.schedule", schedule, "--process.rescale", "1e-4", "--steps", "2"]
    main(["train", "digits", "--method", "md4", *options, "--out", str(tmp_path), *QUICK])
    model, head = m2s.load(tmp_path)
    rescaled, plain = head.process.schedule, {"linear": m2s.Linear(), "cosine": m2s.Cosine()}[schedule]
    assert rescaled == m2s.Rescaled(plain, 1e-4)
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(rescaled.alpha(t), (1 - 2e-4) * plain.alpha(t) + 1e-4)
    assert rescaled.one_minus_alpha_ratio(t[-1:], t[-1:]) == 0 and rescaled.sigma_prime(t).isfinite().all()
    samples = m2s.sample(model, head, (4, 64), steps=4)
    assert samples.max() < head.process.vocab


def test_md4s_groups_and_sinusoids_are_options(tmp_path, capsys):
    plain, options = tmp_path / "plain", ["--network.groups", "8", "--network.sinusoids", "sin-first"]
    main(["train", "digits", "--steps", "1", "--out", str(plain), *QUICK])
    main(["train", "digits", "--steps", "1", "--out", str(tmp_path / "md4"), *QUICK, *options])
    (one, _), (other, _) = m2s.load(plain), m2s.load(tmp_path / "md4")
    assert (one.config.groups, one.config.sinusoids) == (None, "cos-first")
    assert other.config == dataclasses.replace(one.config, groups=8, sinusoids="sin-first")
    x, t = torch.randint(17, (2, 64)), torch.tensor([0.2, 0.7])
    other.load_state_dict(one.state_dict())  # the same tensors, another network
    assert not torch.allclose(other(x, t), one(x, t))
    capsys.readouterr()
    said = refused(capsys, "train", "digits", "--init", str(plain), "--out", str(tmp_path / "x"), *QUICK, *options)
    assert "groups is None there and 8 here" in said


def test_udlms_labels_and_radds_norms_are_options(tmp_path):
    """Saved, loaded, and learned with; without labels there is nothing to add after a SiLU."""
    label = torch.arange(64) % 3
    rows = Rows(random_rows().rows, 5, label=label)
    options = {"steps": 3, "network__labels": True, "network__label_after_silu": True, "network__norm_bias": True}
    train(small(tmp_path / "run", **options), rows)
    model, _ = m2s.load(tmp_path / "run")
    assert model.config.label_after_silu and model.config.norm_bias
    assert not (model.norm.bias == 1).all() and (model.norm.bias - 1).abs().max() < 0.1
    train(small(tmp_path / "plain", steps=3, network__labels=True), rows)
    plain, _ = m2s.load(tmp_path / "plain")
    assert not plain.config.label_after_silu and plain.norm.bias is None
    with pytest.raises(UserError, match="network: label_after_silu is True, but classes is None"):
        train(small(tmp_path / "x", network__label_after_silu=True), random_rows())
    other = {"network__labels": True, "network__label_after_silu": True, "init": str(tmp_path / "plain")}
    with pytest.raises(UserError, match="label_after_silu is False there and True here"):
        train(small(tmp_path / "x", **other), rows)


def test_a_chain_is_trained_with_the_loss_that_the_refusal_names(tmp_path, capsys):
    chain = ["train", "digits", "--method", "neural-ctmc", "--process.kind", "chain-uniform", "--steps", "1", *QUICK]
    said = refused(capsys, *chain, "--out", str(tmp_path / "run"))
    advice = re.search(r"give (--head.loss chain) or d3pm, with (--head.kind posterior)$", said.strip())
    assert advice is not None and not (tmp_path / "run").exists()
    main([*chain, *advice[1].split(), *advice[2].split(), "--out", str(tmp_path / "run")])


def test_a_run_that_was_begun_with_an_option_that_nothing_reads_goes_on(tmp_path, monkeypatch):
    config = small(tmp_path / "run", method="gidd", process__schedule="cosine", steps=2)
    monkeypatch.setattr(config_module, "_refuse_unread", lambda _: None)  # as it was begun
    train(config, random_rows())
    monkeypatch.undo()
    assert train(config, random_rows()).step == 2
    with pytest.raises(UserError, match=r"holds another run: process\.schedule was cosine and is now linear"):
        train(small(tmp_path / "run", method="gidd", steps=2), random_rows())


@pytest.mark.parametrize("method", ["md4", "mdlm", "radd"])
def test_masked_methods_on_ordered_levels(tmp_path, method):
    out = tmp_path / "run"
    main(["train", "digits", "--method", method, "--head.kind", "ordinal", "--steps", "2", "--out", str(out), *QUICK])
    assert isinstance(m2s.load(out).head, m2s.Ordinal) and all(math.isfinite(x) for x in losses(out) or [1.0])


def test_data_that_is_missing_or_damaged_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, message in (("mnist", "has no train-images"), ("text", "no prepared text")):
        config = dataclasses.replace(PRESETS["digits"].data, name=name, folder=str(tmp_path / "empty"))
        with pytest.raises(UserError, match=message):
            open_source(**vars(config))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words " * 50)
    (tmp_path / "texts" / "b.txt").write_text("more words " * 50)
    prepare_text(str(tmp_path / "texts"), tmp_path / "packed", Bytes(), 2)
    text = dataclasses.replace(config, name="text", folder=str(tmp_path / "packed"), length=16)
    assert open_source(**vars(text)).vocab == 257
    shard = next((tmp_path / "packed").glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match="bytes, expected"):
        open_source(**vars(text))


def test_a_run_trains_on_prepared_text(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text("some words " * 50)
    prepare_text(str(tmp_path / "texts"), tmp_path / "packed", Bytes(), 2)
    changes = {"data__name": "text", "data__folder": str(tmp_path / "packed"), "data__length": 16, "steps": 2}
    train(small(tmp_path / "run", **changes))
    assert m2s.load(tmp_path / "run").tokenizer == Bytes()


# starting from another checkpoint


def test_a_scores_weights_start_a_posterior_and_a_wrong_vocabulary_is_refused(tmp_path):
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


# times, weights, padding


def test_times_are_stratified_over_the_global_batch():
    t, weight = sample_times(torch.arange(64), 64, 0, 5, 0.1, 0.9)
    assert torch.equal(((t - 0.1) / 0.8 * 64).long().sort().values, torch.arange(64))
    assert torch.allclose(weight, torch.full_like(t, 0.8))


@pytest.mark.parametrize("importance", [None, 0.01, 0.1, 1.0])
def test_weighted_times_have_the_integral_as_their_mean(importance):
    """integral of f over [low, high] for functions that are steep where the density is, and where it is not."""
    low, high = 1e-3, 1 - 1e-3
    for f, exact in (
        (lambda t: 1 / t, math.log(high / low)),
        (lambda t: t**3, (high**4 - low**4) / 4),
        (lambda t: torch.ones_like(t), high - low),
    ):
        means = [
            (w * f(t)).mean()
            for t, w in (sample_times(torch.arange(256), 256, 1, s, low, high, importance) for s in range(200))
        ]
        means = torch.stack(means)
        error = float(means.std() / len(means) ** 0.5)
        assert float(means.mean()) == pytest.approx(exact, abs=5 * error + 1e-9)
        assert (sample_times(torch.arange(256), 256, 1, 0, low, high, importance)[0] < high).all()


def test_importance_leaves_the_expected_gradient_as_it_is(tmp_path):
    """Mean gradients over many steps of a fixed network, with and without, agree within their standard errors."""
    source, gradients = random_rows(), {}
    for importance in (None, 0.1):
        config = resolve(small(tmp_path, importance=importance, batch=64, micro_batch=None, method="m2s-offset", steps=1000))
        learner = Trainer(config, source, World(0, 1, torch.device("cpu")), *make_objects(config, source))
        with torch.no_grad():
            for i, parameter in enumerate(learner.model.parameters()):
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
        learner.model.eval()
        found = []
        for step in range(60):
            learner.progress.step = step
            losses_, _ = learner.gradient(learner.share(step))
            found.append(torch.stack([losses_.mean(), *(p.grad.double().sum() for p in learner.model.parameters())]))
        gradients[importance] = torch.stack(found)
    (one, other) = gradients.values()
    error = ((one.var(0) + other.var(0)) / len(one)).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() < 4.5 * error + 1e-9).all()


def test_corruption_has_the_law_of_the_process():
    rates = torch.rand(4, 4, dtype=torch.float64)
    rates -= torch.diag(rates.sum(-1))
    n = 20_000
    for process in (
        m2s.Uniform(4, m2s.Linear()),
        m2s.Absorbing(4, m2s.Linear()),
        m2s.Hybrid(4, 0.3),
        m2s.RateMatrix(rates, m2s.Linear()),
    ):
        x_0, t = torch.full((n, 2), 1), torch.full((n,), 0.6, dtype=torch.float64)
        x_t = corrupt_by_counter(process, x_0, t, torch.arange(n), 0, 7)
        distribution = process.rows(x_0[:1, 0], t[:1])[0]
        counts = torch.bincount(x_t.flatten(), minlength=process.states) / (2 * n)
        assert ((counts - distribution).abs() < 5 * (distribution * (1 - distribution) / (2 * n)).sqrt() + 1e-12).all()


def test_padding_is_in_no_loss_and_no_average(tmp_path):
    """What padded sites hold changes nothing that is logged, and the average is over the others."""
    rows = random_rows().rows
    weight = torch.ones(rows.shape)
    weight[:, 3] = 0

    class Reweighted(Rows):
        """The corrupted padding still reaches the network, so the rows differ in it only where the network cannot see."""

        def train(self, indices):
            batch = super().train(indices)
            return Batch(batch.x_0, batch.weight * 3.0)

    train(small(tmp_path / "one", steps=3, log_every=1), Rows(rows, 5, weight))
    train(small(tmp_path / "three", steps=3, log_every=1), Reweighted(rows, 5, weight))
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "one" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["tokens"] == 8 * 3


def test_validation_leaves_padding_out_and_averages_over_the_weight(tmp_path, monkeypatch):
    """A network that knows nothing and a loss that is the token itself, infinite on padding: every term is known exactly."""
    rows, weight = random_rows().rows, torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    weight[rows == 0] = 0
    monkeypatch.setattr("m2s.training.validate.ROWS", 24)

    def found(given: torch.Tensor | None) -> dict[str, float]:
        config, source = resolve(small(tmp_path, method="m2s")), Rows(rows, 5, given)
        learner = Trainer(config, source, World(0, 1, torch.device("cpu")), *make_objects(config, source))
        learner.bound = lambda head, output, x_0, x_t, t: torch.where(x_0 == 0, 0 if given is None else torch.inf, x_0.float())
        return validate(learner)

    t_min, nats = 1e-3, rows.double()
    prior = m2s.Uniform(5, m2s.Linear()).prior_kl(rows[:1, :1], torch.tensor([1 - t_min], dtype=torch.float64)).item()
    terms = (1 - 2 * t_min) * nats + prior + math.log(5)
    mean = (weight * terms).sum() / weight.sum()
    residual = (weight * (terms - mean)).sum(-1)
    expected = {
        "validation_bits": float(mean) / math.log(2),
        "validation_error": float((residual**2).sum().mul(64 / 63).sqrt() / weight.sum()) / math.log(2),
        "validation_perplexity": math.exp(mean),
        "validation_integral": float((1 - 2 * t_min) * (weight * nats).sum() / weight.sum()) / math.log(2),
        "validation_prior": prior / math.log(2),
        "validation_reconstruction": math.log2(5),
    }
    assert found(weight) == pytest.approx(expected, rel=1e-6)
    assert found(weight * 3) == pytest.approx(expected, rel=1e-6)
    weight = torch.ones(64, 4)
    rows[rows == 0] = 1
    assert found(weight) == found(None)


def test_the_bound_is_the_sum_of_its_sites():
    """With weight one at a single site and zero elsewhere, `m2s.elbo` gives the terms of that site."""
    x_0, head = random_rows(8).rows, m2s.Posterior(m2s.Absorbing(5, m2s.Linear()))

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.sin(7.0 * torch.arange(6) + x_t.unsqueeze(-1))

    def bound(weight: torch.Tensor | None) -> m2s.Elbo:
        generator = torch.Generator().manual_seed(3)
        return m2s.elbo(model, head, x_0, passes=2, t_min=0.3, generator=generator, weight=weight)

    sites = [bound(torch.nn.functional.one_hot(torch.tensor(i), 4).float().expand(8, 4)) for i in range(4)]
    for name in ("passes", "integral", "prior", "reconstruction"):
        together = torch.stack([getattr(site, name) for site in sites])
        torch.testing.assert_close(together.sum(0), getattr(bound(None), name))
    assert all((site.reconstruction > 0).any() for site in sites)


def test_gradient_accumulation_is_the_whole_batch(tmp_path):
    for name, micro in (("whole", None), ("parts", 2)):
        train(small(tmp_path / name, micro_batch=micro, network__dropout=0.0, log_every=1), random_rows())
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    config = OptimizerConfig(lr=2.0, warmup=4)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert rates[8] == pytest.approx(1.0) and rates[11] == pytest.approx(1 + math.cos(math.pi * 7 / 8))
    assert learning_rate(dataclasses.replace(config, decay="constant"), 11, 12) == 2.0


# TensorBoard and Weights & Biases


class Stop(Exception):
    """Stands for the death of a process."""


def interrupted(config, at: int) -> None:
    """The run, which dies before update `at` and is started again."""
    gradient = Trainer.gradient

    def dying(learner, share):
        if learner.progress.step == at:
            raise Stop
        return gradient(learner, share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "gradient", dying)
        with pytest.raises(Stop):
            train(config, random_rows())
    train(config, random_rows())


def records(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_tensorboard_shows_what_the_log_holds_after_a_restart_too(tmp_path):
    """Saved at step 4, logged at 6, dead at 7: the records of step 6 are written a second time, and count once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    interrupted(small(out, tensorboard=True), at=7)
    events = accumulator.EventAccumulator(str(out / "tensorboard")).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    expected: dict[str, list[tuple[int, float]]] = {}
    for values in records(out):
        for name, value in values.items():
            if name != "step":
                expected.setdefault(name, []).append((values["step"], pytest.approx(value, rel=1e-6)))
    assert found == expected
    assert [step for step, _ in found["loss"]] == [3, 6, 9, 12]


def test_wandb_is_given_what_the_log_holds_under_one_id(tmp_path, monkeypatch):
    """With a package of the same name that only remembers."""
    begun: list[dict[str, object]] = []
    logged: dict[int, dict[str, float]] = {}

    class Remembers:
        def log(self, values, step):
            logged.setdefault(step, {}).update(values)

        def finish(self):
            begun[-1]["finished"] = True

    def init(**options):
        begun.append(options)
        return Remembers()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Stop))
    interrupted(small(tmp_path / "run", wandb=True), at=7)
    expected: dict[int, dict[str, float]] = {}
    for values in records(tmp_path / "run"):
        expected.setdefault(values.pop("step"), {}).update(values)
    assert logged == expected
    train(small(tmp_path / "other", wandb=True, steps=1), random_rows())
    assert begun[0]["id"] == begun[1]["id"] != begun[2]["id"] and all(options["finished"] for options in begun)
    assert begun[0]["config"]["run"]["steps"] == 12 and begun[0]["resume"] == "allow"


def test_wandb_itself_takes_what_it_is_given(tmp_path, monkeypatch):
    """Offline: the last values that it has are those of the log. Those of the last step it takes in only as the run ends."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    summary: dict[str, float] = {}
    finish = wandb.Run.finish

    def finishing(run, *arguments):
        summary.update(run.summary)
        finish(run, *arguments)

    monkeypatch.setattr(wandb.Run, "finish", finishing)
    train(small(tmp_path / "run", wandb=True), random_rows())
    last: dict[str, float] = {}
    for values in records(tmp_path / "run"):
        last |= values if values["step"] < 12 else {}
    assert summary["_step"] == last.pop("step") == 9
    assert {name: summary[name] for name in last} == last
    assert next((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")).stat().st_size


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_log_whose_package_is_missing_says_what_to_install(tmp_path, monkeypatch, option, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"--{option} needs {option}: pip install {option}"):
        train(small(tmp_path / "run", **{option: True}), random_rows())
    assert not any(tmp_path.iterdir())


def test_a_rate_that_would_rise_to_the_end_is_said(tmp_path, capsys):
    train(small(tmp_path / "short", optimizer__warmup=12), random_rows())
    assert "rises over 12 updates, and there are 12" in (said := capsys.readouterr().err) and "--optimizer.warmup 1" in said
    train(small(tmp_path / "long", optimizer__warmup=11), random_rows())
    assert "rises over" not in capsys.readouterr().err


# --- what is said ----------------------------------------------------------------------------------------------------------


def test_a_run_opens_with_what_is_trained_on_what_and_where(tmp_path, capsys):
    out = tmp_path / "run"
    main(["train", "digits", "--method", "sedd", "--steps", "1", "--out", str(out), *QUICK])
    parameters = sum(p.numel() for p in m2s.load(out).model.parameters())
    said = capsys.readouterr().err.splitlines()
    at = f"unet tiny ({parameters:,} parameters), cpu, float32; digits (1,541 rows of 64); 1 steps of 8 into {out}"
    assert said[0] == f"sedd: {at}"
    train(small(tmp_path / "own"), random_rows())
    assert "; Rows (64 rows of 4); 12 steps of 8 into" in capsys.readouterr().err.splitlines()[0]


def shown(capsys) -> list[int]:
    """The steps of the lines for people, in their order; those of validation are left out."""
    lines = capsys.readouterr().err.splitlines()
    return [int(line.split()[1].rstrip(",")) for line in lines if line.startswith("step") and "validation" not in line]


@pytest.mark.parametrize(("silence", "early"), [(10.0, [1]), (-1.0, [1, 2])])
def test_the_first_update_is_shown_and_then_each_silence_until_the_first_record(tmp_path, capsys, monkeypatch, silence, early):
    monkeypatch.setattr(log_module, "SILENCE", silence)
    train(small(tmp_path / "run"), random_rows())
    assert shown(capsys) == [*early, 3, 6, 9, 12]
    assert [line["step"] for line in outcome(tmp_path / "run")["log"] if "loss" in line] == [3, 6, 9, 12]


def test_a_run_that_goes_on_shows_its_first_update_and_logs_what_it_would_have(tmp_path, capsys):
    class Killed(Exception):
        pass

    train(small(tmp_path / "whole", log_every=5), random_rows())
    config, rows = small(tmp_path / "run", log_every=5), random_rows()
    gradient = Trainer.gradient

    def dying(learner, share):
        if learner.progress.step == 8:
            raise Killed
        return gradient(learner, share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "gradient", dying)
        with pytest.raises(Killed):
            train(config, rows)
    capsys.readouterr()
    train(config, rows)
    assert shown(capsys) == [9, 10, 12]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_prepared_text_is_no_preset_but_the_folder_of_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("a word and another " * 50)
    prepare_text("book.txt", "packed", Bytes())
    said = refused(capsys, "train", "packed", "--method", "mdlm")
    assert "knows no 'packed': choose from digits, mnist, cifar10, text8, owt; packed is a prepared text: " in said
    assert said.endswith(": m2s train owt --data.folder packed\n")
    assert parse(["train", "owt", "--data.folder", "packed"]).preset.data.folder == "packed"
    (tmp_path / "pictures").mkdir()
    assert "prepared" not in refused(capsys, "train", "pictures")
    assert "prepared" not in refused(capsys, "sample", "packed", "--zzzz")


@pytest.mark.parametrize("word", ["ppl", "perplexity", "ppl_eval"])
def test_who_asks_for_the_perplexity_is_told_where_it_is(word, capsys):
    said = refused(capsys, "evaluate", word, "runs/book")
    assert f"m2s evaluate knows no {word!r}: the perplexity of a model on text is in m2s evaluate bpd" in said
    assert "did you mean genppl?" in refused(capsys, "evaluate", "gnppl")
    assert "evaluate" not in refused(capsys, "train", word)
