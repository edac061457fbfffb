"""Error messages of the command line: each names what was typed and what to type instead, in one line."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import m2s
import m2s.hub
from m2s.cli import main
from m2s.cli.errors import message
from m2s.distributed import World
from m2s.errors import UserError
from m2s.evaluation.judge import load_judge
from m2s.heads.next_token import NextToken, Shifted
from m2s.models import DiT, DiTConfig
from m2s.samplers.shards import SampleShards

TEXT = {"kind": "text", "length": 4}


def saved(folder: Path, head: m2s.Head, seed: int = 0) -> str:
    torch.manual_seed(seed)
    causal = isinstance(head.process, Shifted)
    config = DiTConfig(head.process.states, width=16, depth=1, heads=2, condition_width=8, length=4, causal=causal)
    return str(m2s.hub.save(folder, DiT(config), head, TEXT))


@pytest.fixture
def ar(tmp_path: Path) -> str:
    return saved(tmp_path / "runs" / "ar", NextToken(Shifted(5)))


@pytest.fixture
def free(tmp_path: Path) -> str:
    return saved(tmp_path / "runs" / "free", m2s.LogScore(m2s.Uniform(5, m2s.Linear())))


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail, and return its one line on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("m2s: ") and err.count("\n") == 1
    return err.rstrip("\n")


# --- audit and repair ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["audit"], ["audit", "--sampler", "autoregressive"], ["repair", "--measure", "none"]])
def test_autoregressive_models_have_no_scores_to_audit(ar, command, tmp_path, capsys):
    said = error_line(capsys, command[0], ar, *command[1:], "--out", str(tmp_path / "new"))
    assert "cannot be audited" in said and "no scores to audit" in said and "--sampler" not in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["audit", "sample"])
def test_other_weights_are_named_without_checksums(command, free, tmp_path, monkeypatch, capsys):
    other = saved(tmp_path / "other", m2s.LogScore(m2s.Uniform(5, m2s.Linear())), seed=1)
    place = tmp_path / ("out" if command == "audit" else "out.npz")
    options = ("--n", "2", "--steps", "2", "--device", "cpu", "--out", str(place))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SampleShards, "write", killed)
    with pytest.raises(SystemExit):
        main([command, free, *options])
    said = error_line(capsys, command, other, *options)
    assert "(other weights)" in said and not re.search("[0-9a-f]{64}", said)


# --- devices ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch):
    """A machine without GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("device", ["mps", "cuda", "cuda:1", "abacus"])
def test_missing_device(device, free, tmp_path, capsys):
    for command in (
        ["train", "digits", "--out", str(tmp_path / "new")],
        ["sample", free, "--out", str(tmp_path / "new.npz")],
        ["evaluate", "bpd", free],
    ):
        said = error_line(capsys, *command, "--device", device)
        assert device in said and "leave it out for the best there is, or give cpu" in said and len(said) < 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_training_needs_float64(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"float64.*give cpu"):
        World.start("mps")


