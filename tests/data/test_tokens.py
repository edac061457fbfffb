"""Reading a prepared text: windows of the stream, and errors for damaged folders."""

import pickle

import numpy as np
import pytest
import torch

from m2s.data import BadData, Tokens
from packed_text import prepare


def test_windows_are_consecutive_parts_of_the_stream(corpus, tmp_path):
    meta = prepare(corpus[0], tmp_path / "out", shard_tokens=37)
    tokens = Tokens(tmp_path / "out", "train", 50, verify=True)  # longer than a file
    stream = np.concatenate([np.fromfile(tmp_path / "out" / s["file"], "<u2") for s in meta["splits"]["train"]["shards"]])
    assert len(tokens) == len(stream) // 50 and tokens.vocab == 257
    assert np.array_equal(np.concatenate(list(tokens)), stream[: len(tokens) * 50])
    assert tokens[3].dtype == torch.int64 and torch.equal(tokens[torch.tensor([3, 1])], torch.stack([tokens[3], tokens[1]]))
    assert torch.equal(pickle.loads(pickle.dumps(tokens))[2], tokens[2]) and len(pickle.dumps(tokens)) < 1000
    assert tokens.description == {"kind": "text", "length": 50, "vocab": 257, "tokenizer": {"kind": "Bytes"}}
    for index in (-1, len(tokens)):
        with pytest.raises(IndexError, match=f"index is {index}"):
            tokens[index]


def test_opening_rejects_a_bad_folder(corpus, tmp_path):
    out = tmp_path / "out"
    prepare(corpus[0], out)
    for arguments, message in (
        (("dev", 8), "train, validation, test"),
        (("train", 0), "length"),
        (("train", 10**6), r"too few .*: take a smaller length .m2s train: --data\.length., or take more text and prepare"),
        (("validation", 10**6), "or take more text or a greater --validation-fraction than 0.1 and prepare"),
        (("test", 10**6), "too few .* in files whose names --test matches, and prepare"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokens(out, *arguments)
    prepare(corpus[0], tmp_path / "none", validation_fraction=0.0)
    with pytest.raises(BadData, match=r"validation holds 0 tokens, too few .* leave out --validation-fraction \(it was 0\)"):
        Tokens(tmp_path / "none", "validation", 8)
    shard, raw = out / "train-00001.bin", (out / "train-00001.bin").read_bytes()
    shard.write_bytes(raw[:-2])
    with pytest.raises(BadData, match=r"train-00001.bin holds 998 bytes, expected 1,000"):
        Tokens(out, "train", 8)
    shard.write_bytes(raw[:-2] + b"\1\0")
    Tokens(out, "train", 8)
    with pytest.raises(BadData, match=r"train-00001.bin has SHA-256"):
        Tokens(out, "train", 8, verify=True)
    shard.unlink()
    with pytest.raises(BadData, match=r"train-00001.bin is missing"):
        Tokens(out, "train", 8)
    for raw_meta, message in ((b"{", "damaged"), (b'{"format": "other", "splits": {}}', "format 'other'"), (b"[]", "damaged")):
        (out / "meta.json").write_bytes(raw_meta)
        with pytest.raises(BadData, match=message):
            Tokens(out, "train", 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match=r"empty has no meta\.json, so it is no prepared text: make one with `m2s"):
        Tokens(tmp_path / "empty", "train", 8)
    with pytest.raises(BadData, match=r"no folder \S+/emty \(\S+ holds empty.*\), so no prepared text: check the path, or"):
        Tokens(tmp_path / "emty", "train", 8)
    with pytest.raises(BadData, match=r"`m2s data prepare text8 --out \S+/text8 --tokenizer chars`"):
        Tokens(tmp_path / "text8", "train", 8)
