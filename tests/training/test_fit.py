"""`m2s.fit`: it is `m2s train` on arrays, and returns what `m2s.load` returns."""

import inspect
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
from m2s.data import Sequences
from m2s.errors import UserError
from m2s.training import Config, DataConfig, Diverged, NetworkConfig, OptimizerConfig, RunConfig, train

SMALL = {"network.width": 16, "network.depth": 1, "network.heads": 2}
CYCLES = (torch.arange(12) + torch.arange(60).unsqueeze(-1)) % 5


def fit(x: object = CYCLES, steps: int = 4, **options: object) -> m2s.Checkpoint:
    given = {"batch": 8, "seed": 3, "progress": False, "options": SMALL, "device": "cpu", **options}
    return m2s.fit(x, steps=steps, **given)


def weights(checkpoint: m2s.Checkpoint) -> dict[str, torch.Tensor]:
    return checkpoint.model.state_dict()


def equal(one: m2s.Checkpoint, other: m2s.Checkpoint) -> bool:
    return all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_it_is_a_run_of_the_trainer(tmp_path: Path) -> None:
    """The same weights, bit for bit, as `m2s.training.train` with the configuration that its docstring describes."""
    found = fit()
    run = RunConfig(out=tmp_path / "run", steps=4, batch=8, seed=3, device="cpu", importance=0.1, save_every=4)
    network = NetworkConfig(size="tiny", width=16, depth=1, heads=2)
    optimizer = OptimizerConfig(lr=1e-3, warmup=1, ema=0.995)
    data = DataConfig(name="sequences")
    train(Config(run=run, method="m2s-offset", network=network, data=data, optimizer=optimizer), Sequences(CYCLES, seed=3))
    assert equal(found, m2s.load(tmp_path / "run"))


def test_the_result_samples_evaluates_and_saves(tmp_path: Path) -> None:
    found = fit()
    assert type(found) is m2s.Checkpoint and not found.model.training
    tokens, diagnostics = found.sample(3, steps=2, diagnostics=True)
    assert tokens.shape == (3, 12) and tokens.max() < 5
    again = m2s.load(found.save(tmp_path / "saved"))
    assert equal(found, again) and again.config["extra"] == found.config["extra"]
    assert torch.equal(again.sample(3, steps=2, seed=diagnostics.seed), tokens)
    one = found.evaluate(CYCLES[:9], passes=2, batch_size=4, seed=1)
    assert torch.equal(one.nats, again.evaluate(CYCLES[:9], passes=2, batch_size=4, seed=1).nats)
    assert one.nats.shape == (9,) and one.sites.tolist() == [12.0] * 9
    assert found.sample(2, length=30, steps=2).shape == (2, 30)  # in windows


def test_evaluate_is_the_elbo_of_each_batch() -> None:
    from m2s.rng import derived_seed

    found = fit()
    nats = found.evaluate(CYCLES[:6], passes=2, batch_size=4, seed=1).nats
    for first in (0, 4):
        generator = torch.Generator().manual_seed(derived_seed(1, "evaluate", first))
        rows = CYCLES[:6][first : first + 4]
        expected = m2s.elbo(found.model, found.head, rows, passes=2, generator=generator)
        assert torch.allclose(nats[first : first + 4], expected.nats, rtol=1e-12)


def test_it_learns() -> None:
    """The data has 5 sequences of 12 tokens: log2(5)/12 = 0.19 bits per token, and 2.32 without any structure."""
    found = fit(steps=250, batch=32, lr=4e-3, options={"network.width": 32, "network.depth": 2, "network.heads": 2})
    nelbo = found.evaluate(CYCLES, passes=4, seed=0)
    assert float(nelbo.nats.sum() / nelbo.sites.sum()) / np.log(2) < 1.2


def test_the_number_of_samples_is_named_as_the_argument(without_shape_hook: None) -> None:
    found = fit()
    for n, message in (((2, 12), "n must be an int, not tuple"), (0, "n is 0, but it must be at least 1")):
        with pytest.raises((UserError, TypeError), match=message):
            found.sample(n)
    assert "; 1 example, passes" in repr(found.evaluate(CYCLES[:1])) and "; 9 examples, passes" in repr(
        found.evaluate(CYCLES[:9])
    )


def test_padding_and_lengths() -> None:
    ragged = [list(row[: 2 + i % 9]) for i, row in enumerate(CYCLES)]
    found = fit(ragged)
    assert found.config["model"]["padding"] is True
    lengths = torch.tensor([1, 5, 10])
    tokens = found.sample(3, steps=2, lengths=lengths)
    assert (tokens >= 0).sum(1).tolist() == [1, 5, 10]
    assert found.evaluate(ragged[:5], passes=1).sites.tolist() == [2, 3, 4, 5, 6]


