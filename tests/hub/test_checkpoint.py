"""Checkpoints: saving and loading is bit-exact, damage is reported, and a killed save destroys nothing."""

import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import m2s
from m2s import hub
from m2s.data.tokenizer import GPT2, Bytes, Characters
from m2s.heads import NextToken, Shifted
from m2s.hub import folder as files
from m2s.hub.config import saved_classes
from m2s.models import DiT, DiTConfig, UNet, UNetConfig
from merges import write_merges

K = 5
matrix = torch.tensor([[-1.0, 0.25, 0.75], [0.1, -0.1, 0.0], [0.3, 0.4, -0.7]], dtype=torch.float64)
SCHEDULES: list[m2s.Schedule] = [
    m2s.Linear(),
    m2s.Exponential(horizon=1 / 3),
    m2s.LogLinear(eps=1e-5),
    m2s.Geometric(sigma_min=1e-4, sigma_max=20.0),
    m2s.GeometricRate(sigma_max=6.2, base=50.0),
    m2s.Cosine(),
    m2s.Rescaled(m2s.Cosine(), eps=1e-4),
]
PROCESSES: list[m2s.Process] = [
    *(m2s.Uniform(K, schedule) for schedule in SCHEDULES),
    m2s.Absorbing(K, m2s.Cosine()),
    m2s.Hybrid(K, p_uniform=0.1),
    m2s.RateMatrix(matrix, m2s.Exponential(horizon=2.5)),
    m2s.RateMatrix.absorbing(K, m2s.LogLinear()),
    m2s.Chain.gaussian(K, torch.linspace(0.02, 0.5, 6)),
    m2s.Chain.absorbing(K, torch.linspace(0.02, 0.5, 6), dtype=torch.float64),
    Shifted(K),
]
uniform = m2s.Uniform(K, m2s.Linear())
HEADS: list[m2s.Head] = [
    *(m2s.Posterior(process) for process in PROCESSES),
    m2s.Posterior(uniform, offset="exact"),
    m2s.LogScore(m2s.RateMatrix(matrix, m2s.Linear())),
    m2s.FactorizedRate(uniform),
    NextToken(Shifted(K)),
    m2s.Ordinal(uniform, offset="none"),
    m2s.Ordinal(m2s.Chain.gaussian(K, torch.linspace(0.02, 0.5, 6))),
    m2s.Projected(m2s.LogScore(uniform)),
]


def tensors_of(process: m2s.Process) -> list[Tensor]:
    return [value for value in vars(process).values() if isinstance(value, Tensor)]


def same(one: m2s.Head, other: m2s.Head) -> bool:
    tensors = zip(tensors_of(one.process), tensors_of(other.process), strict=True)
    return repr(one) == repr(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)


# --- descriptions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_head_from_its_description(head: m2s.Head) -> None:
    tensors: dict[str, Tensor] = {}
    description = json.loads(json.dumps(hub.to_dict(head, tensors)))
    assert all(name.startswith("process.") for name in tensors)
    assert same(hub.from_dict(description, tensors), head)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_schedule_from_its_description(schedule: m2s.Schedule) -> None:
    assert hub.from_dict(hub.to_dict(schedule)) == schedule


def test_all_registered_classes_are_tested() -> None:
    tested = {type(value) for value in (*SCHEDULES, *PROCESSES, *HEADS)}
    assert set(saved_classes().values()) == tested
    assert all(name == cls.__name__ for name, cls in saved_classes().items())


# --- round trips -----------------------------------------------------------------------------------------------------------


def network(states: int = K, **options: Any) -> DiT:
    model = DiT(DiTConfig(states, **{"width": 16, "depth": 1, "heads": 2, "condition_width": 8, **options}))
    return shaken(model)


def shaken(model: Any) -> Any:
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dit": network,
    "dit, time-free, causal": lambda: network(time=False, causal=True),
    "dit, classes": lambda: network(classes=3, length=8),
    "dit, sigma as its clock": lambda: network(clock=m2s.Geometric(sigma_min=1e-4, sigma_max=20.0)),
    "dit, by sigma": lambda: network(clock=m2s.LogLinear()),
    "dit, bfloat16": lambda: network().bfloat16(),
    "dit, float64": lambda: network().double(),
    "unet": lambda: shaken(UNet(UNetConfig(K, (2, 4), width=8, multipliers=(1, 2), layers=1))),
    "unet, classes": lambda: shaken(UNet(UNetConfig(K, (2, 2, 2), width=8, multipliers=(1,), layers=1, classes=3))),
}


