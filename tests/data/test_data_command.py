"""`m2s data prepare | check | list`."""

import contextlib
import io

import pytest
import tyro

import m2s.data
from m2s.cli import parse
from m2s.cli.data import Data
from m2s.data import BadData, Tokens
from m2s.errors import UserError
from merges import write_merges


def command(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tyro.cli(Data, args=[str(argument) for argument in arguments]).run()
    return out.getvalue()


def test_command(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    out = tmp_path / "packed"
    message = command("prepare", corpus[0], "--out", out, "--tokenizer", "bytes", "--validation-fraction", "0.1")
    assert "documents" in message and "13" in message and str(out) in message
    assert message.splitlines()[-1].startswith(f"m2s train owt --data.folder {out} --data.length ")
    assert message.splitlines()[-1].endswith(" --out runs/packed")
    none = command("prepare", corpus[0], "--out", tmp_path / "none", "--tokenizer", "bytes", "--validation-fraction", "0")
    assert none.splitlines()[-1] == f"m2s evaluate bpd RUN --data {tmp_path / 'none'}"
    assert "every file" in command("check", out) and "1,541 train and 256 test" in command("check", "digits")
    listed = command("list")
    assert "here     digits" in listed and "missing  mnist" in listed and str(out) in listed and "openwebtext" in listed
    assert "% of" not in none and "held out" not in none
    (tmp_path / "one.txt").write_text("x" * 1049)
    message = command("prepare", tmp_path / "one.txt", "--out", tmp_path / "one", "--tokenizer", "bytes")
    said = "held out for validation: 105 of 1,050 tokens (10 %), the last ones of the text"
    assert said in message and said in command("check", tmp_path / "one")
    assert message.splitlines()[-1].startswith(f"m2s train owt --data.folder {tmp_path / 'one'} --data.length 64 ")
    preset = parse(message.splitlines()[-1].split()[1:]).preset
    assert len(Tokens(preset.data.folder, "validation", preset.data.length)) == 1
    (out / "test-00000.bin").write_bytes(b"xx")
    for arguments, word in (
        (("check", out), "test-00000.bin"),
        (("check", "cifar10"), "data_batch_1.bin"),
        (("prepare", corpus[0], "--out", out, "--tokenizer", "words"), "gpt2, bytes, chars"),
        (("prepare", corpus[0], "--out", out, "--tokenizer", "bytes", "--alphabet", "ab"), "--alphabet is for"),
        (("prepare", corpus[0], "--out", out, "--tokenizer", "chars", "--alphabet", "aa"), "alphabet"),
        (("prepare", corpus[0], "--out", out, "--shard-tokens", "0"), "--shard-tokens"),
        (("prepare", corpus[0], "--out", out, "--validation-fraction", "-1"), "--validation-fraction is -1"),
    ):
        with pytest.raises(UserError, match=word):
            command(*arguments)


def test_the_merges_are_copied_beside_the_tokens(tmp_path, monkeypatch):
    """The tokens can be decoded without the original file, also after the folder was moved."""
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    given, out = write_merges(tmp_path / "given.txt"), tmp_path / "out"
    (tmp_path / "a.txt").write_text("some words " * 9)
    message = command("prepare", tmp_path / "a.txt", "--out", out, "--merges", given, "--validation-fraction", "0.2")
    assert "50,257 tokens" in message
    given.unlink()
    meta = m2s.data.check_text(out)
    assert meta["tokenizer"] == {"kind": "GPT2"} and meta["tokenizer_file"]["file"] == "merges.txt"
    moved = out.rename(tmp_path / "moved")
    tokens = Tokens(moved, "train", 8)
    assert tokens.tokenizer.decode(tokens[0].tolist()) == "some words so"
    assert tokens.description["tokenizer"] == {"kind": "GPT2"}
    changed = (moved / "merges.txt").read_bytes()[:-1]
    (moved / "merges.txt").write_bytes(changed)
    with pytest.raises(BadData, match=r"merges\.txt has SHA-256"):
        m2s.data.check_text(moved)
    with pytest.raises(
        UserError, match=r"not at \S+data/gpt2: run .* or put .*\. --merges FILE says where the merges are; --tokenizer bytes"
    ):
        command("prepare", tmp_path / "a.txt", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()
