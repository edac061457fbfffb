"""Data sets by name: the built-in ones, and one that a plugin registers with one line."""

import json
from pathlib import Path

import pytest
import torch

import m2s.data
from m2s.data import DATASETS, Bytes, ImageSource, TextSource, open_source
from m2s.errors import UserError
from m2s.registry import load_plugin
from m2s.training import train
from packed_text import prepare
from small_runs import small

PLUGIN = '''
import torch

from m2s.data import DATASETS, Batch


class Sorted:
    """Sorted random tokens."""

    vocab, classes, shape, tokenizer = 5, None, None, None

    def __init__(self, folder, length, hub):
        self.length, self.folder = length, folder
        self.tokens = torch.randint(5, (40, length), generator=torch.Generator().manual_seed(0)).sort(-1).values
        self.size, self.held_out = 30, 10
        self.description = {"kind": "text", "length": length}

    def train(self, indices):
        return Batch(self.tokens[indices])

    def validation(self, indices):
        return Batch(self.tokens[30 + indices])


DATASETS.add("sorted-tokens", Sorted)
'''


def test_built_in_names() -> None:
    assert list(DATASETS)[:4] == ["digits", "mnist", "cifar10", "text"]
    assert list(m2s.data.image_sets()) == ["digits", "mnist", "cifar10"]
    source = open_source("digits")
    assert isinstance(source, ImageSource) and source.images.name == "digits" and source.classes == 10
    batch = source.train(torch.tensor([0, 5]))
    assert torch.equal(batch.x_0, m2s.data.load("digits").train[[0, 5]]) and batch.label is not None
    assert torch.equal(batch.part(slice(1)).x_0, batch.x_0[:1])


def test_text_is_an_entry_like_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some words to read " * 40)
    prepare(tmp_path / "a.txt", tmp_path / "packed")
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    source = open_source("text", "$M2S_DATA/packed", 8)
    assert isinstance(source, TextSource) and source.length == 8 and source.tokenizer == Bytes()
    assert source.train(torch.tensor([1])).x_0.shape == (1, 8) and source.held_out > 0
    with pytest.raises(UserError, match=r"data\.folder is not given"):
        open_source("text")
    with pytest.raises(UserError, match="no prepared text"):
        open_source("text", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"data\.name is 'txet'.* did you mean text"):
        open_source("txet")


def test_a_plugin_registers_a_data_set_and_trains_on_it(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text(PLUGIN)
    load_plugin(tmp_path / "my_data.py")
    try:
        source = open_source("sorted-tokens", "folder", 6)
        assert source.length == 6 and source.folder == "folder"  # type: ignore[attr-defined]
        config = small(tmp_path / "run", data__name="sorted-tokens", data__length=6, run__steps=2, run__validate_every=0)
        result = train(config)
        assert result.step == 2 and result.validation["validation_bits"] > 0
        record = json.loads((tmp_path / "run" / "config.json").read_text())
        assert record["data"] == {"kind": "text", "length": 6}
        with pytest.raises(UserError, match="no image data set 'sorted-tokens': choose from digits, mnist, cifar10"):
            m2s.data.load("sorted-tokens")
    finally:
        DATASETS.remove("sorted-tokens")


def test_what_a_plugin_opens_must_be_a_source() -> None:
    DATASETS.add("broken", lambda folder, length, hub: object())  # type: ignore[arg-type, return-value]
    DATASETS.add("failing", lambda folder, length, hub: [][length])  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(
            TypeError, match=r"'broken' returned object, which has no classes, .*vocab: return an object with all"
        ):
            open_source("broken")
        with pytest.raises(IndexError):
            open_source("failing")
        with pytest.raises(ValueError, match="there is already a data set named 'digits'"):
            DATASETS.add("digits", lambda folder, length, hub: object())  # type: ignore[arg-type, return-value]
    finally:
        for name in ("broken", "failing"):
            DATASETS.remove(name)