# --- options ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train digits --resume", "there is no option --resume: the same command, given again, resumes an interrupted run"),
        ("sample run --out x --resume", "resumes an interrupted run"),
        ("train digits --epochs 3", "--steps"),
        ("train digits --zzzz", "there is no option --zzzz: see m2s train digits --help"),
        ("sample run --zzzz 3 --out x", "there is no option --zzzz: see m2s sample --help"),
        ("evaluate bpd run --zzzz", "see m2s evaluate bpd --help"),
        ("sample --n 3 --out x", "CHECKPOINT is missing"),
        ("sample run", "--out is missing (see m2s sample --help)"),
        ("sample --n 3 --out x", "(see m2s sample --help)"),
        ("data prepare", "(see m2s data prepare --help)"),
        ("sample run extra --out x", "unexpected argument extra (see m2s sample --help)"),
        ("sample run --out", "--out needs a value (see m2s sample --help)"),
        ("sample run --out x --kernels=fast", "--kernels is 'fast', but it must be one of auto, fused, reference"),
        ("sample run --out x --corrections few", "--corrections is 'few', but it must be a whole number"),
        ("evaluate bpd run --data digits --no-limit", "there is no option --no-limit: did you mean --limit?"),
        ("train digits --steps", "--steps needs a value (see m2s train digits --help)"),
        ("train digits --steps abc", "--steps is 'abc', but it must be a whole number (see m2s train digits --help)"),
        ("train digits --micro-batch 1.5", "--micro-batch is '1.5', but it must be a whole number"),
        ("train digits --optimizer.lr fast", "--optimizer.lr is 'fast', but it must be a number"),
        ("train digits --importance x", "--importance is 'x', but it must be a number"),
        ("train digits --network.multipliers 1 b", "--network.multipliers is '1 b', but it must be whole numbers"),
        ("audit run --out x --ordinal maybe", "--ordinal is 'maybe', but it must be one of True, False"),
        ("report run --out x.html other", "unexpected argument other: give arguments without a name side by side"),
        ("report run --out x.html --title --", 'unexpected argument "--"'),
        ("report run -- --out x.html", 'unexpected argument "--"'),
        ("sample run --out x --top-k auto", "--top-k is 'auto', but it must be a whole number"),
        ("train digits --network.groups None", "--network.groups is 'None', but it must be a whole number"),
        ("sample run --out x --labels 3 cat", "--labels is '3 cat', but it must be whole numbers"),
        ("train digits --process.schedule cosin", "--process.schedule is 'cosin', but there is no schedule of that name"),
        ("train digits --process.schedule cosin", "did you mean cosine?"),
        ("train digits steps=3", "unexpected argument steps=3 (see m2s train digits --help)"),
        ("train digits --model.kind unet", "did you mean --head.kind or --network.kind or --optimizer.kind?"),
    ],
)
def test_invalid_option(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = error_line(capsys, *arguments.split())
    assert said in line and len(line) < 250
    assert not any(word in line for word in ("literal", "convert", "<class", "instantiated", "process.eps"))
    assert list(tmp_path.iterdir()) == []


def test_no_suggestion_where_no_name_is_close(capsys):
    line = error_line(capsys, "train", "digits", "--process.schedule", "zzz")
    assert "choose from linear, exponential" in line and "did you mean" not in line


# --- errors of the library -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option", "value", "advice"),
    [
        ("sample", "--sampler", "bayes", "use --sampler analytic, euler or tau_leaping, or --project, which gives"),
        ("audit", "--sampler", "bayes", "use --sampler analytic, euler or tau_leaping, or m2s sample --project"),
        ("repair", "--sampler", "bayes", "use --sampler analytic, euler or tau_leaping, or m2s sample --project"),
    ],
)
def test_sampler_that_needs_a_posterior(command, option, value, advice, free, tmp_path, capsys):
    said = error_line(capsys, command, free, option, value, "--out", str(tmp_path / "new.npz"))
    assert advice in said and "an unconstrained score" in said
    assert "also supported: " in said and "forward_backward" in said
    assert not any(word in said for word in ("m2s.Projected", "sampler=", "top_k"))


def test_sharpening_needs_a_posterior(free, tmp_path, capsys):
    said = error_line(capsys, "sample", free, "--top-k", "3", "--out", str(tmp_path / "new.npz"))
    assert "--top-k" in said and "use --project" in said and "m2s.Projected" not in said


def advised(said: str) -> list[str]:
    """The samplers that an error message offers."""
    found = re.search(r"use --sampler (.*?)(?:; also supported: (.*))?$", said)
    assert found is not None
    return re.split(", | or ", ", ".join(filter(None, found.groups())))


CHAINS = {"uniform": m2s.Chain.uniform, "absorbing": m2s.Chain.absorbing}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("sampler", ["analytic", "ancestral", "euler", "adaptive", "remasking", "forward_backward"])
def test_chain_error_names_its_sampler(kind, sampler, tmp_path, capsys):
    chain = saved(tmp_path / "chain", m2s.Posterior(CHAINS[kind](5, torch.full((4,), 0.3)), "exact"))
    options = ("--n", "2", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "new.npz"))
    said = error_line(capsys, "sample", chain, "--sampler", sampler, *options)
    names = advised(said)
    assert "bayes" in names and sampler not in names
    for name in names:
        main(["sample", chain, "--sampler", name, "--overwrite", *options])


@pytest.mark.parametrize(
    ("process", "sampler", "needs", "use"),
    [
        (m2s.Uniform(5, m2s.Linear()), "confidence", "absorbing", {"bayes", "euler"}),
        (m2s.RateMatrix.uniform(5, m2s.Linear()), "analytic", "uniform, absorbing or hybrid", {"euler"}),
        (m2s.Absorbing(5, m2s.Linear()), "self_correcting", "uniform or hybrid", {"remasking"}),
    ],
)
def test_sampler_that_needs_another_process(process, sampler, needs, use, tmp_path, capsys):
    run = saved(tmp_path / "run", m2s.Posterior(process))
    said = error_line(capsys, "sample", run, "--sampler", sampler, "--out", str(tmp_path / "new.npz"))
    assert f"sampler {sampler!r} does not support" in said
    assert f"it needs a model trained with --process.kind {needs}: use --sampler " in said
    assert use <= set(advised(said)) and not re.search(r"m2s\.[A-Z]", said)


def test_next_token_model_has_one_sampler(ar, tmp_path, capsys):
    said = error_line(capsys, "sample", ar, "--sampler", "bayes", "--out", str(tmp_path / "new.npz"))
    assert said.endswith("use --sampler autoregressive")


def test_arguments_are_named_as_options():
    error = UserError(option="top_k", value=0, expected="at least 1")
    assert str(error) == "top_k is 0, but it must be at least 1"
    assert message(error, ["--top-k"]) == "--top-k is 0, but it must be at least 1"
    assert message(error, ["--steps"]) == str(error)
    assert message(UserError("top_k is not used"), ["--top-k"]) == "top_k is not used"
    nested = UserError(option="optimizer.weight_decay", value=-1, expected="at least 0")
    assert message(nested, ["--optimizer.weight-decay"]).startswith("--optimizer.weight-decay is -1")


