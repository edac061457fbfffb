"""Any tokenizer of the Hugging Face libraries: a tokenizer.json, or whatever `transformers.AutoTokenizer` can load."""

import functools
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from m2s.data.tokenizer.base import Tokenizer
from m2s.data.tokenizer.byte_level import BYTE_OF

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]")  # tried in this order where no file names one
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte in SentencePiece vocabularies
PROBE_SECONDS = 5.0  # the longest wait for the hub before "offline" is reported


@dataclass(frozen=True)
class HuggingFace(Tokenizer):
    """A tokenizer of the Hugging Face libraries.

    A tokenizer.json needs the package `tokenizers`; everything else needs `transformers`. A name of the hub is looked up in the
    local cache first. It is downloaded only if the hub answers at once, and that is reported on stderr.

    Encoding may lose text: some vocabularies have no token for some characters, and some normalize the text first. Choose a
    byte-level tokenizer where the text must be restored exactly.

    Args:
        path: A tokenizer.json, a folder with one or with other files that `AutoTokenizer` reads, or OWNER/NAME of the hub.
        end_token: The token that ends a document; "" for none. None: the EOS token that the files name, or the first of
            <|endoftext|>, </s>, <eos>, <|end_of_text|>, [EOS] that the vocabulary has.
        size: The number of tokens; None: it is read from the files. A checkpoint stores it, so that it can be loaded without
            the files.
        mask: The id of a token that a model's vocabulary leaves out, because it is the mask of its noise; None: there is
            none. The ids after it move down by one. No text is encoded to it.

    Example:
        >>> HuggingFace("tokenizer.json").encode("a text")
        [64, 2420]
    """

    path: str | None = None
    end_token: str | None = None
    size: int | None = None
    mask: int | None = None
    kept: ClassVar[str | None] = FILE

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return self._size - (self.mask is not None)

    @property
    def _size(self) -> int:
        """The number of tokens of the files."""
        return self._loaded.size if self.size is None else self.size

    @property
    def end(self) -> int | None:  # type: ignore[override]
        """The id of the token that ends a document, or None.

        Raises:
            ValueError: The vocabulary does not have the token.
        """
        token = self._loaded.end_token if self.end_token is None else self.end_token
        if not token:
            return None
        index = self.token_id(token)
        if index is None:
            raise ValueError(f"{self.path} has no token {token!r} to end a document: give another end_token, or '' for none")
        return self._without_mask(index)

    def encode(self, text: str) -> list[int]:
        return [self._without_mask(i) for i in self._loaded.tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._loaded.tokenizer.decode(self._in_files(ids), skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        (index,) = self._in_files([token])
        return b"" if token == self.end else self._loaded.token_bytes(index)

    def token_id(self, token: str) -> int | None:
        """Return the id that the files give a token; None where they have no such token.

        Args:
            token: The token, such as "[MASK]".
        """
        index = self._loaded.tokenizer.token_to_id(token)
        return None if index is None else int(index)

    def _without_mask(self, index: int) -> int:
        """The id of a token of the files in the model's vocabulary."""
        if index == self.mask:
            raise ValueError(f"the text holds the mask token {index}, which is no token of the model: remove it")
        return index - (self.mask is not None and index > self.mask)

    def _in_files(self, ids: Iterable[int]) -> list[int]:
        """Ids of the model's vocabulary as those of the files."""
        return [i + (self.mask is not None and i >= self.mask) for i in self._known(ids)]

    def file_contents(self) -> bytes:
        return self._loaded.contents

    def to_dict(self) -> dict[str, Any]:
        """Return the class and its arguments. The end token and the size are stored, since only tokenizer.json is copied."""
        end_token = self._loaded.end_token if self.end_token is None else self.end_token
        described = {"kind": type(self).__name__, "path": self.path, "end_token": end_token, "size": self._size}
        return described if self.mask is None else {**described, "mask": self.mask}

    @functools.cached_property
    def _loaded(self) -> "_Loaded":
        loaded = _load(self.path)
        if self.size not in (None, loaded.size):
            raise ValueError(f"{self.path} has {loaded.size:,} tokens, expected {self.size:,}: it is another tokenizer")
        return loaded


class _Loaded(NamedTuple):
    """A tokenizer in memory.

    Args:
        tokenizer: The `tokenizers.Tokenizer`.
        contents: Its tokenizer.json.
        end_token: The token that ends a document; "" for none.
        size: The largest id plus one. It exceeds the number of tokens where ids have gaps.
        byte_level: Its tokens are written in the alphabet of byte-level BPE.
        byte_fallback: Tokens such as <0xE6> stand for one byte.
    """

    tokenizer: Any
    contents: bytes
    end_token: str
    size: int
    byte_level: bool
    byte_fallback: bool

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token within a text."""
        word = self.tokenizer.id_to_token(token) or ""
        added = token in self.tokenizer.get_added_tokens_decoder()
        if self.byte_level and not added:
            return bytes(BYTE_OF[character] for character in word)
        if self.byte_fallback and (byte := BYTE_TOKEN.fullmatch(word)):
            return bytes([int(byte[1], 16)])
        # Decoders treat the first token in a special way (they drop its leading space), so the second one counts.
        once, twice = (self.tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode("utf-8")


def _load(path: str | None) -> _Loaded:
    """Load a tokenizer from a file, a folder or the hub."""
    if path is None:
        raise FileNotFoundError(f"the tokenizer has no {FILE}: copy it into the folder of the checkpoint or of the packed text")
    file = Path(path).expanduser()
    if file.is_dir() and (file / FILE).is_file():
        file = file / FILE
    if file.is_file():
        return _from_json(file.read_bytes(), _configured_end(file.parent / CONFIG), str(file))
    if file.is_dir():
        return _from_transformers(_auto_tokenizer(str(file), local_files_only=True), path)
    if not REPOSITORY.fullmatch(path):
        raise FileNotFoundError(f"there is no tokenizer at {path}: give a {FILE}, a folder, or OWNER/NAME on the hub")
    return _from_transformers(_from_hub(path), path)


@functools.lru_cache(maxsize=4)  # every `Tokens.tokenizer` is a new object with the same contents
def _from_json(contents: bytes, end_token: str, name: str) -> _Loaded:
    """Read the contents of a tokenizer.json."""
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError:
        raise ImportError(f"the tokenizer {name} needs the package tokenizers: pip install tokenizers") from None
    try:
        tokenizer = Backend.from_str(contents.decode("utf-8"))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{name} is not a {FILE} of the package tokenizers ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # otherwise "<|endoftext|>" in a text would end a document
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"{name} has no tokens: train or choose another tokenizer")
    end_token = end_token or next((token for token in END_TOKENS if token in vocabulary), "")
    decoder = json.dumps(json.loads(contents).get("decoder"))
    return _Loaded(
        tokenizer, contents, end_token, max(vocabulary.values()) + 1, '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
    )


def _configured_end(config: Path) -> str:
    """Return the EOS token that a tokenizer_config.json names; "" where it does not exist or names none."""
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(token["content"] if isinstance(token, dict) else token or "")


def _from_transformers(tokenizer: Any, name: str) -> _Loaded:
    """Take the `tokenizers.Tokenizer` out of a tokenizer of transformers."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{name} is a slow tokenizer, which cannot be stored as {FILE}: convert it to a fast one first")
    return _from_json(tokenizer.backend_tokenizer.to_str().encode("utf-8"), tokenizer.eos_token or "", name)


def _auto_tokenizer(name: str, local_files_only: bool) -> Any:
    """Call `AutoTokenizer.from_pretrained`."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"the tokenizer {name} needs transformers ({error}): pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=local_files_only, trust_remote_code=False)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"the tokenizer {name} could not be loaded: {reason}") from error


def _from_hub(name: str) -> Any:
    """Load a tokenizer of the hub: from the cache, or by a download if the hub answers."""
    try:
        return _auto_tokenizer(name, local_files_only=True)
    except ValueError as error:
        not_cached = error
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        if HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        # One request with a short limit: from_pretrained would retry for most of a minute without a connection.
        huggingface_hub.HfApi().model_info(name, timeout=PROBE_SECONDS)
    except Exception as error:  # the package raises errors of the HTTP library as well as its own
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FileNotFoundError(
            f"the tokenizer {name} is not in the local cache, and the Hugging Face hub could not be asked ({reason}): check "
            f"the name and the connection, or copy its {FILE} here and give that file"
        ) from not_cached
    print(f"downloading the tokenizer {name} from the Hugging Face hub", file=sys.stderr)
    return _auto_tokenizer(name, local_files_only=False)