def test_labels() -> None:
    found = fit(labels=CYCLES[:, 0], method="md4")
    assert found.config["model"]["classes"] == 5 and isinstance(found.head.process, m2s.Absorbing)
    assert found.sample(2, steps=2, condition=torch.tensor([0, 4]), guidance=2.0).shape == (2, 12)
    assert found.evaluate(CYCLES[:4], labels=CYCLES[:4, 0], passes=1).nats.shape == (4,)


def test_samples_are_drawn_by_label() -> None:
    """`labels` has the word of `fit` and `evaluate`, and draws what `condition` of `m2s.sample` draws."""
    found = fit(labels=CYCLES[:, 0])
    drawn = found.sample(3, steps=2, seed=1, condition=torch.tensor([0, 4, 2]))
    for labels in ([0, 4, 2], np.array([0, 4, 2]), torch.tensor([0, 4, 2])):
        assert torch.equal(found.sample(3, labels=labels, steps=2, seed=1), drawn)
        assert torch.equal(found.sample(labels=labels, steps=2, seed=1), drawn)
    assert torch.equal(
        found.sample(2, labels=4, steps=2, seed=1), found.sample(2, steps=2, seed=1, condition=torch.tensor([4, 4]))
    )
    for labels, message in (
        ([0, 1, 5], r"labels\[2\] is 5, but labels must lie in 0..4"),  # 5 means "no label" inside the network
        ([0, 1, -1], "labels holds -1, but labels are numbered from 0 on"),
        ([0, 1], r"labels has shape \[2\], but there are 3 examples"),
        (["a", "b", "c"], "labels holds strings"),
    ):
        with pytest.raises((UserError, TypeError), match=message):
            found.sample(3, labels=labels)
        with pytest.raises((UserError, TypeError), match=message):
            found.evaluate(CYCLES[:3], labels=labels)
    with pytest.raises(UserError, match="condition is given too"):
        found.sample(1, labels=[0], condition=torch.tensor([0]))
    with pytest.raises(UserError, match=r"condition\[0\] is 6, but labels \(and 5, no label\) must lie in 0..5"):
        found.sample(1, condition=torch.tensor([6]))
    for call in (lambda: fit().sample(1, labels=0), lambda: fit().evaluate(CYCLES[:1], labels=[0])):
        with pytest.raises(UserError, match="labels cannot be used: the network was trained without labels"):
            call()


def test_evaluate_reads_the_labels_of_pairs() -> None:
    found, labels = fit(labels=CYCLES[:, 0]), CYCLES[:4, 0]
    pairs = torch.utils.data.TensorDataset(CYCLES[:4], labels)
    expected = found.evaluate(CYCLES[:4], labels=labels, seed=1).nats
    assert torch.equal(found.evaluate(pairs, seed=1).nats, expected)
    assert not torch.equal(found.evaluate(pairs, labels=False, seed=1).nats, expected)


def test_a_checkpoint_is_shown_in_three_lines() -> None:
    found = fit(options={**SMALL, "process.kind": "absorbing"})
    parameters = sum(weight.numel() for weight in found.model.parameters())
    assert repr(found) == (
        f"Checkpoint(DiT with {parameters:,} parameters,\n  Posterior(Absorbing(5, Linear()), offset='exact'),\n"
        "  sequence data (length 12, vocab 5), step 4 of m2s-offset)"
    )
    html = found._repr_html_()
    assert html.startswith("<table>") and "Absorbing(5, Linear()), offset=&#x27;exact&#x27;" in html
    assert "data not described" in repr(m2s.Checkpoint(found.model, found.head))


def test_the_seed() -> None:
    assert equal(fit(seed=5), fit(seed=5)) and not equal(fit(seed=5), fit(seed=6))
    torch.manual_seed(1)
    one, two = fit(seed=None), fit(seed=None)
    torch.manual_seed(1)
    again = fit(seed=None)
    assert equal(one, again) and not equal(one, two)
    assert equal(one, fit(seed=one.config["extra"]["seed"]))


