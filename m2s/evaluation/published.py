"""Published perplexities of checkpoints that m2s loads, with what is needed to evaluate them again: `m2s reproduce`.

A figure here is copied from a paper. It is the authors' result on their weights, not ours. `Published.terms` says which terms
of the bound it has: with all of them it would be an upper bound on the perplexity. `Published.estimator` is what the authors'
code computes: often the mean over times in [0.001, 1) in place of the integral, which is 0.1 % more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.data.documents import Document, DocumentSource, find_sources
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.evaluation.bpd.text import token_windows
from m2s.evaluation.zero_shot import TASKS, read_documents
from m2s.registry import Registry

Windows = Literal["wrapped", "stream"]
INTEGRAL = "the mean over t from 1e-3 to 1 for the integral, without the reconstruction: not a bound with all terms"
ALL_TIMES = (
    "the mean over t from 1e-4 to 1 - 1e-4 for the integral, without prior and reconstruction: not a bound with all terms"
)


@dataclass(frozen=True)
class Published:
    """A published perplexity.

    Args:
        title: The model and the text, in a few words.
        checkpoint: The released checkpoint, on the Hugging Face hub.
        perplexity: The figure.
        terms: What it consists of.
        estimator: What the authors' code computes, an entry of `m2s.evaluation.likelihood.ESTIMATORS`.
        text: The text that it was measured on.
        obtain: How to get the text as a file, which --data takes.
        length: The tokens of a window.
        windows: "wrapped": windows begin and end with the end token, between them length - 2 tokens of the text. "stream":
            the text is cut into windows.
        reference: The paper and its table.
        protocol: How the authors measured it.
        task: The entry of `m2s.evaluation.zero_shot.TASKS` that detokenizes the text; empty: it is running text.
    """

    title: str
    checkpoint: str
    perplexity: float
    terms: str
    estimator: str
    text: str
    obtain: str
    length: int
    windows: Windows
    reference: str
    protocol: str
    task: str = ""


PUBLISHED: Registry[Published] = Registry("published result")
"""Published results by the name that `m2s reproduce` takes."""


def read_text(entry: Published, data: str) -> list[DocumentSource]:
    """Read the text that a figure was measured on.

    Args:
        entry: The published figure.
        data: A file or folder of .txt, .jsonl or .parquet with the original text.

    Returns:
        The documents; of a task of the zero-shot suite they are detokenized.

    Raises:
        UserError: There is no such file.
        BadData: It cannot be read.
    """
    if not entry.task:
        return find_sources(data, test="")
    task = TASKS[entry.task]
    documents = [Document(task.detokenize(text), f"row {row}") for row, text in enumerate(read_documents(task, data), 1)]
    return [DocumentSource(Path(data).name, lambda skip: iter(documents[skip:]), {}, None)]


def cut_windows(
    sources: Sequence[DocumentSource], tokenizer: Tokenizer, length: int, windows: Windows
) -> tuple[Int[Tensor, "N L"], int]:
    """Tokenize documents, each with the end token after it, and cut them into windows as a protocol does.

    A document without text is its end token, as in the code of SEDD and MDLM.

    Args:
        sources: The documents.
        tokenizer: The tokenizer.
        length: The tokens of a window.
        windows: As in `Published`.

    Returns:
        The windows [N, length], and the number of tokens that are left out at the end.

    Raises:
        UserError: The tokenizer has no end token, or a window has no place for the text.
    """
    if windows == "stream":
        return token_windows(sources, tokenizer, length, blank=True)
    end = tokenizer.end
    if end is None:
        raise UserError(f"{tokenizer} has no end token, which windows of this protocol begin and end with")
    if length < 3:
        raise UserError(option="length", value=length, expected="at least 3", hint="two tokens of a window are end tokens")
    inner, left_out = token_windows(sources, tokenizer, length - 2, blank=True)
    ends = torch.full((len(inner), 1), end, dtype=inner.dtype)
    return torch.cat([ends, inner, ends], 1), left_out


OWT = "the last 100,000 documents of OpenWebText"
OWT_FILE = "datasets.load_dataset('Skylion007/openwebtext', split='train[-100000:]').to_json('owt.jsonl')"
SAHOO = "Sahoo et al. 2024, Simple and Effective Masked Diffusion Language Models"
LOU = "Lou et al. 2024, Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution"
DUALITY = "Sahoo et al. 2025, The Diffusion Duality"
GIDD = "von Rutte et al. 2025, Generalized Interpolating Discrete Diffusion"
RADD = "Ou et al. 2025, Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean Data"
SEDD_QUOTED = "Ou et al. 2025 quote the same value in tables 1 and 2"
MDLM_QUOTED = "the papers on EDLM and LangFlow quote the same value"
DUO_QUOTED = "as the paper on LangFlow quotes it"
SHARES = "the cross entropy at all shares of masks: an upper bound, for a model that is sampled over shares of masks"
ONE_TIME = "one time per window, times spread evenly over a batch, bfloat16, averaged weights"
MANY_TIMES = "the mean over 1,000 times per window"
MANY_SHARES = "the loss of training, averaged over shares of masks"

PUBLISHED.add(
    "mdlm-owt",
    Published(
        title="MDLM on OpenWebText",
        checkpoint="kuleshov-group/mdlm-owt",
        perplexity=23.21,
        terms=INTEGRAL,
        estimator="mdlm",
        text=OWT,
        obtain=OWT_FILE,
        length=1024,
        windows="wrapped",
        reference=f"{SAHOO}, table 2; the paper on GIDD quotes the same value",
        protocol=ONE_TIME,
    ),
)
PUBLISHED.add(
    "duo-owt",
    Published(
        title="DUO on OpenWebText",
        checkpoint="s-sahoo/duo",
        perplexity=25.2,
        terms=INTEGRAL,
        estimator="duo",
        text=OWT,
        obtain=OWT_FILE,
        length=1024,
        windows="wrapped",
        reference=f"{DUALITY}, table of OpenWebText",
        protocol=ONE_TIME,
    ),
)
PUBLISHED.add(
    "gidd-small-owt",
    Published(
        title="GIDD+ small with p_uniform = 0 on OpenWebText",
        checkpoint="dvruette/gidd-small-p_unif-0.0",
        perplexity=22.29,
        terms=ALL_TIMES,
        estimator="gidd",
        text=OWT,
        obtain=OWT_FILE,
        length=512,
        windows="stream",
        reference=f"{GIDD}, table of small models",
        protocol="one time per window, a random window of each document, padded where it is short; windows here are not padded",
    ),
)
ZERO_SHOT_TASKS = {name: name for name in ("ptb", "wikitext2", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")}
ZERO_SHOT_TASKS["wikitext"] = "wikitext103"
MDLM_ZERO_SHOT = {
    "ptb": 95.26,
    "wikitext": 32.83,
    "lm1b": 67.01,
    "lambada": 47.52,
    "ag_news": 61.15,
    "pubmed": 41.89,
    "arxiv": 37.37,
}
SEDD_ZERO_SHOT = {
    "small": {"lambada": 50.92, "wikitext2": 41.84, "ptb": 114.24, "wikitext": 40.62, "lm1b": 79.29},
    "medium": {"lambada": 42.77, "wikitext2": 31.04, "ptb": 87.12, "wikitext": 29.98, "lm1b": 61.19},
}
RADD_ZERO_SHOT = {"lambada": 51.70, "wikitext2": 39.98, "ptb": 107.85, "wikitext": 37.98, "lm1b": 72.99}
DUO_ZERO_SHOT = {
    "ptb": 89.35,
    "wikitext": 33.57,
    "lm1b": 73.86,
    "lambada": 49.78,
    "ag_news": 67.81,
    "pubmed": 44.48,
    "arxiv": 40.39,
}


def _add_zero_shot(
    prefix: str,
    title: str,
    checkpoint: str,
    values: Mapping[str, float],
    estimator: str,
    windows: Windows,
    reference: str,
    protocol: str,
) -> None:
    """Add the perplexities of a checkpoint on the zero-shot suite."""
    for name, value in values.items():
        task = TASKS[ZERO_SHOT_TASKS[name]]
        PUBLISHED.add(
            f"{prefix}-{name}",
            Published(
                title=f"{title} on {task.title}, zero-shot",
                checkpoint=checkpoint,
                perplexity=value,
                terms=SHARES if estimator == "radd" else INTEGRAL,
                estimator=estimator,
                text=f"the {task.split} split of {task.title}",
                obtain=task.as_file(name),
                length=1024,
                windows=windows,
                reference=reference,
                protocol=protocol,
                task=ZERO_SHOT_TASKS[name],
            ),
        )


_SAHOO_TABLE = f"{SAHOO}, table of zero-shot perplexities; {MDLM_QUOTED}"
_DUALITY_TABLE = f"{DUALITY}, table of zero-shot perplexities, {DUO_QUOTED}"
_add_zero_shot("mdlm", "MDLM", "kuleshov-group/mdlm-owt", MDLM_ZERO_SHOT, "mdlm", "wrapped", _SAHOO_TABLE, ONE_TIME)
_add_zero_shot("duo", "DUO", "s-sahoo/duo", DUO_ZERO_SHOT, "duo", "stream", _DUALITY_TABLE, ONE_TIME)
for _size, _values in SEDD_ZERO_SHOT.items():
    _place, _table = f"louaaron/sedd-{_size}", f"{LOU}, table 1; {SEDD_QUOTED}"
    _add_zero_shot(f"sedd-{_size}", f"SEDD absorb {_size}", _place, _values, "sedd", "stream", _table, MANY_TIMES)
_PLACE, _TABLE = "JingyangOu/radd-lambda-dce", f"{RADD}, table 1"
_add_zero_shot("radd", "RADD small, lambda-DCE,", _PLACE, RADD_ZERO_SHOT, "radd", "stream", _TABLE, MANY_SHARES)
