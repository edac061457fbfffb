"""The command that `m2s data prepare` prints: it runs, and its sizes suit the machine and the text."""

import re
from pathlib import Path

import pytest
import torch

from m2s.cli import main, parse
from m2s.cli.next_step import CPU_BATCH, CPU_LENGTH, CPU_LOGITS, CPU_STEPS, EPOCHS, _options, next_command
from m2s.data import prepare_text
from m2s.data.tokenizer import Bytes
from m2s.presets import PRESETS
from m2s.training import estimate

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
