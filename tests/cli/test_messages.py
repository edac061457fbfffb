"""What is said of common mistakes: each message names what was typed and what to type instead, in one line."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import m2s
import m2s.hub
from m2s.cli import main
from m2s.cli.errors import typed
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


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that bad input gives."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("m2s: ") and err.count("\n") == 1
    return err.rstrip("\n")


# --- audit and repair ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["audit"], ["audit", "--sampler", "autoregressive"], ["repair", "--measure", "none"]])
def test_what_corrupts_nothing_is_not_audited(ar, command, tmp_path, capsys):
    said = refused(capsys, command[0], ar, *command[1:], "--out", str(tmp_path / "new"))
    assert "cannot be audited" in said and "no scores to audit" in said and "--sampler" not in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["audit", "sample"])
def test_weights_are_not_told_apart_by_their_digits(command, free, tmp_path, monkeypatch, capsys):
    other = saved(tmp_path / "other", m2s.LogScore(m2s.Uniform(5, m2s.Linear())), seed=1)
    place = tmp_path / ("out" if command == "audit" else "out.npz")
    options = ("--n", "2", "--steps", "2", "--device", "cpu", "--out", str(place))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SampleShards, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        main([command, free, *options])
    said = refused(capsys, command, other, *options)
    assert "(other weights)" in said and not re.search("[0-9a-f]{64}", said)


# --- devices ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch):
    """A machine without GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("device", ["mps", "cuda", "cuda:1", "abacus"])
def test_a_device_that_is_not_there(device, free, tmp_path, capsys):
    for command in (
        ["train", "digits", "--out", str(tmp_path / "new")],
        ["sample", free, "--out", str(tmp_path / "new.npz")],
        ["evaluate", "bpd", free],
    ):
        said = refused(capsys, *command, "--device", device)
        assert device in said and "leave it out for the best there is, or give cpu" in said and len(said) < 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_training_does_not_begin_where_it_cannot_sum(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"float64.*give cpu"):
        World.start("mps")


# --- options ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train digits --resume", "there is no option --resume: what was interrupted goes on by itself when the same command"),
        ("sample run --out x --resume", "goes on by itself"),
        ("train digits --epochs 3", "--steps"),
        ("train digits --zzzz", "there is no option --zzzz: see m2s train digits --help"),
        ("sample run --zzzz 3 --out x", "there is no option --zzzz: see m2s sample --help"),
        ("evaluate bpd run --zzzz", "see m2s evaluate bpd --help"),
        ("sample --n 3 --out x", "CHECKPOINT"),
        ("sample --n 3 --out x", "(see m2s sample --help)"),
        ("data prepare", "(see m2s data prepare --help)"),
        ("sample run extra --out x", "extra (see m2s sample --help)"),
        ("train digits --steps", "--steps needs a value (see m2s train digits --help)"),
        ("train digits --steps abc", "--steps is 'abc', but it must be a whole number (see m2s train digits --help)"),
        ("train digits --micro-batch 1.5", "--micro-batch is '1.5', but it must be a whole number"),
        ("train digits --optimizer.lr fast", "--optimizer.lr is 'fast', but it must be a number"),
        ("train digits --importance x", "--importance is 'x', but it must be a number"),
        ("train digits --network.multipliers 1 b", "--network.multipliers is '1 b', but it must be whole numbers"),
        ("sample run --out x --labels 3 cat", "--labels is '3 cat', but it must be whole numbers"),
        ("train digits --process.schedule cosin", "process.schedule is 'cosin'"),
        ("train digits --process.schedule cosin", "did you mean cosine?"),
        ("train digits steps=3", "steps=3 (see m2s train digits --help)"),
        ("train digits --model.kind unet", "did you mean --head.kind or --network.kind or --process.kind?"),
    ],
)
def test_an_option_that_cannot_be_read(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *arguments.split())
    assert said in line and len(line) < 250
    assert not any(word in line for word in ("literal", "convert", "<class", "instantiated", "process.eps"))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_guessed_where_nothing_is_near(capsys):
    line = refused(capsys, "train", "digits", "--process.schedule", "zzz")
    assert "choose from linear, exponential" in line and "did you mean" not in line


# --- the library's words on the command line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option", "value", "advice"),
    [
        ("sample", "--sampler", "bayes", "use --sampler analytic, euler or tau_leaping, or --project"),
        ("audit", "--sampler", "bayes", "use --sampler analytic, euler or tau_leaping, or m2s sample --project"),
        ("repair", "--sampler", "bayes", "use --sampler analytic, euler or tau_leaping, or m2s sample --project"),
        ("sample", "--top-k", "3", "use --project"),
    ],
)
def test_a_free_score_is_answered_in_options(command, option, value, advice, free, tmp_path, capsys):
    said = refused(capsys, command, free, option, value, "--out", str(tmp_path / "new.npz"))
    assert advice in said
    assert not any(word in said for word in ("m2s.Projected", "sampler=", "top_k"))


CHAINS = {"uniform": m2s.Chain.uniform, "absorbing": m2s.Chain.absorbing}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("sampler", ["analytic", "ancestral", "euler", "adaptive", "remasking", "forward_backward"])
def test_a_chain_is_answered_with_what_serves_it(kind, sampler, tmp_path, capsys):
    chain = saved(tmp_path / "chain", m2s.Posterior(CHAINS[kind](5, torch.full((4,), 0.3)), "exact"))
    options = ("--n", "2", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "new.npz"))
    said = refused(capsys, "sample", chain, "--sampler", sampler, *options)
    advice = re.search(r"use --sampler (.*)$", said)
    assert advice is not None and advice[1] == "bayes"
    main(["sample", chain, "--sampler", advice[1], *options])


