"""Checkpoints that are damaged or that others wrote: nothing runs, nothing hangs, and the error is one line."""

import json
import pickle
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import m2s
from m2s import hub
from m2s.cli import main
from m2s.cli.sampling_args import load_checkpoint
from m2s.errors import UserError
from m2s.models import DiT, DiTConfig, UNet, UNetConfig

pytestmark = pytest.mark.usefixtures("without_shape_hook")
RATES = torch.tensor([[-1.0, 1, 0], [1, -2, 1], [0, 1, -1]])


def network(**options: Any) -> DiT:
    torch.manual_seed(0)
    model = DiT(DiTConfig(3, **{"width": 16, "depth": 1, "heads": 2, "condition_width": 8, **options}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = m2s.Posterior(m2s.RateMatrix(RATES, m2s.Linear()))
    return hub.save(tmp_path / "run", network(), head, {"kind": "text", "length": 6})


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights, and their checksum too, so that nothing but the change is wrong."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    change_config(folder, lambda config: config.pop("sha256", None))


def command_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command: one line on stderr, exit code 2, no control characters."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("m2s: ") and err.count("\n") == 1 and err[:-1].isprintable()
    return err


# --- values ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["model.head.bias", "model.embedding.weight", "process.rates"])
def test_weights_that_are_not_finite(folder: Path, name: str, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[name].view(-1)[1] = value

    change_weights(folder, change)
    with pytest.raises(ValueError, match=rf"{name.rpartition('model.')[2]}.* NaN or infinity: the training diverged"):
        m2s.load(folder)
    assert "NaN or infinity" in command_error(capsys, "sample", str(folder), "--out", str(folder.parent / "a.npz"))


def test_bf16_and_mixed_weights_are_sampled_by_the_command(folder: Path) -> None:
    samples = {}
    out = folder.parent / "a.npz"
    for name in ("all", "some", "float64"):
        for parameter_name, parameter in (model := network()).named_parameters():
            rounded = parameter.data.bfloat16()
            narrow = name == "all" or (name == "some" and "blocks" in parameter_name)
            parameter.data = rounded if narrow else rounded.double() if name == "float64" else rounded.float()
        hub.save(folder, model, hub.load(folder).head, {"kind": "text", "length": 6})
        main(["sample", str(folder), "--n", "4", "--steps", "3", "--out", str(out), "--overwrite"])
        with np.load(out) as file:
            samples[name] = file["tokens"].tolist()
    assert samples["all"] == samples["some"] == samples["float64"]
    assert {value.dtype for value in m2s.load(folder).model.parameters()} == {torch.float64}


def test_integers_in_place_of_weights(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.head.bias": weights["model.head.bias"].int()}))
    with pytest.raises(ValueError, match=r"head\.bias has dtype torch\.int32, expected torch\.float32"):
        m2s.load(folder)


# --- checksums -------------------------------------------------------------------------------------------------------------


def test_the_command_compares_checksums(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(folder.parent / "a.npz")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-2] ^= 1  # another weight, as finite as before
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors has SHA-256" in command_error(capsys, "sample", str(folder), "--out", out)
    m2s.load(folder)  # the library compares on demand
    with pytest.raises(ValueError, match="it is damaged, or of another save"):
        m2s.load(folder, verify=True)
    for checksums in (5, {"../secret": "0"}, {"model.safetensors": None}):
        change_config(folder, lambda config, checksums=checksums: config.update(sha256=checksums))
        assert "sha" in command_error(capsys, "sample", str(folder), "--out", out).lower()
    change_config(folder, lambda config: config.pop("sha256"))  # as in version 0.1
    main(["sample", str(folder), "--n", "2", "--steps", "1", "--out", out])


def test_the_tokenizer_file_has_a_checksum(tmp_path: Path) -> None:
    from merges import write_merges

    tokenizer = m2s.data.GPT2(str(write_merges(tmp_path / "merges.txt")))
    model = DiT(DiTConfig(tokenizer.vocab, width=4, depth=1, heads=1))
    hub.save(tmp_path / "run", model, m2s.Posterior(m2s.Uniform(tokenizer.vocab, m2s.Linear())), tokenizer=tokenizer)
    m2s.load(tmp_path / "run", verify=True)
    (tmp_path / "run" / "merges.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"merges\.txt has SHA-256"):
        m2s.load(tmp_path / "run", verify=True)


# --- absurd sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10_000_000, 10**12, 10**30, -1, 0, 1.5, "7", None, [3], True])
@pytest.mark.parametrize("kind", ["dit", "unet"])
def test_absurd_networks_are_not_built(tmp_path: Path, kind: str, size: Any) -> None:
    """Every setting of a network, one at a time. What is not an error has no effect on the tensors."""
    head = m2s.Posterior(m2s.Uniform(3, m2s.Linear()))
    model = network() if kind == "dit" else UNet(UNetConfig(3, (2, 4), width=8, multipliers=(1, 2), layers=1))
    hub.save(tmp_path, model, head)
    original = (tmp_path / "config.json").read_text()
    begin = time.monotonic()
    for name in json.loads(original)["model"]:
        (tmp_path / "config.json").write_text(original)
        change_config(tmp_path, lambda config, name=name: config["model"].update({name: size}))
        try:
            loaded = m2s.load(tmp_path).model
        except ValueError:
            continue
        assert [value.shape for value in loaded.parameters()] == [value.shape for value in model.parameters()]
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("size", [10_000_000, 10**12, 10**30, -1, 1.5, "7", None, [], {}])
def test_absurd_processes(folder: Path, size: Any) -> None:
    """Every argument of every process, schedule and head, one at a time."""
    descriptions = [
        hub.to_dict(m2s.Posterior(process), {})
        for process in (
            m2s.Uniform(3, m2s.Geometric(1e-3, 1.0)),
            m2s.Absorbing(2, m2s.LogLinear()),
            m2s.Hybrid(2, p_uniform=0.1),
        )
    ]
    errors: list[str] = []
    begin, original = time.monotonic(), (folder / "config.json").read_text()
    for description in [*descriptions, json.loads(original)["head"]]:
        for part in (description, description["process"], description["process"].get("schedule") or {}):
            for name in part:
                before, part[name] = part[name], size
                (folder / "config.json").write_text(original)
                change_config(folder, lambda config, head=description: config.update(head=head))
                try:
                    m2s.load(folder)
                except ValueError as error:
                    errors.append(str(error))
                part[name] = before
    assert time.monotonic() - begin < 60 and all(str(folder) in error for error in errors)


def test_a_configuration_that_is_nested_too_deeply(folder: Path) -> None:
    for text in ("[" * 100_000, '{"head":' * 100_000, '{"format": 1' + "0" * 10_000 + "}"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            m2s.load(folder)
    head: dict[str, Any] = {"kind": "Linear"}
    for _ in range(900):
        head = {"kind": "Projected", "head": head}
    config = {"format": 1, "model": {"kind": "dit", "states": 3}, "head": head}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="run"):
        m2s.load(folder)


# --- code ------------------------------------------------------------------------------------------------------------------


class Touch:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_executed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pickles and TorchScript in the place of weights, of ours and of SEDD."""
    trap, out = folder.parent / "executed", str(folder.parent / "a.npz")
    torch.save(Touch(trap), folder / "zip.bin")
    torch.save(Touch(trap), folder / "old.bin", _use_new_zipfile_serialization=False)
    (folder / "plain.bin").write_bytes(pickle.dumps(Touch(trap)))
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(folder / "script.bin"))
    sedd = {
        "tokens": 3,
        "graph": {"type": "uniform"},
        "noise": {"type": "loglinear"},
        "model": {
            "hidden_size": 16,
            "n_blocks": 1,
            "n_heads": 2,
            "cond_dim": 8,
            "dropout": 0.0,
            "length": 6,
            "scale_by_sigma": 0,
        },
    }
    other = folder.parent / "sedd"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(sedd))
    change_config(folder, lambda config: config.pop("sha256"))
    for name in ("zip", "old", "plain", "script"):
        shutil.copy(folder / f"{name}.bin", folder / "model.safetensors")
        shutil.copy(folder / f"{name}.bin", other / "pytorch_model.bin")
        for place in (folder, other):
            with pytest.raises(ValueError, match="damaged"):
                m2s.load(place)
            assert "damaged" in command_error(capsys, "sample", str(place), "--out", out)
    assert not trap.exists()


@pytest.mark.parametrize("setting", [("n_blocks", 10_000_000), ("hidden_size", 2**40), ("cond_dim", 10**9), ("n_heads", 0)])
def test_absurd_sizes_of_sedd(tmp_path: Path, setting: tuple[str, int]) -> None:
    model = {"hidden_size": 16, "n_blocks": 1, "n_heads": 2, "cond_dim": 8, "dropout": 0.0, "length": 6, "scale_by_sigma": 0}
    sedd = {
        "tokens": 3,
        "graph": {"type": "uniform"},
        "noise": {"type": "loglinear"},
        "model": {**model, setting[0]: setting[1]},
    }
    (tmp_path / "config.json").write_text(json.dumps(sedd))
    save_file({"vocab_embed.embedding": torch.zeros(3, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=str(tmp_path)):
        m2s.load(tmp_path)


# --- links and names -------------------------------------------------------------------------------------------------------


def test_nothing_is_written_through_links(folder: Path) -> None:
    """A folder from others has links in the places of the files that a save writes."""
    secret = folder.parent / "secret"
    secret.write_text("unchanged")
    for name in ("config.json.new", "model.safetensors.new", "merges.txt", "tokenizer.json"):
        (folder / name).symlink_to(secret)
    hub.save(folder, network(), m2s.Posterior(m2s.Uniform(3, m2s.Linear())))
    assert secret.read_text() == "unchanged"
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    hub.save(folder, network(), m2s.Posterior(m2s.Uniform(3, m2s.Linear())))
    assert secret.read_text() == "unchanged" and not (folder / "config.json").is_symlink()
    m2s.load(folder, verify=True)


def test_a_configuration_cannot_name_other_files(folder: Path) -> None:
    """A tokenizer is read from the folder of its checkpoint, not from a path that the configuration names."""
    (folder.parent / "tokenizer.json").write_text("{}")
    for place in (str(folder.parent), str(folder.parent / "tokenizer.json"), "../tokenizer.json"):
        described = {"kind": "HuggingFace", "path": place, "size": 3}
        change_config(folder, lambda config, described=described: config.update(tokenizer=described))
        assert m2s.load(folder).tokenizer.path is None


def test_control_characters_are_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in the configuration and in the file of weights do not reach the terminal as they are."""
    bad, out = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r\n", str(folder.parent / "a.npz")
    original = (folder / "config.json").read_text()
    for change in (
        lambda config: config["model"].update({bad: 1}),
        lambda config: config["model"].update(kind=bad),
        lambda config: config["head"].update({bad: 1}),
        lambda config: config.update(format=99, m2s=bad),
        lambda config: config.update(tokenizer={"kind": bad}),
        lambda config: config.update(sha256={"model.safetensors": bad}),
    ):
        (folder / "config.json").write_text(original)
        change_config(folder, change)
        command_error(capsys, "sample", str(folder), "--out", out)
    (folder / "config.json").write_text(original)
    change_weights(folder, lambda weights: weights.update({"model." + bad: torch.ones(1)}))
    assert "\\x1b" in command_error(capsys, "sample", str(folder), "--out", out)


# --- mutations -------------------------------------------------------------------------------------------------------------


def with_header(content: bytes, change: Callable[[dict[str, Any]], object] | None, text: bytes | None = None) -> bytes:
    """A safetensors file with another header."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if change is not None:
        change(header)
    new = json.dumps(header).encode() if text is None else text
    return struct.pack("<Q", len(new)) + new + content[8 + length :]


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One of fourteen kinds of damage, at a random place."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    other = rng.choice([key for key in header if key != "__metadata__"])
    number = rng.choice([0, 1, -1, 7, 2**31, 2**63, 2**64, 10**30, 0.5, "3", None, [], True])
    flipped = bytearray(content)
    for _ in range(rng.randrange(1, 9)):
        flipped[rng.randrange(8 + length)] = rng.randrange(256)

    def set_offsets(header: dict[str, Any]) -> None:
        header[name]["data_offsets"][rng.randrange(2)] = number

    def set_shape(header: dict[str, Any]) -> None:
        shape = header[name]["shape"]
        header[name]["shape"] = rng.choice(
            [[], [number], [*shape, 1], [*shape, 0], shape[:-1], number, shape[::-1], [2**62, 4]]
        )

    raw = content[8 : 8 + length]
    cases: list[Callable[[], bytes]] = [
        lambda: content[: rng.randrange(len(content))],
        lambda: content + bytes(rng.randrange(1, 100)),
        lambda: struct.pack("<Q", rng.choice([0, 1, 2**20, 2**40, 2**63, 2**64 - 1, length - 1, length + 1])) + content[8:],
        lambda: bytes(flipped),
        lambda: with_header(content, set_offsets),
        lambda: with_header(content, lambda h: h[name].update(data_offsets=h[other]["data_offsets"])),
        lambda: with_header(content, lambda h: h[name].update(dtype=rng.choice(["F4", "", 3, None, "F8_E8M0", "I32", "U64"]))),
        lambda: with_header(content, set_shape),
        lambda: with_header(content, lambda h: h[name].pop(rng.choice(["dtype", "shape", "data_offsets"]))),
        lambda: with_header(content, lambda h: h.update({name: number})),
        lambda: with_header(content, None, raw[:10] + rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80"]) + raw[10:]),
        lambda: with_header(content, None, raw.rstrip()[:-1] + f", {json.dumps(name)}: {json.dumps(header[other])}}}".encode()),
        lambda: with_header(content, None, rng.choice([b"", b"[]", b"{}", b"null", b"[" * 50_000, b"{" * 9, b'{"a":NaN}'])),
        lambda: with_header(content, lambda h: h.update({"model." + "x" * rng.randrange(2000): h.pop(name)})),
    ]  # fmt: skip
    return rng.choice(cases)()


def test_mutated_weights_give_one_line(folder: Path) -> None:
    """400 damaged files: the network of the file, or a ValueError of one line; never another exception."""
    rng, content = random.Random(19), (folder / "model.safetensors").read_bytes()
    change_config(folder, lambda config: config.pop("sha256"))
    errors = []
    for _ in range(400):
        (folder / "model.safetensors").write_bytes(mutate(content, rng))
        try:
            load_checkpoint(str(folder))
        except UserError as error:
            errors.append(str(error))
    assert len(errors) > 300 and all(error.isprintable() and len(error) < 2000 for error in errors)


def test_mutated_configurations_give_one_line(folder: Path) -> None:
    """300 damaged config.json: a network, or a UserError of one line."""
    rng, content = random.Random(20), (folder / "config.json").read_text()
    values = [None, True, -1, 0, 2**70, 1e308, "x", "\x1b[2J", [], {}, [1, 2], {"kind": "Linear"}]
    errors = []
    for case in range(300):
        config = json.loads(content)
        place = config
        while isinstance(place, dict) and place:
            key = rng.choice(list(place))
            if not isinstance(place[key], dict) or rng.random() < 0.3:
                place[key] = rng.choice(values) if rng.random() < 0.7 else place.pop(key)
                break
            place = place[key]
        text = json.dumps(config)
        if case % 5 == 0:
            at = rng.randrange(len(content))
            text = content[:at] + chr(rng.randrange(1, 256)) + content[at + 1 :]
        (folder / "config.json").write_text(text)
        try:
            load_checkpoint(str(folder))
        except UserError as error:
            errors.append(str(error))
    assert len(errors) > 100 and all(error.isprintable() and len(error) < 2000 for error in errors)
