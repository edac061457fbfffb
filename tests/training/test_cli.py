"""`m2s train` from the command line: presets, methods, options, and errors before anything is written."""

import dataclasses
import json
import math
import re

import pytest
import torch

import m2s
from m2s.cli import main, parse
from m2s.data import prepare_text
from m2s.data.tokenizer import Bytes
from m2s.methods import METHODS
from m2s.models import build
from m2s.presets import PRESETS, SUMMARIES
from m2s.training import Config, resolve
from m2s.training.build import describe_network, make_process
from small_runs import QUICK, InMemorySource, losses, outcome, user_error


def test_train_digits_then_load_it_and_resume(tmp_path, capsys):
    command = ["train", "digits", "--method", "sedd", "--steps", "3", "--out", str(tmp_path / "run"), *QUICK]
    main(command)
    said = capsys.readouterr()
    assert "3 steps, upper bound on the NLL of held-out data" in said.out and "validation_bits" in said.err
    assert said.out.endswith(" bits per dimension\n")
    checkpoint = m2s.load(tmp_path / "run")
    assert isinstance(checkpoint.head, m2s.LogScore) and checkpoint.data == {"kind": "image", "shape": [8, 8], "levels": 17}
    main(command)
    assert "resuming from step 3 of 3" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["config"]["head"]["kind"] == "log-score" and len(record["starts"]) == 2


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_digits(tmp_path, method):
    out = tmp_path / "run"
    main(["train", "digits", "--method", method, "--steps", "2", "--out", str(out), *QUICK])
    assert all(math.isfinite(x) for x in losses(out) or [1.0])
    assert m2s.load(out).config["extra"]["method"] == method


def test_options_have_one_form(tmp_path, capsys):
    """`--head.offset exact`; neither `head.offset=exact` nor `head:posterior`."""
    out = str(tmp_path / "run")
    for other in ("head.offset=exact", "steps=1", "head:posterior"):
        user_error(capsys, "train", "digits", "--out", out, *QUICK, other)
    assert not (tmp_path / "run").exists()
    main(["train", "digits", "--head.offset", "exact", "--steps", "1", "--out", out, *QUICK])
    assert m2s.load(out).head.offset == "exact"


def test_auto_is_the_only_spelling_of_a_default(capsys):
    """Names, numbers and the device: `auto` is printed by the help, and can be given."""
    with pytest.raises(SystemExit):
        main(["train", "digits", "--help"])
    page = " ".join(capsys.readouterr().out.split())
    for option in ("network.width", "micro-batch", "device", "precision", "process.kind", "head.loss", "process.jump-width"):
        assert re.search(rf"--{option} .{{,500}}?\(default: auto", page), option
    assert (
        parse(["train", "digits", "--network.width", "auto", "--micro-batch", "auto", "--device", "auto"]).preset
        == (PRESETS["digits"])
    )
    assert parse(["train", "digits", "--network.width", "16"]).preset.network.width == 16


def test_presets_are_the_papers_runs():
    assert PRESETS.keys() == SUMMARIES.keys()
    parameters = {"cifar10": (256, (32, 32, 3), 28_427_520)}
    parameters |= dict.fromkeys(("owt", "owt-fast"), (50_257, None, 169_697_920))
    for name, (vocab, shape, count) in parameters.items():
        config = resolve(PRESETS[name])
        source = InMemorySource(torch.zeros(1, 512, dtype=torch.long), vocab)
        source.shape = shape
        process = make_process(config.process, vocab)
        with torch.device("meta"):
            model = build(describe_network(config.network, process, source))
        assert sum(p.numel() for p in model.parameters()) == count
    assert {config.method for config in PRESETS.values()} == {Config().method} == {"m2s-offset"}
    for words in (["mnist"], ["cifar10"], ["text8"], ["owt"]):  # the paper's head is one option away
        assert resolve(parse(["train", *words, "--method", "m2s"]).preset).head.offset == "none"
        assert resolve(parse(["train", *words]).preset).head.offset == "exact"
    assert PRESETS["owt-fast"].data == PRESETS["owt"].data  # and the same number of parameters
    assert PRESETS["owt"].run.batch == 1584 and PRESETS["owt"].run.steps * 1584 * 512 == pytest.approx(131e9, rel=0.01)


