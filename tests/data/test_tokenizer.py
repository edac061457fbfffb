"""The built-in tokenizers: round trips, published ids, and errors."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2s.data import tokenizer as tokenizers
from m2s.data.tokenizer import GPT2, Bytes, Characters, Tokenizer
from m2s.errors import UserError
from merges import write_merges

HERE = Path(os.environ.get("M2S_DATA", "~/.cache/m2s")).expanduser() / "gpt2"
local_gpt2 = pytest.mark.skipif(not (HERE / "vocab.bpe").exists(), reason=f"GPT-2's merges are not in {HERE}")
TEXTS = [
    "",
    "Hello world",
    "naïve café — “quoted”",
    "東京 🎉👩‍👩‍👧 \u200b",
    "tabs\tand\r\n\n  spaces   ",
    "it's they'll 1234 x_y",
    "\x00\x7f",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [Bytes(), pytest.param(GPT2(), marks=local_gpt2)], ids=["bytes", "gpt2"])
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab for i in ids)
    assert tokenizer.end not in ids
    assert tokenizer.decode(ids) == text


@given(st.text())
def test_any_unicode_comes_back_from_bytes(text: str) -> None:
    assert Bytes().decode(Bytes().encode(text)) == text


@local_gpt2
@given(st.text())
def test_any_unicode_comes_back_from_gpt2(text: str) -> None:
    assert GPT2().decode(GPT2().encode(text)) == text


def test_bytes_are_bytes() -> None:
    assert Bytes().encode("aé") == [97, 195, 169]
    assert (Bytes().vocab, Bytes().end) == (257, 256)
    assert Bytes().decode([97, 256, 98]) == "ab"
    assert Bytes().decode([195]) == "\ufffd"


def test_characters_follow_their_alphabet() -> None:
    text8 = Characters()
    assert (text8.vocab, text8.end) == (27, None)
    assert text8.encode("a z") == [1, 0, 26]
    assert text8.decode([1, 0, 26]) == "a z"
    assert Characters("ba").encode("ab") == [1, 0]


@local_gpt2
def test_gpt2_gives_the_published_ids() -> None:
    gpt2 = GPT2()
    assert (gpt2.vocab, gpt2.end) == (50_257, 50_256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode([50_256]) == "<|endoftext|>"
    assert 50_256 not in gpt2.encode("<|endoftext|>"), "a text never contains the end token"
    assert gpt2.decode(gpt2.encode("<|endoftext|>")) == "<|endoftext|>"


@local_gpt2
def test_gpt2_agrees_with_the_published_table() -> None:
    """encoder.json, which the tokenizer does not read, names every token; U+0120 there is a space."""
    table = json.loads((HERE / "encoder.json").read_text(encoding="utf-8"))
    gpt2 = GPT2()
    assert len(table) == gpt2.vocab
    plain = {token.replace("Ġ", " "): i for token, i in table.items() if token.replace("Ġ", " ").isascii()}
    assert len(plain) > 40_000
    assert all(gpt2.decode([i]) == token for token, i in plain.items())


@local_gpt2
def test_gpt2_reads_its_merges_from_a_file_a_folder_or_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "merges.txt").write_bytes((HERE / "vocab.bpe").read_bytes())
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    for tokenizer in (GPT2(), GPT2(str(tmp_path / "gpt2")), GPT2(str(tmp_path / "gpt2" / "merges.txt"))):
        assert tokenizer.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("tokenizer", [Bytes(), Characters(), Characters("01"), GPT2(), GPT2(__file__)], ids=repr)
def test_a_description_makes_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizers.from_dict(json.loads(json.dumps(tokenizer.to_dict()))) == tokenizer


def test_merges_are_copied_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    given = write_merges(tmp_path / "given" / "vocab.bpe")
    ids = GPT2(str(given.parent)).encode("naïve café")
    (tmp_path / "made").mkdir()
    assert tokenizers.save_tokenizer_files(GPT2(str(given)), tmp_path / "made") == tmp_path / "made" / "merges.txt"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["merges.txt"]
    description = GPT2(str(given)).to_dict()
    given.unlink()
    monkeypatch.chdir(tmp_path)
    again = tokenizers.from_dict(description, Path("made"))
    assert again.decode(ids) == "naïve café" and again == GPT2(str(tmp_path / "made" / "merges.txt"))
    # without the copy, the default folder is used
    assert tokenizers.from_dict(description, tmp_path) == tokenizers.from_dict(description) == GPT2()
    write_merges(tmp_path / "data" / "gpt2" / "merges.txt")
    assert tokenizers.check_tokenizer(tokenizers.from_dict(description)).decode(ids) == "naïve café"
    assert tokenizers.save_tokenizer_files(Bytes(), tmp_path) is None
    assert tokenizers.from_dict(Bytes().to_dict(), tmp_path / "made") == Bytes()


def test_a_missing_file_or_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizers.check_tokenizer(Characters()) == Characters()
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    with pytest.raises(UserError, match=f"are not at {tmp_path}/gpt2"):
        tokenizers.check_tokenizer(GPT2())
    write_merges(tmp_path / "gpt2" / "merges.txt")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match="pip install tiktoken"):
        tokenizers.check_tokenizer(GPT2())


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2S_DATA", str(tmp_path))
    remedy = "run `m2s data download gpt2`, or put "
    remedy += rf"https://\S+openai-community/gpt2/\S+merges\.txt into {tmp_path}/gpt2, or set \$M2S_DATA .* not needed\)$"
    for tokenizer, place in ((GPT2(), "gpt2"), (GPT2(str(tmp_path / "elsewhere")), "elsewhere")):
        with pytest.raises(FileNotFoundError, match=rf"are not at \S+/{place}: {remedy}"):
            tokenizer.encode("a")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nh e\n")
    with pytest.raises(ValueError, match="gives 257 tokens, but GPT-2 has 50256"):
        GPT2(str(tmp_path)).encode("a")
    for name, text in (("vocab.json", '{"h": 0, "e": 1}'), ("encoder.json", '{\n\t"h": 0\n}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=rf"{name} .*not GPT-2's list of merges, vocab\.bpe or merges\.txt"):
            GPT2(str(tmp_path / name)).encode("a")
    with pytest.raises(ValueError, match=r"text\[1\] is 'B', which is not in the alphabet"):
        Characters().encode("aB")
    with pytest.raises(ValueError, match=r"ids holds 27, but the ids of Characters lie in 0\.\.26"):
        Characters().decode([1, 27])
    with pytest.raises(ValueError, match=r"alphabet is 'aa', .* each of them once"):
        Characters("aa")
    with pytest.raises(ValueError, match=r"kind is 'Words', .* Bytes, Characters, GPT2"):
        tokenizers.from_dict({"kind": "Words"})
    with pytest.raises(ValueError, match="Bytes has no argument path"):
        tokenizers.from_dict({"kind": "Bytes", "path": "x"})
