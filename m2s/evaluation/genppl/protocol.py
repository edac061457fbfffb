"""How published papers computed generative perplexity."""

from dataclasses import dataclass
from typing import Literal

from m2s.evaluation.judge_files import DEFAULT_JUDGE


@dataclass(frozen=True)
class Protocol:
    """What is scored and how it is averaged. A result lists every departure from its protocol.

    Args:
        name: The name for `--protocol`.
        description: Who uses it, and what it does.
        judge: The language model that they used.
        default_judge: The judge where none is given: theirs, or a small one in place of a model behind a license.
        samples: The number of samples; None where they do not say.
        tokens: At most this many tokens of a sample, and of the judge where it tokenizes the text again; None: all.
        retokenize: The judge tokenizes the text again; otherwise it reads the sample's tokens as they are.
        bos: The judge's BOS token goes first, for a judge that was trained with one; otherwise never.
        ends: Which end-of-text tokens count: all, or the first of each sequence.
        average: exp of the mean NLL over all tokens, or the mean of the perplexities of the sequences.
    """

    name: str
    description: str
    judge: str
    default_judge: str
    samples: int | None
    tokens: int | None
    retokenize: bool
    bos: bool
    ends: Literal["all", "first"]
    average: Literal["tokens", "sequences"]


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="paper",
            description="the M2S paper: exp of the mean NLL of the first 512 tokens. Its main table is the best of several "
            "seeds; this is one. It does not say how <|endoftext|> is treated: here it is the judge's end-of-text token, and "
            "counts",
            judge="google/gemma-2-9b",
            default_judge=DEFAULT_JUDGE,
            samples=1024,
            tokens=512,
            retokenize=True,
            bos=True,
            ends="all",
            average="tokens",
        ),
        Protocol(
            name="sedd",
            description="SEDD's released code: the samples' own GPT-2 tokens, no BOS, the mean of the sequences' perplexities",
            judge="gpt2-large",
            default_judge="gpt2-large",
            samples=None,
            tokens=1024,
            retokenize=False,
            bos=False,
            ends="all",
            average="sequences",
        ),
        Protocol(
            name="mdlm",
            description="MDLM's and DUO's released code: the text is tokenized again, and only the first <|endoftext|> of a "
            "sequence counts. Theirs also counts one padding token of a text without any, if its batch has a longer one; this "
            "does not",
            judge="gpt2-large",
            default_judge="gpt2-large",
            samples=None,
            tokens=1024,
            retokenize=True,
            bos=True,
            ends="first",
            average="tokens",
        ),
    )
}
