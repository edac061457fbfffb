"""Tokenizers of the Hugging Face libraries: round trips, 32-bit ids, copies in packed data and in checkpoints."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import m2s
import m2s.hub
from m2s.cli import main
from m2s.data import HuggingFace, Tokens, check_text
from m2s.data import tokenizer as tokenizers
from m2s.data.tokenizer import hugging_face
from m2s.data.tokenizer.byte_level import BYTE_OF
from m2s.errors import UserError
from m2s.models import DiT, DiTConfig
from packed_text import make_documents, prepare, unpack

backend = pytest.importorskip("tokenizers", reason="no tokenizers here: pip install tokenizers")

END = "<|endoftext|>"
TEXTS = ["", "Hello world", "naïve café — “quoted”", "東京 🎉 \u200b", "tabs\tand\r\n  spaces   ", f"a {END} in the text"]


def byte_level(path: Path, end: str | None = END, extra: int = 0) -> Path:
    """Write a byte-level BPE: 256 bytes, "th" and "the", `extra` tokens that no text needs, and the end token last."""
    words = [*BYTE_OF, "th", "the", *(f"never{i}" for i in range(extra))]
    model = backend.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("t", "h"), ("th", "e")])
    tokenizer = backend.Tokenizer(model)
    tokenizer.pre_tokenizer = backend.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = backend.decoders.ByteLevel()
    tokenizer.enable_truncation(4)  # a tokenizer.json may hold these settings; they must have no effect
    tokenizer.enable_padding(length=9)
    if end is not None:
        tokenizer.add_special_tokens([backend.AddedToken(end, special=True)])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def words(path: Path) -> Path:
    """Write a vocabulary of words with the SentencePiece space and tokens of single bytes."""
    vocabulary = ["<unk>", "</s>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = backend.models.BPE(
        vocab={word: i for i, word in enumerate([*vocabulary, *"▁thecat", "▁t", "▁th", "▁c", "▁ca"])},
        merges=[("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = backend.Tokenizer(model)
    tokenizer.pre_tokenizer = backend.pre_tokenizers.Metaspace()
    steps = [backend.decoders.Replace("▁", " "), backend.decoders.ByteFallback(), backend.decoders.Fuse()]
    tokenizer.decoder = backend.decoders.Sequence([*steps, backend.decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back(tmp_path: Path, text: str) -> None:
    tokenizer = HuggingFace(str(byte_level(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.end not in ids and all(0 <= i < tokenizer.vocab for i in ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_ids_and_end_token(tmp_path: Path) -> None:
    path = str(byte_level(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(path)
    assert (tokenizer.vocab, tokenizer.end) == (259, 258)
    assert tokenizer.encode("the") == [257] and tokenizer.token_bytes(257) == b"the" and tokenizer.token_bytes(258) == b""
    assert tokenizer.decode([258]) == END and tokenizer.decode([tokenizer.encode("é")[0]]) == "\ufffd"
    assert HuggingFace(path, end_token="").end is None and HuggingFace(path, end_token="th").end == 256
    assert HuggingFace(str(byte_level(tmp_path / "plain.json", end=None))).end is None
    with pytest.raises(ValueError, match="no token 'stop' to end a document"):
        _ = HuggingFace(path, end_token="stop").end
    with pytest.raises(ValueError, match=r"ids holds 259, but the ids of HuggingFace lie in 0\.\.258"):
        tokenizer.decode([259])


def test_a_folder_names_its_end_token(tmp_path: Path) -> None:
    """tokenizer_config.json names the EOS token, as a string or as an object; no other package is needed."""
    byte_level(tmp_path / "tokenizer.json", end="<stop>")
    assert HuggingFace(str(tmp_path)).end is None
    for name in ("<stop>", {"content": "<stop>", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
        assert HuggingFace(str(tmp_path)).end == 258 == HuggingFace(str(tmp_path / "tokenizer.json")).end


def test_words_with_byte_fallback(tmp_path: Path) -> None:
    tokenizer = HuggingFace(str(words(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode("the cats é")
    assert tokenizer.decode(ids) == "the cats é" and tokenizer.end == 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == " the cats é".encode()


def test_whatever_autotokenizer_loads(tmp_path: Path) -> None:
    """A folder without tokenizer.json goes through transformers; the copy is a tokenizer.json."""
    transformers = pytest.importorskip("transformers", reason="no transformers here: pip install transformers")
    vocabulary = ["[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]", "the", "cat", "##s"]
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(vocabulary))
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    tokenizer = HuggingFace(str(tmp_path / "bert"), end_token="[SEP]")
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert").encode("The cats", add_special_tokens=False)
    assert tokenizer.encode("The cats") == expected == [5, 6, 7] and tokenizer.vocab == 8
    assert [tokenizer.token_bytes(i) for i in expected] == [b" the", b" cat", b"s"]
    assert tokenizers.save_tokenizer_files(tokenizer, tmp_path) == tmp_path / "tokenizer.json"
    assert HuggingFace(str(tmp_path / "tokenizer.json")).encode("The cats") == expected


@pytest.mark.parametrize(("extra", "dtype"), [(0, "uint16"), (70_000, "uint32")])
def test_prepare_read_and_decode(tmp_path: Path, extra: int, dtype: str) -> None:
    """A vocabulary above 65,536 is stored in 32 bits; the folder can be moved, and the original file deleted."""
    path = byte_level(tmp_path / "given" / "tokenizer.json", extra=extra)
    tokenizer, documents = HuggingFace(str(path)), make_documents(30)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(documents))
    meta = prepare(tmp_path / "a.txt", tmp_path / "packed", tokenizer, validation_fraction=0.0)
    assert meta["dtype"] == dtype and meta["vocab"] == 259 + extra and meta["end"] == 258 + extra
    assert meta["tokenizer"] == {"kind": "HuggingFace", "end_token": END, "size": 259 + extra}
    assert (tmp_path / "packed" / "tokenizer.json").read_bytes() == path.read_bytes()
    path.unlink()
    moved = (tmp_path / "packed").rename(tmp_path / "moved")
    assert check_text(moved)["splits"] == meta["splits"]
    tokens = Tokens(moved, "train", 16, verify=True)
    again = tokens.tokenizer
    assert unpack(moved, "train", again) == documents
    assert int(tokens[torch.arange(len(tokens))].max()) == again.end == 258 + extra
    assert again.decode(tokens[0].tolist()[:1]) == documents[0][:1]
    assert tokens.description["tokenizer"] == meta["tokenizer"]


def test_old_folders_have_no_dtype_and_are_uint16(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words to read " * 9)
    meta = prepare(tmp_path / "a.txt", tmp_path / "packed")
    before = Tokens(tmp_path / "packed", "train", 8)[1]
    old = {key: value for key, value in meta.items() if key != "dtype"}
    (tmp_path / "packed" / "meta.json").write_text(json.dumps(old))
    assert torch.equal(Tokens(tmp_path / "packed", "train", 8)[1], before)
    assert check_text(tmp_path / "packed")["dtype"] == "uint16"
    assert prepare(tmp_path / "a.txt", tmp_path / "packed") == old  # the same command recognizes its own folder
    (tmp_path / "packed" / "meta.json").write_text(json.dumps({**meta, "dtype": "uint64"}))
    with pytest.raises(UserError, match="tokens of type 'uint64', expected uint16 or uint32"):
        Tokens(tmp_path / "packed", "train", 8)


def test_a_checkpoint_holds_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads where the packages are missing, since config.json has the number of tokens."""
    path = byte_level(tmp_path / "given" / "tokenizer.json")
    tokenizer = HuggingFace(str(path))
    model = DiT(DiTConfig(states=259, width=16, depth=1, heads=2, condition_width=8, length=4))
    head = m2s.Posterior(m2s.Uniform(259, m2s.Linear()))
    m2s.hub.save(tmp_path / "run", model, head, {"kind": "text", "length": 4}, tokenizer)
    ids = tokenizer.encode("the café")
    path.unlink()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["tokenizer"] == {
        "kind": "HuggingFace",
        "end_token": END,
        "size": 259,
    }
    loaded = m2s.load(tmp_path / "run").tokenizer
    assert loaded is not None and loaded.decode(ids) == "the café" and loaded.end == 258
    hugging_face._from_json.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    loaded = m2s.load(tmp_path / "run").tokenizer
    assert loaded is not None and loaded.vocab == 259
    with pytest.raises(UserError, match="needs the package tokenizers: pip install tokenizers"):
        tokenizers.check_tokenizer(loaded)


