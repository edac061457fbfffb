"""Tokenizers of the checkpoints of other projects: GPT-2's from its merges, others from a tokenizer.json."""

from pathlib import Path

from m2s.data.tokenizer import GPT2, HuggingFace, Tokenizer
from m2s.hub.formats.dit import Vocabulary

FILE = "tokenizer.json"
GPT2_TOKENS = 50_257
BERT_TOKENS, BERT_MASK = 30_522, 103  # of bert-base-uncased


def find_tokenizer(folder: Path, vocabulary: Vocabulary) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint.

    Args:
        folder: Its folder.
        vocabulary: Its token ids.

    Returns:
        The one of a tokenizer.json in the folder. Otherwise GPT-2's, where the vocabulary begins with its tokens and its merges
        are on this machine. None where neither is there, or a package is missing.

    Raises:
        ValueError: The tokenizer.json has another number of tokens than the checkpoint.
    """
    if (folder / FILE).is_file():
        mask = None if vocabulary.mask is None or vocabulary.mask >= tokens_in(folder) else vocabulary.mask
        found: Tokenizer = HuggingFace(str(folder / FILE), mask=mask)
        if not _usable(found):
            return None
        if found.vocab == vocabulary.clean:
            return found
        if not _is_gpt2(vocabulary):
            raise ValueError(
                f"{folder / FILE} has {found.vocab:,} clean tokens, but the checkpoint has {vocabulary.clean:,}: it is the "
                "tokenizer of another model"
            )
    if _is_gpt2(vocabulary):
        found = GPT2(extra=vocabulary.clean - GPT2_TOKENS)
        return found if _usable(found) else None
    return None


def tokenizer_hint(vocabulary: Vocabulary) -> str:
    """Return what to do where `find_tokenizer` found none.

    Args:
        vocabulary: The token ids of the checkpoint.
    """
    if _is_gpt2(vocabulary):
        try:
            GPT2(extra=vocabulary.clean - GPT2_TOKENS).encode("")
        except (FileNotFoundError, ImportError) as error:
            return str(error)
    return f"put the {FILE} of its tokenizer beside the weights (reading it needs pip install tokenizers)"


def gpt2_without_merges(vocabulary: Vocabulary) -> Tokenizer | None:
    """Return GPT-2's tokenizer where the vocabulary has its tokens and its merges are not on this machine; else None.

    Args:
        vocabulary: The token ids of a checkpoint.
    """
    if not _is_gpt2(vocabulary):
        return None
    found = GPT2(extra=vocabulary.clean - GPT2_TOKENS)
    try:
        found.encode("")
    except FileNotFoundError:
        return found
    except ImportError:
        return None
    return None


def _is_gpt2(vocabulary: Vocabulary) -> bool:
    """Whether the clean tokens are GPT-2's, and perhaps [PAD] after them."""
    return vocabulary.clean - GPT2_TOKENS in (0, 1) and vocabulary.mask in (None, vocabulary.clean)


def _usable(tokenizer: Tokenizer) -> bool:
    """Whether the files and packages of a tokenizer are on this machine."""
    try:
        tokenizer.encode("")
    except (FileNotFoundError, ImportError):
        return False
    return True


def tokens_in(folder: Path) -> int:
    """Return the number of token ids of a tokenizer.json; 0 where it does not exist or cannot be read.

    Args:
        folder: The folder.
    """
    try:
        return HuggingFace(str(folder / FILE)).vocab if (folder / FILE).is_file() else 0
    except ImportError:
        return 0


def find_mask(folder: Path, size: int, tokenizer: str | None = None) -> int:
    """Return the id of the mask of a model with masks.

    MDLM takes the mask token of its tokenizer, where it has one, and otherwise adds one after the last token.

    Args:
        folder: The folder of the checkpoint.
        size: The number of ids, with the mask.
        tokenizer: The name of the tokenizer, where the configuration has it.

    Returns:
        103 for bert-base-uncased; 4 for the characters of text8; the last id after GPT-2's tokens; otherwise the id of [MASK]
        in the folder's tokenizer.json.

    Raises:
        ValueError: None of these is known.
    """
    if size == GPT2_TOKENS + 1:
        return GPT2_TOKENS
    if tokenizer == "bert-base-uncased" or size == BERT_TOKENS:
        return BERT_MASK
    if tokenizer == "text8":
        return 4
    found = mask_in(folder)
    if found is not None and found < size:
        return found
    if tokens_in(folder) == size - 1:  # the tokenizer has no mask: it is added after its last token
        return size - 1
    raise ValueError(
        f"the checkpoint has {size:,} token ids and does not say which is the mask: copy the {FILE} of its tokenizer into "
        f"{folder}"
    )


def mask_in(folder: Path) -> int | None:
    """Return the id of [MASK] in a tokenizer.json; None where there is none.

    Args:
        folder: The folder.
    """
    if not (folder / FILE).is_file():
        return None
    try:
        return HuggingFace(str(folder / FILE)).token_id("[MASK]")
    except ImportError:
        return None