def identical(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", MODELS)
def test_saving_a_network_is_bit_exact(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    hub.save(tmp_path, model, m2s.Posterior(uniform))
    loaded = hub.load(tmp_path).model
    assert identical(loaded, model)
    assert loaded.config == model.config
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    if "float" not in name:
        x, t = torch.randint(K, (3, 8)), torch.rand(3)
        assert torch.equal(loaded(x, t), model.eval()(x, t))


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_saving_a_head_is_bit_exact(head: m2s.Head, tmp_path: Path) -> None:
    hub.save(tmp_path, network(head.process.states), head)
    assert same(hub.load(tmp_path).head, head)


def test_data_tokenizer_and_extra_are_saved(tmp_path: Path) -> None:
    text, image = {"kind": "text", "length": 128}, {"kind": "image", "shape": [8, 8], "levels": 5}
    head = m2s.Posterior(m2s.Absorbing(257, m2s.Linear()))
    hub.save(tmp_path / "text", network(258), head, data=text, tokenizer=Bytes(), extra={"step": 7})
    checkpoint = hub.load(tmp_path / "text")
    assert checkpoint.data == text
    assert checkpoint.tokenizer == Bytes()
    assert checkpoint.config["extra"] == {"step": 7}
    assert checkpoint.config["m2s"] == m2s.__version__
    model, head = checkpoint
    assert model is checkpoint.model
    assert head is checkpoint.head
    hub.save(tmp_path / "image", network(), m2s.LogScore(uniform), data=image)
    assert hub.load(str(tmp_path / "image")).data == image
    assert hub.load(tmp_path / "image").tokenizer is None


def test_gpt2_merges_are_needed_only_for_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = m2s.Posterior(m2s.Uniform(50_257, m2s.Linear()))
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    hub.save(tmp_path, network(50_257, width=4), head, tokenizer=GPT2())
    tokenizer = hub.load(tmp_path).tokenizer
    assert tokenizer is not None
    with pytest.raises(FileNotFoundError, match="GPT-2's merges are not at"):
        tokenizer.encode("a")


def test_gpt2_merges_are_copied_into_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved checkpoint encodes text as before, and contains no path of the machine that wrote it."""
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "nothing"))
    given = GPT2(str(write_merges(tmp_path / "given" / "merges.txt")))
    hub.save(tmp_path / "run", network(50_257, width=4), m2s.Posterior(m2s.Uniform(50_257, m2s.Linear())), tokenizer=given)
    ids = given.encode("a word of text")
    shutil.rmtree(tmp_path / "given")
    (tmp_path / "run").rename(tmp_path / "moved")
    found = hub.load(tmp_path / "moved").tokenizer
    assert found is not None and found.encode("a word of text") == ids and found.decode(ids) == "a word of text"
    assert str(tmp_path) not in (tmp_path / "moved" / "config.json").read_text()


def test_a_checkpoint_is_two_files(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("kept")
    hub.save(tmp_path, network(), m2s.Posterior(uniform))
    hub.save(tmp_path, network(), m2s.Posterior(uniform))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "log.txt", "model.safetensors"]
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    hub.save(tmp_path, network(), m2s.Posterior(uniform))
    before = torch.random.get_rng_state()
    hub.load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


# --- a killed save ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("call", range(16))
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, again: bool
) -> None:
    """The process is killed before or after the n-th disk operation, and in some cases once more in the next save."""
    old, new, newer = network(), network(width=8), network(width=12)
    hub.save(tmp_path, old, m2s.Posterior(uniform), extra={"step": 1})

    def killed_save(model: nn.Module, step: int, at: int) -> bool:
        done = 0

        def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                nonlocal done
                if done == at:
                    raise Killed
                done += 1
                value = function(*arguments, **options)
                if done == at:
                    raise Killed
                done += 1
                return value

            return run

        with monkeypatch.context() as patch:
            patch.setattr(files, "save_file", mortal(save_file))
            patch.setattr(os, "replace", mortal(os.replace))
            patch.setattr(os, "fsync", mortal(os.fsync))
            patch.setattr(Path, "write_text", mortal(Path.write_text))
            try:
                hub.save(tmp_path, model, m2s.Posterior(uniform), extra={"step": step})
            except Killed:
                return True
        return False

    allowed = {1: old, 2: new}
    assert killed_save(new, 2, call)
    if again:
        found = hub.load(tmp_path).config["extra"]["step"]
        killed_save(newer, 3, (5 * call) % 16)
        allowed = {found: allowed[found], 3: newer}
    checkpoint = hub.load(tmp_path)
    assert identical(checkpoint.model, allowed[checkpoint.config["extra"]["step"]])
    hub.save(tmp_path, old, m2s.Posterior(uniform), extra={"step": 4})
    assert identical(hub.load(tmp_path).model, old)
    assert len(list(tmp_path.iterdir())) == 2


# --- errors ----------------------------------------------------------------------------------------------------------------


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        contents = json.loads((folder / "config.json").read_text())
        change(contents)
        (folder / "config.json").write_text(json.dumps(contents))

    return damage


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        contents = load_file(folder / "model.safetensors")
        change(contents)
        save_file(contents, folder / "model.safetensors")

    return damage


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def shrink(tensors: dict[str, Tensor]) -> None:
    tensors["model.head.bias"] = tensors["model.head.bias"][:5]


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "holds no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, "but no model.safetensors"),
    "config cut short": (cut("config.json", 100), ValueError, r"config\.json is damaged: .*line"),
    "config is not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x80"), ValueError, r"config\.json is damaged"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), ValueError, 'does not say its "format"'),
    "config of something else": (lambda f: (f / "config.json").write_text("{}"), ValueError, 'does not say its "format"'),
    "weights cut short": (cut("model.safetensors", 2000), ValueError, r"model\.safetensors is damaged or cut short"),
    "weights cut shorter": (cut("model.safetensors", 4), ValueError, r"model\.safetensors is damaged or cut short"),
    "weights empty": (cut("model.safetensors", 0), ValueError, r"model\.safetensors is damaged or cut short"),
    "newer format": (config(lambda c: c.update(format=99, m2s="9.0")), ValueError, r"has format 99 \(m2s 9\.0\), .* newer m2s"),
    "no model": (config(lambda c: c.pop("model")), ValueError, "does not describe the model"),
    "unknown network": (
        config(lambda c: c["model"].update(kind="mlp")),
        ValueError,
        r"'mlp', .* dit, unet, md4-transformer; register a network of your own",
    ),
    "unknown setting": (config(lambda c: c["model"].update(layers=3)), ValueError, "dit has no setting layers"),
    "unknown head": (config(lambda c: c["head"].update(kind="Tail")), ValueError, r"kind is 'Tail', .* Posterior, .*LogScore"),
    "a process in place of a head": (
        config(lambda c: c.update(head=c["head"]["process"])),
        ValueError,
        "head must be .* RateMatrix",
    ),
    "a process in place of a clock": (
        config(lambda c: c["model"].update(clock={"kind": "Hybrid", "vocab": 3, "p_uniform": 0.5})),
        ValueError,
        r"clock must be None or a schedule such as m2s\.LogLinear\(\), not Hybrid",
    ),
    "missing argument": (config(lambda c: c["head"].pop("offset")), ValueError, "must hold process, offset, but offset"),
    "unknown tokenizer": (
        config(lambda c: c.update(tokenizer={"kind": "Words"})),
        ValueError,
        r"'Words', .* Characters",
    ),
    "wrong vocabulary": (config(lambda c: c["model"].update(states=4)), ValueError, "network has 4 states, but .* has 3"),
    "wrong tokenizer": (
        config(lambda c: c.update(tokenizer={"kind": "Bytes"})),
        ValueError,
        "tokenizer has 257 tokens, but .* has 3",
    ),
    "missing matrix": (weights(lambda w: w.pop("process.rates")), ValueError, r"names a tensor process\.rates, which is not"),
    "missing tensor": (weights(lambda w: w.pop("model.head.bias")), ValueError, r"does not fit .*: head\.bias is missing"),
    "unexpected tensor": (weights(lambda w: w.update({"model.tail": torch.ones(1)})), ValueError, "tail is unexpected"),
    "foreign tensor": (weights(lambda w: w.update({"tail": torch.ones(1)})), ValueError, "tail is unexpected"),
    "mis-shaped tensor": (weights(shrink), ValueError, r"head\.bias has shape \[5\], expected \[64\]"),
    "other depth": (config(lambda c: c["model"].update(depth=3)), ValueError, r"blocks\.1\.\S+ is missing; .* and \d+ more"),
}


@pytest.mark.usefixtures("without_shape_hook")
@pytest.mark.parametrize("name", DAMAGE)
def test_errors_name_the_damage(name: str, tmp_path: Path) -> None:
    damage, kind, message = DAMAGE[name]
    hub.save(tmp_path, network(3), m2s.Posterior(m2s.RateMatrix(matrix, m2s.Linear())))
    damage(tmp_path)
    with pytest.raises(kind, match=message) as error:
        hub.load(tmp_path)
    assert str(tmp_path) in str(error.value)


class Unknown(m2s.Linear):
    """A schedule that is not registered."""


CANNOT_BE_SAVED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "another network": (lambda f: hub.save(f, nn.Linear(2, 2), m2s.Posterior(uniform)), TypeError, "model is a Linear"),
    "no network": (lambda f: hub.save(f, None, m2s.Posterior(uniform)), TypeError, "model must be a network"),
    "no head": (lambda f: hub.save(f, network(), uniform), TypeError, "head must be a head"),
    "unknown schedule": (
        lambda f: hub.save(f, network(), m2s.Posterior(m2s.Uniform(K, Unknown()))),
        TypeError,
        "Unknown is not registered, .* registered are Linear",
    ),
    "other states": (lambda f: hub.save(f, network(7), m2s.Posterior(uniform)), ValueError, "7 states, but .* has 5"),
    "other tokens": (
        lambda f: hub.save(f, network(), m2s.Posterior(uniform), tokenizer=Characters()),
        ValueError,
        "tokenizer has 27 tokens, but .* has 5",
    ),
    "data that JSON cannot hold": (
        lambda f: hub.save(f, network(), m2s.Posterior(uniform), data={"shape": torch.Size}),
        TypeError,
        "data and extra must hold what JSON can",
    ),
    "a matrix without a place": (
        lambda f: hub.to_dict(m2s.RateMatrix(matrix, m2s.Linear())),
        ValueError,
        "rates is a matrix, .* `tensors`",
    ),
    "not a description": (lambda f: hub.from_dict("Linear"), TypeError, "a description must be a dictionary"),
}


@pytest.mark.usefixtures("without_shape_hook")
@pytest.mark.parametrize("name", CANNOT_BE_SAVED)
def test_invalid_saves_raise_before_anything_is_written(name: str, tmp_path: Path) -> None:
    call, kind, message = CANNOT_BE_SAVED[name]
    with pytest.raises(kind, match=message):
        call(tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- the Hugging Face hub --------------------------------------------------------------------------------------------------


class FakeHub(types.ModuleType):
    """Repositories are folders under `root`."""

    def __init__(self, root: Path) -> None:
        super().__init__("huggingface_hub")
        self.root = root

    def create_repo(self, repo: str, private: bool, exist_ok: bool) -> str:
        (self.root / repo).mkdir(parents=True, exist_ok=exist_ok)
        return f"https://huggingface.co/{repo}"

    def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str]) -> None:
        for name in allow_patterns:
            if (folder_path / name).exists():
                (self.root / repo_id / name).write_bytes((folder_path / name).read_bytes())

    def snapshot_download(self, repo: str, allow_patterns: list[str]) -> str:
        if not (self.root / repo).exists():
            raise ConnectionError("offline")
        return str(self.root / repo)


def test_push_and_load_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    model = network()
    hub.save("run", model, m2s.Posterior(uniform))
    (tmp_path / "run" / "secret.txt").write_text("stays here")
    assert hub.push("run", "someone/model") == "https://huggingface.co/someone/model"
    assert not (tmp_path / "hub" / "someone" / "model" / "secret.txt").exists()
    assert identical(hub.load("someone/model").model, model)
    with pytest.raises(ValueError, match='repo is "model", but it must be "owner/name"'):
        hub.push("run", "model")
    with pytest.raises(FileNotFoundError, match=r"no folder some/where, and the Hugging Face hub cannot be .*offline"):
        hub.load("some/where")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        hub.push("run", "someone/model")


def test_missing_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"there is no folder /no/where/at/all"):
        hub.load("/no/where/at/all")
    with pytest.raises(ImportError, match=r"no folder no/where; if you mean .*: pip install huggingface_hub"):
        hub.load("no/where")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(NotADirectoryError, match=f"is a file, but a checkpoint is a folder: give {tmp_path}"):
        hub.load(tmp_path / "model.safetensors")