def test_the_command_takes_a_file_or_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_level(tmp_path / "bpe" / "tokenizer.json")
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 9)
    for name, given in (("file", "bpe/tokenizer.json"), ("folder", "bpe")):
        out = tmp_path / name
        main(["data", "prepare", str(tmp_path / "a.txt"), "--out", str(out), "--tokenizer", str(tmp_path / given)])
        assert "tokenizer HuggingFace, 259 tokens, token 258 after each document" in capsys.readouterr().out
    files = [np.fromfile(tmp_path / name / "train-00000.bin", "<u2") for name in ("file", "folder")]
    assert np.array_equal(*files) and 257 in files[0]


def test_a_description_makes_the_same_tokenizer(tmp_path: Path) -> None:
    path = str(byte_level(tmp_path / "tokenizer.json"))
    again = tokenizers.from_dict(json.loads(json.dumps(HuggingFace(path).to_dict())))
    assert again == HuggingFace(path, END, 259) and again.encode("the") == [257]
    with pytest.raises(ValueError, match="has 259 tokens, expected 300: it is another tokenizer"):
        HuggingFace(path, size=300).encode("a")


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    for name, message in (
        (tmp_path / "tokenizer.json", r"is not a tokenizer\.json of the package tokenizers"),
        (tmp_path / "nowhere.json", "there is no tokenizer .*nowhere"),
        ("words", r"there is no tokenizer 'words': choose from gpt2, bytes, chars, or give a tokenizer\.json"),
    ):
        with pytest.raises(UserError, match=message):
            tokenizers.make_tokenizer(str(name))
    with pytest.raises(UserError, match=r"has no tokenizer\.json: copy it into the folder"):
        tokenizers.check_tokenizer(tokenizers.from_dict({"kind": "HuggingFace", "end_token": "", "size": 3}))
    (tmp_path / "empty").mkdir()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs transformers .*: pip install transformers"):
        tokenizers.make_tokenizer(str(tmp_path / "empty"))


def test_offline_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a retry nor a download: what is not in the cache is an error."""
    pytest.importorskip("transformers", reason="no transformers here: pip install transformers")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(
        UserError, match=r"nobody/nothing is not in the local cache, .*HF_HUB_OFFLINE.* copy its tokenizer\.json"
    ):
        tokenizers.make_tokenizer("nobody/nothing")