@pytest.mark.parametrize(
    ("process", "sampler", "advice"),
    [
        (
            m2s.Uniform(5, m2s.Linear()),
            "confidence",
            "it needs m2s train --process.kind absorbing; use --sampler bayes or euler",
        ),
        (m2s.RateMatrix.uniform(5, m2s.Linear()), "analytic", "(uniform, absorbing, hybrid)"),
        (m2s.RateMatrix.uniform(5, m2s.Linear()), "analytic", "use --sampler euler"),
        (
            m2s.Absorbing(5, m2s.Linear()),
            "self_correcting",
            "m2s train --process.kind hybrid or uniform; use --sampler remasking",
        ),
    ],
)
def test_no_sampler_is_refused_with_a_class(process, sampler, advice, tmp_path, capsys):
    run = saved(tmp_path / "run", m2s.Posterior(process))
    said = refused(capsys, "sample", run, "--sampler", sampler, "--out", str(tmp_path / "new.npz"))
    assert advice in said and not re.search(r"m2s\.[A-Z]", said)


def test_every_option_is_named_as_it_is_typed():
    options = {"sampler", "top_k", "steps", "project"}
    assert typed("steps is 0: use top_k=1", options) == "--steps is 0: use --top-k 1"
    assert typed("use sampler='bayes' or 'euler'", options) == "use --sampler bayes or euler"
    assert typed("did you mean 'top_k'?", options) == "did you mean 'top_k'?"
    nested = m2s.LogScore(m2s.Uniform(5, m2s.Linear()))
    assert typed(f"use m2s.Projected({nested})", options) == "use --project"
    assert typed("it needs m2s.Hybrid or m2s.Uniform", options) == "it needs m2s train --process.kind hybrid or uniform"
    assert typed("LogScore has none, but Uniform(5, Linear()) has: use 'euler'", options) == (
        "log-score has none, but Uniform(5, Linear()) has: use --sampler euler"
    )


@pytest.mark.parametrize(
    ("method", "said"), [("ar", "exact NLL of held-out data"), ("m2s", "upper bound on the NLL of held-out data")]
)
def test_training_says_whether_it_ends_with_a_bound(method, said, tmp_path, capsys):
    less = ("--steps", "1", "--batch", "8", "--validation-samples", "4", "--validate-every", "0", "--device", "cpu")
    main(["train", "digits", "--method", method, *less, "--out", str(tmp_path / "run")])
    line = capsys.readouterr().out.splitlines()[-1]
    assert said in line and ("bound" in line) == (method != "ar")
    assert m2s.load(tmp_path / "run").head.exact == (method == "ar")


# --- checkpoints -----------------------------------------------------------------------------------------------------------


def test_checkpoints_of_others(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mdlm", "hidden_dim": 768}')
    with pytest.raises(ValueError, match=r"m2s's own .* SEDD .* not those of other projects, such as MDLM"):
        m2s.load(tmp_path)


def test_a_run_is_no_judge(ar, tmp_path, capsys, monkeypatch):
    (tmp_path / "samples.jsonl").write_text('{"text": "a b c"}\n' * 3)
    monkeypatch.setitem(sys.modules, "transformers", None)  # nobody need install anything to learn this
    said = refused(capsys, "evaluate", "genppl", str(tmp_path / "samples.jsonl"), "--judge", ar)
    assert "no judge" in said and "m2s evaluate bpd RUN --data FILE" in said and "hf download" not in said
    (Path(ar) / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="pip install transformers"):
        load_judge(ar)


def test_a_mistyped_folder_is_answered_with_its_neighbours(ar, free, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("x1", "x2", "x3", ".hidden"):
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs" / "fre.txt").touch()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for typed_ in ("runs/fre", str(tmp_path / "runs" / "fre")):
        said = refused(capsys, "sample", typed_, "--out", "a.npz")
        parent = typed_.rpartition("/")[0]
        assert said.startswith(f"m2s: there is no folder {typed_} ({parent} holds free, ") and "and 1 more)" in said
        assert ".hidden" not in said and "fre.txt" not in said
    assert "holds" not in refused(capsys, "sample", "nowhere/fre", "--out", "a.npz")


# --- processes and objectives ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_shape_hook")
@pytest.mark.parametrize("kind", [m2s.Uniform, m2s.Absorbing])
def test_a_schedule_is_asked_for_by_name(kind):
    with pytest.raises(TypeError) as error:
        kind(10)
    advice = re.search(r"m2s\.\w+\(10, m2s\.\w+\(\)\)", str(error.value))
    assert advice is not None and "_Scheduled" not in str(error.value)
    assert isinstance(eval(advice[0]), kind)


class Table(nn.Module):
    """A network that embeds its tokens under a name of its own."""

    def __init__(self, rows: int, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Embedding(rows, 11))
        self.name = name

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        return getattr(self, self.name)(x_t)


def test_a_network_without_a_row_for_the_mask():
    head = m2s.Posterior(m2s.Absorbing(10, m2s.Linear()))
    x_0, t = torch.zeros(2, 8, dtype=torch.long), torch.full((2,), 0.9)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=r"has 10 rows: .* process.states = 11 states, 0\.\.10, the last one the mask"):
        m2s.Objective(Table(10, "embedding"), head)
    with pytest.raises(IndexError, match=r"process.states = 11 states, 0\.\.10, the last one the mask") as error:
        m2s.Objective(Table(10, "tokens"), head, generator=generator)(x_0, t)
    assert isinstance(error.value.__cause__, IndexError)
    for name in ("embedding", "tokens"):
        assert m2s.Objective(Table(11, name), head, generator=generator)(x_0, t).shape == x_0.shape
