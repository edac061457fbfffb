"""Published perplexities of checkpoints that m2s loads, with what is needed to evaluate them again: `m2s reproduce`.

A figure here is copied from a paper. It is the authors' result on their weights, not ours. `Published.terms` says which terms
of the bound it has: with all of them it would be an upper bound on the perplexity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.data.documents import DocumentSource
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.evaluation.bpd.text import token_windows
from m2s.registry import Registry

Windows = Literal["wrapped", "stream"]
INTEGRAL = "the integral over t from 1e-3 to 1 alone, without the reconstruction: not a bound with all terms"
ALL_TIMES = "the integral over t from 1e-4 to 1 - 1e-4 alone, without prior and reconstruction: not a bound with all terms"


@dataclass(frozen=True)
class Published:
    """A published perplexity.

    Args:
        title: The model and the text, in a few words.
        checkpoint: The released checkpoint, on the Hugging Face hub.
        perplexity: The figure.
        terms: What it consists of.
        text: The text that it was measured on.
        obtain: How to get the text as a file, which --data takes.
        length: The tokens of a window.
        windows: "wrapped": windows begin and end with the end token, between them length - 2 tokens of the text. "stream":
            the text is cut into windows.
        reference: The paper and its table.
        protocol: How the authors measured it.
    """

    title: str
    checkpoint: str
    perplexity: float
    terms: str
    text: str
    obtain: str
    length: int
    windows: Windows
    reference: str
    protocol: str


PUBLISHED: Registry[Published] = Registry("published result")
"""Published results by the name that `m2s reproduce` takes."""


def cut_windows(
    sources: Sequence[DocumentSource], tokenizer: Tokenizer, length: int, windows: Windows
) -> tuple[Int[Tensor, "N L"], int]:
    """Tokenize documents, each with the end token after it, and cut them into windows as a protocol does.

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
        return token_windows(sources, tokenizer, length)
    end = tokenizer.end
    if end is None:
        raise UserError(f"{tokenizer} has no end token, which windows of this protocol begin and end with")
    if length < 3:
        raise UserError(option="length", value=length, expected="at least 3", hint="two tokens of a window are end tokens")
    inner, left_out = token_windows(sources, tokenizer, length - 2)
    ends = torch.full((len(inner), 1), end, dtype=inner.dtype)
    return torch.cat([ends, inner, ends], 1), left_out


OWT = "the last 100,000 documents of OpenWebText"
OWT_FILE = "datasets.load_dataset('Skylion007/openwebtext', split='train[-100000:]').to_json('owt.jsonl')"
SAHOO = "Sahoo et al. 2024, Simple and Effective Masked Diffusion Language Models"
LOU = "Lou et al. 2024, Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution"
DUALITY = "Sahoo et al. 2025, The Diffusion Duality"
GIDD = "von Rutte et al. 2025, Generalized Interpolating Discrete Diffusion"
UNCHECKED = "not compared with the paper yet"
ONE_TIME = "one time per window, times spread evenly over a batch, bfloat16, averaged weights"
MANY_TIMES = "the mean over 1,000 times per window"

PUBLISHED.add(
    "mdlm-owt",
    Published(
        title="MDLM on OpenWebText",
        checkpoint="kuleshov-group/mdlm-owt",
        perplexity=23.21,
        terms=INTEGRAL,
        text=OWT,
        obtain=OWT_FILE,
        length=1024,
        windows="wrapped",
        reference=f"{SAHOO}, table 2; {UNCHECKED}",
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
        text=OWT,
        obtain=OWT_FILE,
        length=512,
        windows="stream",
        reference=f"{GIDD}, table of small models",
        protocol="one time per window, a random window of each document, padded where it is short; windows here are not padded",
    ),
)
ZERO_SHOT = {  # the set: its text, and the field of a document or what to do with it
    "ptb": ("the validation text of Penn Treebank (ptb_text_only)", "detokenize it as the authors do, and write it as .txt"),
    "wikitext": ("the validation text of WikiText-103 (raw)", "detokenize it as the authors do, and write it as .txt"),
    "wikitext2": ("the validation text of WikiText-2 (raw)", "detokenize it as the authors do, and write it as .txt"),
    "lm1b": ("the test sentences of LM1B", "detokenize them as the authors do, and write them as .txt"),
    "lambada": ("the test texts of LAMBADA (OpenAI's lambada_test.jsonl)", "download the file"),
    "ag_news": ("the test texts of AG News", "datasets.load_dataset('ag_news', split='test').to_json('ag_news.jsonl')"),
    "pubmed": ("the validation articles of Scientific Papers, PubMed", "detokenize them as the authors do, and write .txt"),
    "arxiv": ("the validation articles of Scientific Papers, arXiv", "detokenize them as the authors do, and write .txt"),
}
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
for _set, _value in MDLM_ZERO_SHOT.items():
    PUBLISHED.add(
        f"mdlm-{_set}",
        Published(
            f"MDLM on {_set}, zero-shot", "kuleshov-group/mdlm-owt", _value, INTEGRAL, *ZERO_SHOT[_set], 1024, "wrapped",
            f"{SAHOO}, table of zero-shot perplexities; {UNCHECKED}", ONE_TIME,
        ),
    )  # fmt: skip
for _size, _values in SEDD_ZERO_SHOT.items():
    for _set, _value in _values.items():
        PUBLISHED.add(
            f"sedd-{_size}-{_set}",
            Published(
                f"SEDD absorb {_size} on {_set}, zero-shot", f"louaaron/sedd-{_size}", _value, INTEGRAL, *ZERO_SHOT[_set], 1024,
                "stream", f"{LOU}, table 1; {UNCHECKED}", MANY_TIMES,
            ),
        )  # fmt: skip
