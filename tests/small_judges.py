"""Small causal language models with random weights, as judges of generative perplexity."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from m2s.data import Characters
from m2s.data.tokenizer.byte_level import BYTE_OF
from m2s.evaluation.judge import END

LETTERS = Characters(" abcdefghijklmnopqrstuvwxyz.")
TEXTS = ["the cat sat on the mat.", "a", "", "naïve 東京 🎉  \n\n x", f"one{END}two{END}{END}three", "zz " * 20]
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


def tokenizer_of(alphabet: list[int], bos: str | None, adds: bool, end: str) -> Any:
    """Return a byte-level BPE: ids of the bytes of `alphabet`, then the other bytes, "th", "the" and special tokens."""
    import transformers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Fast

    tokens = [CHARACTER_OF[byte] for byte in [*alphabet, *(byte for byte in range(256) if byte not in alphabet)]]
    vocab = {token: i for i, token in enumerate([*tokens, "th", "the"])}
    fast = Fast(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = [token for token in (end, bos) if token is not None]
    fast.add_special_tokens([AddedToken(token, special=True) for token in dict.fromkeys(special)])
    fast.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds:
        first = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, fast.token_to_id(bos))])
        fast.post_processor = processors.Sequence([fast.post_processor, first])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=end, bos_token=bos)


SIZE = {"vocab_size": 272, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "initializer_range": 0.4}
SMALL = SIZE | {"intermediate_size": 24, "max_position_embeddings": 256, "num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"vocab_size": 272, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 256, "initializer_range": 0.4}
OPT = SIZE | {"ffn_dim": 24, "max_position_embeddings": 256, "word_embed_proj_dim": 16, "init_std": 0.4}
KINDS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "llama": ("Llama", SMALL, ([], "<s>", True, "</s>")),
    "gpt2": ("GPT2", GPT2, ([], END, False, END)),
    "gemma": ("Gemma2", SMALL | {"final_logit_softcapping": 2.0, "sliding_window": 8}, ([], "<bos>", False, "<eos>")),
    "opt": ("OPT", OPT, ([], None, False, END)),
    "letters": ("GPT2", GPT2, ([ord(letter) for letter in LETTERS.alphabet], END, False, END)),
}


def write_judges(folder: Path) -> dict[str, Path]:
    """Write one small network of each kind, with a tokenizer of 256 bytes and a few more tokens, as folders."""
    import transformers

    made = {}
    for name, (kind, config, tokens) in KINDS.items():
        torch.manual_seed(1)
        made[name] = folder / name
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**config))
        model.save_pretrained(made[name])
        tokenizer_of(*tokens).save_pretrained(made[name])
    return made


def directly(folder: Path, ids: list[int]) -> np.ndarray:
    """Return -log p of each token after the first, by transformers: one sequence, no padding."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return np.array([-float(log_p[i, token]) for i, token in enumerate(ids[1:])])
