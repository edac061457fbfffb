"""Checkpoints with pickled objects: they are read without importing or calling what they name, and without trusting sizes."""

import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import m2s
from m2s.cli.sampling_args import load_checkpoint
from m2s.errors import UserError
from m2s.hub.formats.base import read_yaml
from m2s.hub.formats.sedd import read_run
from m2s.hub.pickles import MAX_PICKLE, StoredTensor, Stub, plain, read_stubbed, read_tensors
from plain_networks import class_named, dit_shapes, random_tensors, save_lightning
from test_mdlm import hub_config, lightning_config, write_hub

pytestmark = pytest.mark.usefixtures("without_shape_hook")


def archive(path: Path, data: bytes, storages: dict[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> Path:
    """A zip file as torch.save writes it, with any pickle."""
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", "little")
        for key, value in (storages or {}).items():
            file.writestr(f"archive/data/{key}", value)
    return path


# --- what is read ----------------------------------------------------------------------------------------------------------


def test_tensors_are_those_that_were_saved(tmp_path: Path) -> None:
    """Dtypes, views, shared storages, parameters and containers."""
    base = torch.arange(24.0)
    saved = {
        "views": [base.view(4, 6).T, base[3:9], base.view(2, 3, 4)[:, 1]],
        "dtypes": [torch.arange(5).to(kind) for kind in (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool)],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "state": OrderedDict(a=torch.ones(2)),
        "other": (None, True, 1, 2.5, "text", b"\x00\xff", {1, 2}, 1 << 80, torch.Size([2, 3])),
    }
    torch.save(saved, tmp_path / "a.pt")
    found = read_stubbed(tmp_path / "a.pt")
    for name in ("views", "dtypes"):
        for one, wanted in zip(found[name], saved[name], strict=True):
            assert torch.equal(one.read(), wanted) and one.read().dtype == wanted.dtype
    for name in ("parameter", "scalar", "empty"):
        assert torch.equal(found[name].read(), saved[name].detach())
    assert torch.equal(read_tensors(tmp_path / "a.pt", found["state"])["a"], torch.ones(2))
    *values, size = found["other"]
    assert tuple(values) == saved["other"][:-1]
    assert isinstance(size, Stub) and size.name == "torch.Size" and size.arguments == ((2, 3),)


def test_objects_become_stubs(tmp_path: Path) -> None:
    with class_named("authors.model", "Thing") as thing:
        made = thing()
        made.number = 3
        torch.save({"thing": made}, tmp_path / "a.pt")
    found = read_stubbed(tmp_path / "a.pt")["thing"]
    assert found.name == "authors.model.Thing" and found.state == {"number": 3}
    assert "authors" not in sys.modules and plain(found) is None


# --- what is not run -------------------------------------------------------------------------------------------------------


class Call:
    """A pickle that calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def test_nothing_is_called(tmp_path: Path) -> None:
    """Functions of Python, of torch and of an importable module: in the configuration, in the state, and alone."""
    trap = tmp_path / "executed"
    calls = [
        Call(os.system, f"touch {trap}"),
        Call(eval, f"open({str(trap)!r}, 'w')"),
        Call(exec, f"open({str(trap)!r}, 'w')"),
        Call(Path.touch, trap),
        Call(open, str(trap), "w"),
        Call(subprocess.check_call, ["touch", str(trap)]),
        Call(torch.load, str(trap)),
        Call(getattr, trap, "touch"),
        Call(map, os.system, [f"touch {trap}"]),
    ]
    weights = random_tensors(dit_shapes(37))
    for number, call in enumerate(calls):
        torch.save(call, tmp_path / f"alone{number}.ckpt")
        with pytest.raises(ValueError, match="has no hyper_parameters"):
            m2s.load(tmp_path / f"alone{number}.ckpt")
        path = save_lightning(tmp_path / f"beside{number}.ckpt", lightning_config("duo"), weights, callbacks={"x": call})
        assert m2s.load(path).head.process.vocab == 37
    save_lightning(tmp_path / "config.ckpt", {**lightning_config("duo"), "model": calls[0]}, weights)
    with pytest.raises(ValueError, match="has no hyper_parameters with a config"):
        m2s.load(tmp_path / "config.ckpt")
    assert not trap.exists()


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "imported"
    (tmp_path / "hostile_module.py").write_text(f"open({str(trap)!r}, 'w')\nclass A: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    archive(tmp_path / "a.ckpt", b"\x80\x02chostile_module\nA\n)\x81.")
    found = read_stubbed(tmp_path / "a.ckpt")
    assert isinstance(found, Stub) and found.name == "hostile_module.A"
    assert not trap.exists() and "hostile_module" not in sys.modules


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
HOSTILE: dict[str, bytes] = {
    "state of a function": TENSOR + b"}X\x08\x00\x00\x00__code__K\x01sb.",
    "state of a class": b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.",
    "attributes of a function": TENSOR + b"N}X\x0c\x00\x00\x00__defaults__K\x01s\x86b.",
    "a call of a number": b"K\x01K\x02\x85R.",
    "a call of a text": b"X\x04\x00\x00\x00evalK\x02\x85R.",
    "a new object of a function": TENSOR + b")\x81.",
    "a registered extension": b"\x82\x01.",
    "an instance of protocol 0": b"(ios\nsystem\n.",
    "an object of protocol 1": b"(cos\nsystem\no.",
    "a buffer": b"\x97.",
    "a byte array of a gigabyte": b"\x96" + (1 << 30).to_bytes(8, "little") + b".",
    "data outside the file": b"X\x05\x00\x00\x00otherQ.",
    "a storage of a path": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x05\x00\x00\x00../..X\x03\x00\x00\x00cpuK\x04tQ.",
    "a storage of another class": b"(X\x07\x00\x00\x00storagecos\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ.",
    "more values than are stored": TENSOR + STORAGE + b"K\x00K\x05\x85K\x01\x85\x89NtR.",
    "repeated values": TENSOR + STORAGE + b"K\x00J\x00\x00\x00\x7f\x85K\x00\x85\x89NtR.",
    "negative strides": TENSOR + STORAGE + b"K\x03K\x02\x85J\xff\xff\xff\xff\x85\x89NtR.",
    "a negative offset": TENSOR + STORAGE + b"J\xff\xff\xff\xffK\x02\x85K\x01\x85\x89NtR.",
    "strides of another rank": TENSOR + STORAGE + b"K\x00K\x02\x85)\x89NtR.",
    "a tensor of no storage": TENSOR + b"(K\x01K\x00K\x02\x85K\x01\x85\x89NtR.",
    "an empty stack": b".",
    "no end": b"K\x01",
    "nothing": b"",
    "an unhashable key": b"}]K\x01s.",
    "a deep key": b"})" + b"\x85" * 300_000 + b"K\x01s.",
    "deep keys": b"}()" + b"\x85" * 300_000 + b"K\x01u.",
    "a deep key of protocol 0": b"()" + b"\x85" * 300_000 + b"K\x01d.",
    "a deep entry of a set": b"\x8f()" + b"\x85" * 300_000 + b"\x90.",
    "a deep entry of a frozen set": b"()" + b"\x85" * 300_000 + b"\x91.",
    "a deep entry of a list for a set": b"cbuiltins\nset\n])" + b"\x85" * 300_000 + b"a\x85R.",
    "a deep key of a list for a dictionary": b"cbuiltins\ndict\n])" + b"\x85" * 300_000 + b"K\x01\x86a\x85R.",
}
# What they would cost, if they were read: a terabyte, hours, the text of 2^60 tuples, and a kilobyte for each name.
DOUBLED = b")" + b"2\x86" * 60  # a pair of the same pair, 60 times
COSTLY: dict[str, tuple[bytes, str]] = {
    "strides of text": (
        TENSOR + STORAGE + b"K\x00\x8a\x06" + bytes(5) + b"\x01\x85X\x01\x00\x00\x00a\x85\x89NtR.",
        "a shape or strides that are not whole numbers",
    ),
    "many dimensions": (
        TENSOR + STORAGE + b"K\x00(" + b"J\xff\xff\xff\x7f" * 300_000 + b"t2\x89NtR.",
        "a shape or strides that are not whole numbers",
    ),
    "a storage of 2^60 tuples": (
        b"(X\x07\x00\x00\x00storage" + DOUBLED + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ.",
        "the storage tuple, which is not read",
    ),
    "a key of 2^60 tuples": (b"}" + DOUBLED + b"K\x01s.", "a key is a tuple of tuples"),
    "many classes": (b"".join(b"ca\nb%d\n0" % i for i in range(10_001)) + b"N.", "it names more than 10,000 classes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_give_one_line(name: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.ckpt", b"\x80\x02" + HOSTILE[name], {"0": bytes(16)})
    with pytest.raises(ValueError, match=r"a\.ckpt is damaged, or no checkpoint") as error:
        m2s.load(path)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


@pytest.mark.parametrize("name", COSTLY)
def test_costly_pickles_are_stopped_where_the_cost_begins(name: str, tmp_path: Path) -> None:
    data, reason = COSTLY[name]
    path = archive(tmp_path / "a.ckpt", b"\x80\x02" + data, {"0": bytes(16)})
    with pytest.raises(ValueError, match=reason):
        read_stubbed(path)


def test_keys_of_a_dictionary_may_be_flat_tuples(tmp_path: Path) -> None:
    saved = {(1, "a"): {(2, 3), "b"}, "c": OrderedDict({(4,): frozenset([5])})}
    torch.save(saved, tmp_path / "a.pt")
    found = read_stubbed(tmp_path / "a.pt")
    assert found[1, "a"] == {(2, 3), "b"} and type(found["c"]) is OrderedDict and found["c"][4,].arguments == ([5],)


def test_a_whole_tensor_is_read_from_bytes(tmp_path: Path) -> None:
    """The hostile pickles above differ from this valid one in a few bytes."""
    data = b"\x80\x02" + TENSOR + STORAGE + b"K\x00K\x04\x85K\x01\x85\x89NtR."
    path = archive(tmp_path / "a.pt", data, {"0": torch.arange(4.0).numpy().tobytes()})
    assert torch.equal(read_stubbed(path).read(), torch.arange(4.0))
    for storages in ({}, {"0": bytes(15)}, {"0": bytes(17)}):
        found = read_stubbed(archive(path, data, storages))
        assert isinstance(found, StoredTensor)
        with pytest.raises(ValueError, match="is damaged"):
            read_tensors(path, {"x": found})
    found = read_stubbed(archive(path, data.replace(b"\x80\x02", b"\x80\x02"), {"0": bytes(16)}))
    content = path.read_bytes()
    at = content.index(b"archive/data/0") + len(b"archive/data/0")
    path.write_bytes(content[:at] + b"\x01" + content[at + 1 :])  # the checksum of the zip file does not fit
    with pytest.raises(ValueError, match=r"CRC|is damaged"):
        read_tensors(path, {"x": read_stubbed(path)})
    assert found.shape == (4,)


def test_archives_that_expand_or_are_of_another_kind(tmp_path: Path) -> None:
    valid = pickle.dumps({"a": 1}, 2)
    compressed = archive(tmp_path / "a.ckpt", valid, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="is compressed"):
        m2s.load(compressed)
    large = archive(tmp_path / "b.ckpt", bytes(MAX_PICKLE + 1))
    with pytest.raises(ValueError, match="more than"):
        m2s.load(large)
    large.unlink()
    other = tmp_path / "c.ckpt"
    other.write_bytes(pickle.dumps(Call(os.system, "true")))
    with pytest.raises(ValueError, match="not a zip file"):
        m2s.load(other)
    torch.save({"a": torch.ones(1)}, other, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="not a zip file"):
        m2s.load(other)
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("readme", "text")
    with pytest.raises(ValueError, match="not one of torch"):
        m2s.load(other)
    with zipfile.ZipFile(other, "w") as file:
        for name in ("archive/data.pkl", "archive/constants.pkl"):
            file.writestr(name, valid)
    with pytest.raises(ValueError, match="TorchScript"):
        m2s.load(other)


def test_deep_configurations(tmp_path: Path) -> None:
    """Nested by hand: pickle itself cannot write them."""
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        plain(deep)
    archive(tmp_path / "b.ckpt", b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    with pytest.raises(ValueError, match=r"b\.ckpt"):
        m2s.load(tmp_path / "b.ckpt")


def test_configurations_that_refer_to_the_same_list_again_and_again(tmp_path: Path) -> None:
    """A few lines that stand for 2^60 entries, of a pickle and of YAML."""
    value: Any = [1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(ValueError, match="has more than 100,000 entries"):
        plain(value)
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"config\.yaml is damaged: .* entries"):
        read_yaml(tmp_path / "config.yaml")


def test_a_tensor_that_repeats_its_values(tmp_path: Path) -> None:
    """A small file that states a large tensor: of the hub, and of a training of SEDD."""
    weights = random_tensors(dit_shapes(37))
    name = "output_layer.linear.weight"
    weights[name] = torch.zeros(1).expand(weights[name].shape)
    write_hub(tmp_path / "hub", hub_config("duo", 37), weights, pickled=True)
    with pytest.raises(ValueError, match=r"output_layer\.linear\.weight.* which are not all stored"):
        m2s.load(tmp_path / "hub")
    average = [value for key, value in weights.items() if "inv_freq" not in key]
    torch.save({"model": weights, "ema": {"shadow_params": average}}, tmp_path / "checkpoint.pth")
    with pytest.raises(ValueError, match="which are not all stored"):
        read_run(tmp_path / "checkpoint.pth", "SEDD")
    path = save_lightning(tmp_path / "a.ckpt", lightning_config("duo"), weights)
    with pytest.raises(ValueError, match="repeats its 1 stored values"):
        m2s.load(path)


def test_a_function_in_a_file_of_weights_is_named(tmp_path: Path) -> None:
    """In one line, without torch's advice to load the file nevertheless."""
    write_hub(tmp_path, hub_config("duo", 37), random_tensors(dit_shapes(37)), pickled=True)
    torch.save({"backbone.x": Call(os.system, f"touch {tmp_path / 'executed'}")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"objects other than tensors, which are not read: it names \w+\.system\. Copy"
    ) as error:
        m2s.load(tmp_path)
    assert str(error.value).isprintable() and not (tmp_path / "executed").exists()


def test_a_deep_key_in_a_file_of_weights(tmp_path: Path) -> None:
    """torch.load would end the process."""
    write_hub(tmp_path, hub_config("duo", 37), random_tensors(dit_shapes(37)), pickled=True)
    archive(tmp_path / "pytorch_model.bin", b"\x80\x02" + HOSTILE["a deep key"])
    with pytest.raises(ValueError, match="a key is a tuple of tuples"):
        m2s.load(tmp_path)


def test_weights_that_expand(tmp_path: Path) -> None:
    """The pickle of an ordinary file of weights, compressed: a kilobyte could stand for a megabyte."""
    folder = write_hub(tmp_path, hub_config("duo", 37), random_tensors(dit_shapes(37)), pickled=True)
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in contents.items():
            file.writestr(name, data)
    with pytest.raises(ValueError, match="is compressed, which torch"):
        m2s.load(folder)


def test_mutated_checkpoints_give_one_line(tmp_path: Path) -> None:
    """200 damaged files: the network of the file, or a UserError of one line; never another exception."""
    weights, rng, errors = random_tensors(dit_shapes(5)), random.Random(7), []
    path = save_lightning(tmp_path / "a.ckpt", lightning_config("duo"), weights)
    content = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        start = file.getinfo(next(name for name in file.namelist() if name.endswith("data.pkl")))
        length = start.file_size
    begin = content.index(b"\x80\x02", start.header_offset)
    for case in range(200):
        damaged = bytearray(content)
        if case % 4 == 0:
            damaged = damaged[: rng.randrange(len(damaged))]
        elif case % 4 == 1:
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        else:  # a pickle with another opcode, and the checksum of the archive made right again
            damaged[begin + rng.randrange(length)] = rng.randrange(256)
            inner = bytes(damaged[begin : begin + length])
            with zipfile.ZipFile(io.BytesIO(content)) as file, zipfile.ZipFile(path, "w") as copy:
                for name in file.namelist():
                    copy.writestr(name, inner if name.endswith("data.pkl") else file.read(name))
            damaged = bytearray(path.read_bytes())
        path.write_bytes(damaged)
        try:
            load_checkpoint(str(path))
        except UserError as error:
            errors.append(str(error))
    assert len(errors) > 60 and all(error.isprintable() and len(error) < 2000 for error in errors)