def test_a_run_in_a_folder_resumes(tmp_path: Path) -> None:
    first = fit(out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["config"]["run"]["steps"] == 4
    assert equal(first, fit(out=tmp_path / "run"))
    with pytest.raises(UserError, match=r'other data.*another out, or options=."other_data": True. to continue'):
        fit((CYCLES + 1) % 5, out=tmp_path / "run")
    with pytest.raises(UserError, match=r'seed was 3 and is now 4. Give another out, with options=."init": .*run". to start'):
        fit(seed=4, out=tmp_path / "run")


def test_nothing_is_left_behind_and_the_vocabulary_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit()  # torch makes its own cache of kernels in the process's first run
    capsys.readouterr()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    fit()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""
    fit(progress=True)
    said = capsys.readouterr().err
    assert "m2s.fit: 5 tokens, inferred" in said and "step 4" in said
    assert "54 examples for training, 6 held out for validation, chosen at random; give validation_x=" in said
    fit(progress=True, vocab=7, validation_x=CYCLES[:9])
    said = capsys.readouterr().err
    assert "inferred" not in said and "60 examples for training, 9 held out for validation\n" in said


def test_nothing_is_printed_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the time per step, which is known after some steps, nor that a run resumes."""
    monkeypatch.setattr("m2s.training.step_time.Pace.SECONDS", 0.0)
    fit(steps=8, out=tmp_path / "run")
    fit(steps=8, out=tmp_path / "run")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.rand(4, 3)}, "must hold integers"),
        ({"steps": 0}, "steps is 0"),
        ({"method": "m3s"}, "m3s"),
        ({"size": "huge"}, "huge"),
        ({"vocab": 2}, "vocab is 2"),
        ({"options": {"network.widht": 3}}, "options is 'network.widht'.*did you mean network.width"),
        ({"options": {"nothing": 3}}, "nothing"),
        ({"options": {"network": {"width": 3}}}, "options is 'network', but there is no such value"),
        ({"options": {"micro_batch": 7}}, "micro_batch is 7, but it must be a divisor of batch = 8"),
        ({"lr": -1.0}, "^lr is -1.0"),
        ({"options": {"optimizer.lr": -1.0}}, "^optimizer.lr is -1.0"),
        ({"size": "huge"}, "^size is 'huge'"),
        ({"x": CYCLES[:1]}, "Or give validation_x"),
        ({"device": "tpu"}, "tpu"),
        ({"seed": -1}, "seed is -1"),
        ({"x": Sequences(CYCLES), "vocab": 5}, "has its own vocabulary"),
    ],
)
def test_errors_come_before_anything_is_written(given: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, TypeError), match=message):
        fit(**{"out": tmp_path / "run", **given})
    assert not (tmp_path / "run").exists()


def test_advice_names_arguments_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2s.training.estimate.available_memory", lambda device: 2**20)
    with pytest.raises(UserError, match=r'options=."on_low_memory": "warn". starts anyway') as raised:
        fit(batch=512)
    assert "--" not in str(raised.value)


def test_a_run_that_diverges_names_arguments_of_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `out` nothing is kept, and no temporary folder is named."""
    with pytest.raises(Diverged, match=r"^at step \d+ the loss is ") as raised:
        fit(steps=20, lr=1e30, progress=True)
    advised = '. Lower lr, or give options={"on_nan": "skip"} to skip such steps'
    assert str(raised.value).endswith(advised) and "saved" not in str(raised.value) and "m2s-fit" not in str(raised.value)
    assert "20 steps of 8\n" in capsys.readouterr().err
    with pytest.raises(Diverged) as raised:
        fit(steps=20, lr=1e30, out=tmp_path / "run")
    kept = f" (the full batch is in {tmp_path / 'run' / 'nan.json'}). The state before it is saved{advised}"
    assert str(raised.value).endswith(kept) and (tmp_path / "run" / "nan.json").is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("give --micro-batch 8, which fits", 'give options={"micro_batch": 8}, which fits'),
        ("(--network.size tiny, or --network.width)", """(size='tiny', or options["network.width"])"""),
        ("--recompute --micro-batch 1 still", 'options={"recompute": True, "micro_batch": 1} still'),
        ("set --out to a folder on a file system with locks", "set out to a folder on a file system with locks"),
        ("set --t-min to at most that, or make", 'set options["t_min"] to at most that, or make'),
        ("--unknown 3 stays", "--unknown 3 stays"),
    ],
)
def test_options_in_messages(text: str, expected: str) -> None:
    from m2s.training.python_options import rewrite_options

    assert rewrite_options(text) == expected


