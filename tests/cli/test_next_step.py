"""The command that `m2s data prepare` prints: it runs, and its sizes suit the machine and the text."""

import re
from pathlib import Path

import pytest
import torch

from m2s.cli import main, parse
from m2s.cli.next_step import (
    CPU_BATCH,
    CPU_IMAGE_LOGITS,
    CPU_IMAGE_STEPS,
    CPU_LENGTH,
    CPU_LOGITS,
    CPU_STEPS,
    EPOCHS,
    _image_options,
    _options,
    next_command,
    next_preset_command,
)
from m2s.data import prepare_text
from m2s.data.images import ImageDataset
from m2s.data.source import ImageSource
from m2s.data.tokenizer import Bytes, Characters
from m2s.distributed import World
from m2s.presets import PRESETS
from m2s.training import estimate
from m2s.training.config import resolve

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GPT2 = 50_257


def test_the_printed_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("book.txt").write_text("It was a bright cold day in April. " * 400)
    main(["data", "prepare", "book.txt", "--out", "my text", "--tokenizer", "bytes"])
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("m2s train owt --data.folder 'my text' --data.length 128 --network.size tiny ")
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", printed)]
    words[words.index("--steps") + 1] = "2"
    main(words[1:])
    said = capsys.readouterr()
    assert "runs/my text: 2 steps" in said.out and "memory: about" in said.err
    assert (tmp_path / "runs" / "my text" / "model.safetensors").is_file()


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
@pytest.mark.parametrize("vocab", [27, 257, GPT2])
@pytest.mark.parametrize("train", [200, 10**5, 10**8])
def test_sizes_on_a_cpu(train: int, vocab: int, cores: int) -> None:
    options = _options(vocab, {"train": train, "validation": max(8, train // 100)}, CPU, cores)
    length, batch, steps = (int(options[name]) for name in ("data.length", "batch", "steps"))
    assert length <= min(CPU_LENGTH, max(8, train // 100)) and length & (length - 1) == 0
    assert 1 <= batch <= CPU_BATCH and (batch == 1 or batch * length * vocab <= cores * CPU_LOGITS)
    assert 200 <= steps <= CPU_STEPS and (steps == 200 or steps * batch * length <= EPOCHS * train)
    assert options["network.size"] == "tiny" and 1 <= int(options["optimizer.warmup"]) < steps
    assert int(options["save-every"]) <= steps // 2


def test_sizes_on_a_gpu() -> None:
    few, many = (_options(GPT2, {"train": count, "validation": count // 100}, GPU, 8) for count in (10**6, 9 * 10**9))
    assert few["network.size"] == "tiny" and "network.size" not in many
    assert many["batch"] == PRESETS["owt"].run.batch and many["data.length"] == 512
    assert int(many["steps"]) == EPOCHS * 9 * 10**9 // (1584 * 512)
    assert int(few["steps"]) < 10**5


def test_micro_batches_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_text("x" * 60_000)
    meta = prepare_text(str(tmp_path / "book.txt"), tmp_path / "packed", Bytes(), 0.01)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(estimate, "available_memory", lambda device: 2.0**37)
    assert "--micro-batch" not in next_command(tmp_path / "packed", meta)
    monkeypatch.setattr(estimate, "available_memory", lambda device: 2.0**28)
    command = next_command(tmp_path / "packed", meta)
    run = parse(command.split()[1:]).preset.run
    assert run.micro_batch is not None and run.micro_batch < run.batch and run.batch % run.micro_batch == 0


@pytest.mark.parametrize(("name", "shape"), [("mnist", (28, 28)), ("cifar10", (32, 32, 3))])
def test_images_on_a_cpu(name: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset itself needs a terabyte of memory, or days."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(estimate, "available_memory", lambda device: 2.0**34)
    monkeypatch.setenv("M2S_DATA", str(tmp_path))  # sizes are known without the files
    words = next_preset_command(name).split()
    assert words[:3] == ["m2s", "train", name]
    config = parse(words[1:]).preset
    images, labels = torch.zeros(64, *shape, dtype=torch.uint8).flatten(1), torch.zeros(64, dtype=torch.long)
    source = ImageSource(ImageDataset(name, images, labels, images, labels, shape, 256))
    assert config.network.size == "tiny" and config.run.steps == CPU_IMAGE_STEPS < PRESETS[name].run.steps
    assert config.run.batch < PRESETS[name].run.batch and config.optimizer.warmup < config.run.steps
    found = estimate.estimate(resolve(config), source, World(0, 1, CPU))
    assert found.total < 0.5 * 2**34
    assert found.operations < 0.05 * estimate.estimate(resolve(PRESETS[name]), source, World(0, 1, CPU)).operations


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_batches_of_images_on_a_cpu(cores: int) -> None:
    for logits in (784 * 256, 3072 * 256):
        batch = int(_image_options(logits, cores)["batch"])
        assert 1 <= batch <= CPU_BATCH and (batch == 1 or batch * logits <= cores * CPU_IMAGE_LOGITS)


def test_images_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset, in micro-batches where the memory is small."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    monkeypatch.setattr(estimate, "available_memory", lambda device: 2.0**40)
    assert next_preset_command("mnist") == "m2s train mnist"
    monkeypatch.setattr(estimate, "available_memory", lambda device: 2.0**32)
    words = next_preset_command("mnist").split()
    assert words[:4] == ["m2s", "train", "mnist", "--micro-batch"] and len(words) == 5
    assert PRESETS["mnist"].run.batch % int(words[4]) == 0


def test_text8_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    (tmp_path / "book.txt").write_text("a text of words " * 5_000)
    meta = prepare_text(str(tmp_path / "book.txt"), tmp_path / "text8", Characters(), 0.05)
    assert next_preset_command("text8") == next_command(tmp_path / "text8", meta)
