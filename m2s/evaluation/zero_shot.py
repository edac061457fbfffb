"""Zero-shot perplexity of text, as papers report it: data sets, detokenizers and the rule that makes windows.

Published numbers differ by the detokenizer, by whether documents are joined before they are cut, by the stride of windows and
by the unit (a token of the model's tokenizer, or a word of the original text). A `Task` states the first, `make_windows` the
rest.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from m2s.data.documents import TEXT, find_sources
from m2s.data.files import BadData
from m2s.data.hub import load_splits
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.evaluation.likelihood.conditional import Request
from m2s.io import is_likely_local
from m2s.registry import Registry

Rule = tuple[str, str]


def _substitute(text: str, rules: Iterable[Rule]) -> str:
    """Apply regular expressions in order."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


# Spaces that word tokenizers put before punctuation and inside of brackets.
PUNCTUATION: tuple[Rule, ...] = (
    (r" ([.,:;?!%])(?=\s|$|['\")\]])", r"\1"),
    (r"([(\[{]) ", r"\1"),
    (r" ([)\]}])", r"\1"),
)
CONTRACTIONS: tuple[Rule, ...] = ((r" (n't|'s|'re|'ve|'ll|'d|'m)\b", r"\1"), (r"(?<=s) '(?=\s|$)", "'"))


def paired_quotes(text: str, quote: str = '"') -> str:
    """Remove the spaces inside of quotation marks: the first, third, ... opens, and the others close.

    Args:
        text: The text; marks are counted within each line.
        quote: The mark, surrounded by spaces.

    Returns:
        The text.
    """
    lines = []
    for line in text.split("\n"):
        parts = line.split(quote)
        for number in range(1, len(parts), 2):
            if number < len(parts) - 1:  # a mark without its partner stays as it is
                parts[number] = parts[number].strip(" ")
        lines.append(quote.join(parts))
    return "\n".join(lines)


def detokenize_wikitext(text: str) -> str:
    """Undo the tokenization of WikiText: " @-@ ", spaces around punctuation, quotation marks, headings.

    Args:
        text: The text.

    Returns:
        Running text.
    """
    text = _substitute(text, ((r" @([-,.])@ ", r"\1"), *PUNCTUATION, *CONTRACTIONS, (r"(?<=\d) ' (?=\d)", "'")))
    text = _substitute(paired_quotes(text), ((r"= = = =", "===="), (r"= = =", "==="), (r"= =", "=="), (r" ° ", "°")))
    return _substitute(text, ((r" ?\n ?", "\n"), (r"\bN (?=\d)", "N "), (r"£ (?=\d)", "£"), (r"\$ (?=\d)", "$")))


def detokenize_ptb(text: str) -> str:
    """Undo the tokenization of the Penn Treebank as it is used for language models: " n't", " 's", "$ N", punctuation.

    Args:
        text: The text, in which numbers are N and rare words are <unk>.

    Returns:
        Running text; N and <unk> stay.
    """
    rules = (*CONTRACTIONS, *PUNCTUATION, (r"\$ (?=N|\d)", "$"), (r"\bu\.s \.", "u.s."), (r" N %", " N%"), (r" ?\\/ ?", "/"))
    return _substitute(text, (*rules, (r"(?<=\w) '(?= \w)", "'"), (r"^ +| +$", ""), (r" ?\n ?", "\n")))


def detokenize_lm1b(text: str) -> str:
    """Undo the tokenization of the One Billion Word benchmark: quotation marks in pairs, contractions, punctuation.

    Args:
        text: The text.

    Returns:
        Running text.
    """
    text = _substitute(text, ((r"\bhttp : / / ", "http://"), (r"\bhttps : / / ", "https://"), *CONTRACTIONS, *PUNCTUATION))
    text = paired_quotes(text)
    return _substitute(text, ((r"(\w) \'(\w+)", r"\1'\2"), (r"\$ (?=\d)", "$"), (r"£ (?=\d)", "£"), (r" ?\n ?", "\n")))


def detokenize_lambada(text: str) -> str:
    """Normalize the quotation marks of LAMBADA, as its OpenAI version does, and undo spaces around punctuation.

    Args:
        text: The text.

    Returns:
        Running text.
    """
    for typographic, plain in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("``", '"'), ("''", '"')):
        text = text.replace(typographic, plain)
    text = _substitute(text, (*CONTRACTIONS, *PUNCTUATION))
    return "\n" + paired_quotes(text).strip()


def detokenize_scientific(text: str) -> str:
    """Undo the tokenization of the arXiv and PubMed sets of scientific papers: spaces before punctuation and in brackets.

    Args:
        text: The text, in lower case, in which mathematics is @xmath0 and citations are @xcite.

    Returns:
        Running text; the placeholders stay.
    """
    return _substitute(text, (*PUNCTUATION, *CONTRACTIONS, (r" ?\n ?", "\n")))


def unchanged(text: str) -> str:
    """Return the text as it is.

    Args:
        text: The text.
    """
    return text


@dataclass(frozen=True)
class Task:
    """A data set of the zero-shot suite.

    Args:
        title: Its name.
        hub: A data set of the Hugging Face hub with it.
        split: The split that papers use.
        detokenize: Turns a document into running text.
        wrap: Whether papers join documents before they cut windows.
        field: The column of the text on the hub.
        config: The configuration of the data set on the hub.
    """

    title: str
    hub: str
    split: str
    detokenize: Callable[[str], str] = unchanged
    wrap: bool = True
    field: str = "text"
    config: str | None = None