def test_structured_errors_of_a_command_name_its_options(monkeypatch, capsys):
    def fail(self):
        raise UserError(option="validation_fraction", value=0.3, expected="even")

    monkeypatch.setattr("m2s.cli.data.Prepare.run", fail)
    said = error_line(capsys, "data", "prepare", "texts", "--out", "x", "--validation-fraction", "0.3")
    assert said == "m2s: --validation-fraction is 0.3, but it must be even"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--steps 0", "--steps is 0, but it must be at least 1"),
        ("--batch 8 --micro-batch 3", "--micro-batch is 3, but it must be a divisor of batch = 8"),
        ("--t-min 0.7", "--t-min is 0.7, but it must be in (0, 0.5)"),
        ("--importance -1", "--importance is -1.0, but it must be a number >= 0, such as 0.1"),
        ("--optimizer.lr 0", "--optimizer.lr is 0.0, but it must be a positive number"),
        ("--optimizer.weight-decay -1", "--optimizer.weight-decay is -1.0, but it must be at least 0"),
        ("--method nothing", "--method is 'nothing', but there is no method of that name"),
        ("--network.width 6", "--network.width is 6, but it must be a multiple of 4: channels are normalized in groups of 4"),
        ("--network.size huge", "--network.size is 'huge', but there is no unet of that size: choose from tiny, mnist, md4"),
        ("--network.depth 3", "--network.depth is 3, but it is for network.kind dit, not unet: leave it out"),
        ("--process.schedule log-linear --process.eps 2", "--process.eps is 2.0, but it must be in (0, 1)"),
        ("--process.chain-steps 5", "--process.chain-steps is 5, but it is for process.kind chain-uniform, chain-absorbing or"),
        ("--process.options a", "--process.options is 'a', but it has no value: write KEY=VALUE"),
        ("--head.loss masked", "(--head.kind posterior) over m2s.Absorbing (--process.kind absorbing), not for Posterior(Uni"),
        ("--method gidd-clipped --head.max-weight 0", "--head.max-weight is 0.0, but it must be a positive number"),
        ("--process.kind absorbing --head.curriculum duo", "--head.curriculum is 'duo', but DUO's curriculum is for m2s.Post"),
    ],
)
def test_errors_of_a_configuration_name_the_option_as_it_is_typed(options, said, tmp_path, capsys):
    out = tmp_path / "run"
    assert said in error_line(capsys, "train", "digits", *options.split(), "--device", "cpu", "--out", str(out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("method", "said"), [("ar", "exact NLL of held-out data"), ("m2s", "upper bound on the NLL of held-out data")]
)
def test_training_prints_whether_its_result_is_a_bound(method, said, tmp_path, capsys):
    less = ("--steps", "1", "--batch", "8", "--validation-samples", "4", "--validate-every", "0", "--device", "cpu")
    main(["train", "digits", "--method", method, *less, "--out", str(tmp_path / "run")])
    line = capsys.readouterr().out.splitlines()[-1]
    assert said in line and ("bound" in line) == (method != "ar")
    assert m2s.load(tmp_path / "run").head.exact == (method == "ar")


# --- checkpoints -----------------------------------------------------------------------------------------------------------


def test_checkpoints_of_other_projects(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mdlm", "hidden_dim": 768}')
    with pytest.raises(ValueError, match=r"no layout of other projects that m2s loads \(sedd, .*mdlm.*docs/checkpoints.md"):
        m2s.load(tmp_path)


def test_run_given_as_judge(ar, tmp_path, capsys, monkeypatch):
    (tmp_path / "samples.jsonl").write_text('{"text": "a b c"}\n' * 3)
    monkeypatch.setitem(sys.modules, "transformers", None)  # the error does not need the package
    said = error_line(capsys, "evaluate", "genppl", str(tmp_path / "samples.jsonl"), "--judge", ar)
    assert "no judge" in said and "m2s evaluate bpd RUN --data FILE" in said and "hf download" not in said
    (Path(ar) / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match=r"pip install 'm2s-diffusion\[judge\]'$"):
        load_judge(ar)


def test_mistyped_folder_lists_similar_ones(ar, free, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("x1", "x2", "x3", ".hidden"):
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs" / "fre.txt").touch()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for typed_ in ("runs/fre", str(tmp_path / "runs" / "fre")):
        said = error_line(capsys, "sample", typed_, "--out", "a.npz")
        parent = typed_.rpartition("/")[0]
        assert said.startswith(f"m2s: there is no folder {typed_} ({parent} holds free, ") and "and 1 more)" in said
        assert ".hidden" not in said and "fre.txt" not in said
    assert "holds" not in error_line(capsys, "sample", "nowhere/fre", "--out", "a.npz")