@contextmanager
def interrupted_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C while the update of a step is computed."""
    from m2s.training.trainer import Trainer

    original = Trainer.update_weights

    def interrupt(self: Trainer, *given: object) -> object:
        if self.progress.step == step:
            signal.raise_signal(signal.SIGINT)
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update_weights", interrupt)
        yield


def test_ctrl_c_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupted_at(1, monkeypatch), pytest.raises(KeyboardInterrupt, match="the same call resumes"):
        fit(out=tmp_path / "run")
    assert equal(fit(out=tmp_path / "run"), fit())


def test_ctrl_c_without_a_folder_does_not_promise_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupted_at(1, monkeypatch), pytest.raises(KeyboardInterrupt, match="give out= to be able to resume"):
        fit(progress=True)
    said = capsys.readouterr().err
    assert "saved" not in said and "resumes" not in said


def test_the_same_call_without_a_seed_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn seed is read from the folder: the held-out examples, the weights and the noise are those of the first call."""
    first = fit(out=tmp_path / "done", seed=None)
    assert equal(first, fit(out=tmp_path / "done", seed=None))
    with interrupted_at(1, monkeypatch), pytest.raises(KeyboardInterrupt, match="the same call resumes"):
        fit(out=tmp_path / "stopped", seed=None)
    seed = json.loads((tmp_path / "stopped" / "train.json").read_text())["config"]["run"]["seed"]
    resumed = fit(out=tmp_path / "stopped", seed=None)
    assert resumed.config["extra"]["seed"] == seed != first.config["extra"]["seed"]
    assert equal(resumed, fit(seed=seed))


def test_it_is_a_function_with_annotations() -> None:
    signature = inspect.signature(m2s.fit)
    assert signature.parameters["method"].default == "m2s-offset" and signature.return_annotation is m2s.Checkpoint
    assert m2s.fit is m2s.training.fit and "fit" in dir(m2s) and "fit" in dir(m2s.training)


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the images of digits, saved without a folder of its run."""
    options = {"network.width": 8, "network.multipliers": (1,), "network.layers": 1}
    checkpoint = fit(m2s.data.load("digits"), steps=2, options=options)
    return checkpoint.save(tmp_path_factory.mktemp("fit") / "digits")


def test_a_data_set_is_described_as_m2s_train_describes_it(digits_folder: Path) -> None:
    digits = m2s.data.load("digits")
    checkpoint, record = m2s.load(digits_folder), json.loads((digits_folder / "train.json").read_text())
    assert checkpoint.data == digits.description == {"kind": "image", "shape": [8, 8], "levels": 17}
    assert record["config"]["data"]["name"] == "digits"
    assert record["data"]["rows"] == len(digits.train) == 1541 and record["data"]["sha256"] == digits.fingerprint
    assert record["config"]["optimizer"]["lr"] == 2e-3  # as the preset digits has it
    assert isinstance(checkpoint.model, m2s.models.UNet) and checkpoint.config["model"]["classes"] is None
    steps = [json.loads(line)["step"] for line in (digits_folder / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2]  # each step, and the validation


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("sample {run} --n 2 --steps 2 --out {out}/a.png", "a.png"),
        ("evaluate bpd {run} --limit 16 --passes 1 --out {out}/bpd.json", "bpd.json"),
        ("figure film --source {run} --out {out}/film.png", "film.png"),
        ("compare {run} --against digits:train --n 8 --steps 2 --out {out}/compare", "compare/compare.json"),
        ("report {run} --out {out}/report.html", "report.html"),
    ],
)
def test_the_commands_read_a_saved_checkpoint_of_a_data_set(
    command: str, written: str, digits_folder: Path, tmp_path: Path
) -> None:
    from m2s.cli import main

    main(command.format(run=digits_folder, out=tmp_path).split())
    assert (tmp_path / written).stat().st_size > 0


def test_a_saved_record_does_not_replace_that_of_a_run(tmp_path: Path) -> None:
    fit(out=tmp_path / "run")
    before = (tmp_path / "run" / "train.json").read_bytes()
    other = fit(seed=4)
    other.save(tmp_path / "run")
    assert (tmp_path / "run" / "train.json").read_bytes() == before != other.run_files["train.json"]
    assert not (other.save_pretrained(tmp_path / "shared") / "train.json").exists()  # it names the machine


def test_labels_of_a_data_set_are_used_on_request() -> None:
    digits = m2s.data.load("digits")
    options = {"network.width": 8, "network.multipliers": (1,), "network.layers": 1}
    found = fit(digits, steps=1, labels=True, options=options)
    assert found.config["model"]["classes"] == 10
    with pytest.raises(UserError, match="labels=True"):
        fit(digits, steps=1, labels=digits.train_labels)


def test_images_that_a_u_net_cannot_halve_get_a_transformer() -> None:
    images = torch.randint(0, 3, (12, 35), dtype=torch.uint8)
    labels = torch.zeros(12, dtype=torch.int64)
    odd = m2s.data.ImageDataset("odd", images[:8], labels[:8], images[8:], labels[8:], (5, 7), 3)
    assert isinstance(fit(odd, steps=1, options=SMALL).model, m2s.models.DiT)