TASKS: Registry[Task] = Registry("zero-shot task")
"""The data sets by name. A plugin adds its own."""

TASKS.add("ptb", Task("Penn Treebank", "ptb_text_only", "test", detokenize_ptb, field="sentence"))
TASKS.add("wikitext2", Task("WikiText-2", "Salesforce/wikitext", "test", detokenize_wikitext, config="wikitext-2-raw-v1"))
TASKS.add("wikitext103", Task("WikiText-103", "Salesforce/wikitext", "test", detokenize_wikitext, config="wikitext-103-raw-v1"))
TASKS.add("lm1b", Task("One Billion Words", "billion-word-benchmark/lm1b", "test", detokenize_lm1b, wrap=False))
TASKS.add("lambada", Task("LAMBADA", "EleutherAI/lambada_openai", "test", detokenize_lambada, wrap=False))
TASKS.add("ag_news", Task("AG News", "fancyzhx/ag_news", "test", detokenize_lm1b))
TASKS.add("arxiv", Task("arXiv", "armanc/scientific_papers", "test", detokenize_scientific, field="article", config="arxiv"))
TASKS.add("pubmed", Task("PubMed", "armanc/scientific_papers", "test", detokenize_scientific, field="article", config="pubmed"))


@dataclass(frozen=True)
class Windows:
    """The windows of a text, and what its likelihood is divided by.

    Args:
        requests: Windows; the tokens before the predicted ones are their context.
        tokens: The number of predicted tokens, end tokens included.
        words: The number of words of the documents before detokenization, and one for the end of each document.
        characters: The number of characters after detokenization.
        documents: The number of documents.
        rule: How the windows were made, in words.
    """

    requests: list[Request]
    tokens: int
    words: int
    characters: int
    documents: int
    rule: str


def make_windows(
    documents: Sequence[str], task: Task, tokenizer: Tokenizer, length: int, wrap: bool | None = None, stride: int | None = None
) -> Windows:
    """Detokenize, tokenize and cut documents. Every token is predicted exactly once.

    Args:
        documents: The documents.
        task: The data set.
        tokenizer: The tokenizer.
        length: The number of tokens of a window.
        wrap: Whether documents are joined by the end token and then cut; None: what papers do for this data set. Otherwise
            every document is cut by itself.
        stride: The number of tokens that a window predicts; the others are its context. None: all.

    Returns:
        The windows.

    Raises:
        UserError: There is no text, or the stride is out of range.
    """
    wrap, stride = task.wrap if wrap is None else wrap, length if stride is None else stride
    if not 1 <= stride <= length:
        raise UserError(option="stride", value=stride, expected=f"between 1 and the length {length}")
    texts = [(document, task.detokenize(document)) for document in documents if document.strip()]
    end = [] if tokenizer.end is None else [tokenizer.end]
    encoded = [[*tokenizer.encode(text), *end] for _, text in texts]
    streams = [[token for each in encoded for token in each]] if wrap else encoded
    requests = [request for stream in streams for request in _cut(stream, length, stride)]
    if not requests:
        raise UserError("the data holds no text")
    joined = "documents joined by the end token, then cut" if wrap else "every document cut by itself, with the end token"
    words = sum(len(document.split()) for document, _ in texts) + len(texts)
    rule = f"{joined}; windows of {length} tokens, of which up to {stride} are predicted"
    return Windows(requests, sum(map(len, streams)), words, sum(len(text) for _, text in texts), len(texts), rule)


def read_documents(task: Task, data: str | None = None) -> list[str]:
    """Read the documents of a task.

    Args:
        task: The data set.
        data: A file or folder of .txt, .jsonl or .parquet, or a data set OWNER/NAME of the hub; None: that of the task.

    Returns:
        The documents, not detokenized.

    Raises:
        UserError: There is no such file or data set.
        BadData: It cannot be read.
    """
    path = None if data is None else Path(data).expanduser()
    if path is not None and (path.exists() or is_likely_local(data or "")):
        fields = dict.fromkeys((TEXT, task.field))
        for number, field in enumerate(fields, 1):
            try:
                return [document.text for source in find_sources(path, "", field) for document in source.read(0)]
            except (BadData, UserError):
                if number == len(fields) or path.suffix == ".txt" or not path.exists():
                    raise
    splits = load_splits(data or task.hub, task.config if data in (None, task.hub) else None)
    if task.split not in splits:
        raise UserError(f"{data or task.hub} has no split {task.split}: give --data with a file")
    return [str(row[task.field]) for row in splits[task.split]]


def _cut(stream: Sequence[int], length: int, stride: int) -> Iterable[Request]:
    """The windows of one stream: the first predicts all of its tokens, the others up to `stride`, with the rest as context."""
    first = 0
    while first < len(stream):
        if first == 0:
            count = min(length, len(stream))
            yield Request((), tuple(stream[:count]))
        else:
            count = min(stride, len(stream) - first)
            start = first if stride == length else max(0, first + count - length)
            yield Request(tuple(stream[start:first]), tuple(stream[first : first + count]))
        first += count
