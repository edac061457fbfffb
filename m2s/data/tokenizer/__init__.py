"""Tokenizers: text to token ids and back.

    tokenizer.encode("a text")  -> list of ids        tokenizer.vocab     the number of ids
    tokenizer.decode(ids)       -> str                tokenizer.end       the id that ends a document, or None
    tokenizer.token_bytes(id)   -> bytes

`Bytes`, `Characters` and `GPT2` are built in. `HuggingFace` reads any tokenizer.json, and anything else that
`transformers.AutoTokenizer` can load.
"""

from m2s.data.tokenizer.base import Tokenizer
from m2s.data.tokenizer.characters import Bytes, Characters
from m2s.data.tokenizer.gpt2 import GPT2
from m2s.data.tokenizer.hugging_face import HuggingFace
from m2s.data.tokenizer.registry import KEPT, TOKENIZERS, check_tokenizer, from_dict, make_tokenizer, save_tokenizer_files

__all__ = [
    "GPT2",
    "KEPT",
    "TOKENIZERS",
    "Bytes",
    "Characters",
    "HuggingFace",
    "Tokenizer",
    "check_tokenizer",
    "from_dict",
    "make_tokenizer",
    "save_tokenizer_files",
]
