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
from m2s.data.hub import PARQUET, load_splits
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


# The text of the field: these rules give what the released code of SEDD (Lou et al. 2024) gives, which later papers use too. So
# they are applied one after the other, and have its defects: a pair of apostrophes, for instance, counts as quotation marks.
SPACED_MARKS = ":;.!?,"


def _literal(text: str, replacement: str) -> Rule:
    """A rule that replaces a text as it is."""
    return re.escape(text), replacement.replace("\\", r"\\")


def _without_inner_spaces(opening: str, closing: str) -> Rule:
    """A rule that removes white space inside of brackets or quotation marks."""
    inner = rf"[^{re.escape(closing)}]*?"
    return rf"{re.escape(opening)}\s*({inner})\s*{re.escape(closing)}", rf"{opening}\1{closing}"


def _between_spaces(opening: str, closing: str) -> Rule:
    """A rule that removes single spaces inside of brackets or quotation marks that hold a text."""
    inner = rf"[^{re.escape(opening + closing)}]+"
    return rf"{re.escape(opening)} ({inner}) {re.escape(closing)}", rf"{opening}\1{closing}"


WIKITEXT: tuple[Rule, ...] = (
    _literal("s '", "s'"),
    *(_literal(f" @{mark}@ ", mark) for mark in "-,."),
    *(_literal(f" {mark} ", f"{mark} ") for mark in SPACED_MARKS),
    *(_without_inner_spaces(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    *(_literal(" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    _literal(" ° ", "°"),
    _literal(" \n", "\n"),
    _literal("\n ", "\n"),
    _literal(" N ", " 1 "),
    _literal(" 's", "'s"),
)
PTB: tuple[Rule, ...] = (
    _literal(" 's", "'s"),
    _literal("s ' ", "s' "),
    _literal(" n't", "n't"),
    _literal(" \n ", "\n"),
    _literal("\\/", "/"),
    (r" N(?= )", " 1"),
    (r"([$#]) 1", r"\g<1>1"),
    _literal("<unk>", "?"),
)
LM1B: tuple[Rule, ...] = (
    (r"(https?) : / / ", r"\1://"),
    (r" '(\w+)", r"'\1"),
    (r" (\w+) \. ", r" \1. "),
    (r" (\w+) \.$", r" \1."),
    _literal(" ? ", "? "),
    (r" \?$", "?"),
    _literal(" ! ", "! "),
    (r" !$", "!"),
    *(_literal(f" {mark} ", f"{mark} ") for mark in ",:;"),
    _literal(" / ", "/"),
    *(_between_spaces(*pair) for pair in ('""', "''", "()", "[]")),
    (r"([$£]) ", r"\1"),
)


def detokenize_wikitext(text: str) -> str:
    """Undo the tokenization of WikiText: " @-@ ", spaces around punctuation, brackets, quotation marks and headings.

    Args:
        text: The text.

    Returns:
        Running text.
    """
    return _substitute(text, WIKITEXT)


def detokenize_ptb(text: str) -> str:
    """Undo the tokenization of the Penn Treebank as it is used for language models.

    Args:
        text: The text, in which numbers are N and rare words are <unk>.

    Returns:
        Running text, in which a number is 1 and a rare word is a question mark.
    """
    return _substitute(text, PTB)


def detokenize_lm1b(text: str) -> str:
    """Undo the tokenization of the One Billion Word benchmark: punctuation, contractions, quotation marks, brackets.

    Args:
        text: The text.

    Returns:
        Running text.
    """
    return _substitute(text, LM1B)


def detokenize_lambada(text: str) -> str:
    """Use plain quotation marks, and begin with a new line.

    Args:
        text: The text, as OpenAI published it.

    Returns:
        Running text.
    """
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


def detokenize_scientific(text: str) -> str:
    """Undo the tokenization of the arXiv and PubMed sets of scientific papers: the rules of WikiText, then those of LM1B.

    Args:
        text: The text, in lower case, in which mathematics is @xmath0 and citations are @xcite.

    Returns:
        Running text; the placeholders stay.
    """
    return _substitute(text, (*WIKITEXT, *LM1B))


def unchanged(text: str) -> str:
    """Return the text as it is.

    Args:
        text: The text.
    """
    return text


def without_blank(line: str) -> str:
    """Return a line as it is, and "" for one without text.

    Args:
        line: The line.
    """
    return line if line.strip() else ""


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
        revision: The git revision on the hub; None for the newest.
        line: Makes a document of a line of a .txt file, as the data set of the hub does; None: a .txt has whole documents.
    """

    title: str
    hub: str
    split: str
    detokenize: Callable[[str], str] = unchanged
    wrap: bool = True
    field: str = "text"
    config: str | None = None
    revision: str | None = None
    line: Callable[[str], str] | None = None

    def as_file(self, name: str) -> str:
        """Return Python code that writes the original text as a file for --data.

        Args:
            name: The name of the file, without its ending.
        """
        options = {"revision": self.revision, "split": self.split}
        if self.config is not None:
            options = {"data_dir" if self.revision == PARQUET else "name": self.config, **options}
        listed = ", ".join(f"{key}={value!r}" for key, value in options.items() if value is not None)
        return f"datasets.load_dataset({self.hub!r}, {listed}).to_json('{name}.jsonl')"


TASKS: Registry[Task] = Registry("zero-shot task")
"""The data sets by name, with the splits and rules of the code of SEDD and MDLM. A plugin adds its own."""

_WIKITEXT, _PAPERS, _VALID = "Salesforce/wikitext", "armanc/scientific_papers", "validation"
_PTB, _LM1B = "ptb-text-only/ptb_text_only", "billion-word-benchmark/lm1b"
TASKS.add("ptb", Task("Penn Treebank", _PTB, _VALID, detokenize_ptb, True, "sentence", None, PARQUET, str.strip))
for _size in ("2", "103"):
    _config = f"wikitext-{_size}-raw-v1"
    TASKS.add(
        f"wikitext{_size}",
        Task(f"WikiText-{_size}", _WIKITEXT, _VALID, detokenize_wikitext, config=_config, line=without_blank),
    )
TASKS.add("lm1b", Task("One Billion Words", _LM1B, "test", detokenize_lm1b, revision=PARQUET, line=str.strip))
TASKS.add("lambada", Task("LAMBADA", "EleutherAI/lambada_openai", "test", detokenize_lambada))
TASKS.add("ag_news", Task("AG News", "fancyzhx/ag_news", "test"))
TASKS.add("arxiv", Task("arXiv", _PAPERS, _VALID, detokenize_scientific, True, "article", "arxiv", PARQUET))
TASKS.add("pubmed", Task("PubMed", _PAPERS, _VALID, detokenize_scientific, True, "article", "pubmed", PARQUET))


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
    # A row without text is an end token where documents are joined, as in the code of SEDD and MDLM.
    texts = [(document, task.detokenize(document)) for document in documents if wrap or document.strip()]
    end = [] if tokenizer.end is None else [tokenizer.end]
    encoded = [[*tokenizer.encode(text), *end] for _, text in texts]
    streams = [[token for each in encoded for token in each]] if wrap else encoded
    requests = [request for stream in streams for request in _cut(stream, length, stride)]
    if not any(document.strip() for document in documents):
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
                sources = find_sources(path, "", field)
                return [
                    text for source in sources for each in source.read(0) for text in _documents(task, source.name, each.text)
                ]
            except (BadData, UserError):
                if number == len(fields) or path.suffix == ".txt" or not path.exists():
                    raise
    chosen = (task.config, task.revision) if data in (None, task.hub) else (None, None)
    splits = load_splits(data or task.hub, *chosen)
    if task.split not in splits:
        raise UserError(f"{data or task.hub} has no split {task.split}: give --data with a file")
    return [str(row[task.field]) for row in splits[task.split]]


def _documents(task: Task, name: str, text: str) -> list[str]:
    """The documents that a text of a file holds: its lines, where it is a .txt of a data set whose rows are lines."""
    if task.line is None or not name.endswith(".txt"):
        return [text]
    return [task.line(f"{line}\n") for line in text.removesuffix("\n").split("\n")]


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