def test_unknown_names_suggest_the_nearest(tmp_path, capsys):
    assert "unknown preset 'digts'; did you mean digits?" in user_error(capsys, "train", "digts")
    assert "did you mean digits?" in user_error(capsys, "train", "digts", "--steps", "3")
    assert "m2s train needs a preset before any option: digits, mnist" in user_error(capsys, "train", "--steps", "3", "digits")
    assert "no option --stpes: did you mean --steps?" in user_error(capsys, "train", "digits", "--stpes", "3")
    assert "did you mean --head.offset?" in user_error(capsys, "train", "digits", "--head.ofset=exact", "--log_every", "5")
    assert "did you mean --optimizer.clip?" in user_error(capsys, "train", "digits", "--clip", "1")
    assert "did you mean sedd" in user_error(capsys, "train", "digits", "--method", "seddd", "--out", str(tmp_path / "x"))
    assert "did you mean mnist" in user_error(capsys, "train", "digits", "--data.name", "mnits", "--out", str(tmp_path / "x"))
    for option, wrong, near in (
        ("process.kind", "unifrom", "uniform"),
        ("process.schedule", "linaer", "linear"),
        ("head.kind", "posteror", "posterior"),
        ("head.loss", "maskd", "masked"),
        ("network.kind", "unett", "unet"),
    ):
        message = user_error(capsys, "train", "digits", f"--{option}", wrong, "--out", str(tmp_path / "x"))
        assert f"{option} is {wrong!r}" in message and f"did you mean {near}" in message
    assert "tiny" in user_error(capsys, "train", "digits", "--network.size", "tinny", "--out", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_gidd_without_masks_is_the_process_that_the_error_names(tmp_path, capsys):
    """The error of `--process.p-uniform 1` names an option, and that option trains, with GIDD's own loss too."""
    out = str(tmp_path / "run")
    said = user_error(capsys, "train", "digits", "--method", "gidd", "--process.p-uniform", "1", "--out", out, *QUICK)
    option = re.search(r"give (--process\.kind \w+) in its place", said)
    assert option is not None and not (tmp_path / "run").exists()
    main(
        ["train", "digits", "--method", "gidd", *option[1].split(), "--head.loss", "gidd", "--steps", "1", "--out", out, *QUICK]
    )
    assert repr(m2s.load(out).head) == "Posterior(Uniform(17, Linear()), offset='exact')"


def test_the_largest_weight_of_gidd_is_an_option(tmp_path, capsys):
    """A run with another largest weight has another loss."""
    most = {"default": [], "one": ["--head.max-weight", "1"], "two": ["--head.max-weight", "2"]}
    for name, given in most.items():
        main(["train", "digits", "--method", "gidd-clipped", "--steps", "2", "--out", str(tmp_path / name), *QUICK, *given])
    default, one, two = (outcome(tmp_path / name) for name in most)
    assert default == one and two["weights"] != one["weights"]
    assert two["log"][0]["loss"] > one["log"][0]["loss"]  # at the same weights, in the first step
    assert json.loads((tmp_path / "two" / "train.json").read_text())["config"]["head"]["max_weight"] == 2


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_eps_of_md4_is_an_option(tmp_path, schedule):
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


def test_groups_and_sinusoids_of_md4_are_options(tmp_path, capsys):
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
    said = user_error(capsys, "train", "digits", "--init", str(plain), "--out", str(tmp_path / "x"), *QUICK, *options)
    assert "groups is None there and 8 here" in said


def test_a_chain_is_trained_with_the_loss_that_the_error_names(tmp_path, capsys):
    chain = ["train", "digits", "--method", "neural-ctmc", "--process.kind", "chain-uniform", "--steps", "1", *QUICK]
    said = user_error(capsys, *chain, "--out", str(tmp_path / "run"))
    advice = re.search(r"give (--head.loss chain) or d3pm, with (--head.kind posterior)$", said.strip())
    assert advice is not None and not (tmp_path / "run").exists()
    main([*chain, *advice[1].split(), *advice[2].split(), "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("method", ["md4", "mdlm", "radd"])
def test_masked_methods_on_ordered_levels(tmp_path, method):
    out = tmp_path / "run"
    main(["train", "digits", "--method", method, "--head.kind", "ordinal", "--steps", "2", "--out", str(out), *QUICK])
    assert isinstance(m2s.load(out).head, m2s.Ordinal) and all(math.isfinite(x) for x in losses(out) or [1.0])


def test_a_prepared_text_is_a_data_folder_not_a_preset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("a word and another " * 50)
    prepare_text("book.txt", "packed", Bytes())
    said = user_error(capsys, "train", "packed", "--method", "mdlm")
    assert f"unknown preset 'packed'; choose from {', '.join(PRESETS)}; packed is a prepared text: " in said
    assert said.endswith(": m2s train owt --data.folder packed\n")
    assert parse(["train", "owt", "--data.folder", "packed"]).preset.data.folder == "packed"
    (tmp_path / "pictures").mkdir()
    assert "prepared" not in user_error(capsys, "train", "pictures")
    assert "prepared" not in user_error(capsys, "sample", "packed", "--zzzz")


@pytest.mark.parametrize("word", ["ppl", "perplexity", "ppl_eval"])
def test_perplexity_as_a_measure_names_the_commands_that_compute_it(word, capsys):
    said = user_error(capsys, "evaluate", word, "runs/book")
    assert f"unknown metric {word!r}; the perplexity of a model on text is in m2s evaluate bpd" in said
    assert "did you mean genppl?" in user_error(capsys, "evaluate", "gnppl")
    assert "evaluate" not in user_error(capsys, "train", word)
