"""Write docs/checkpoints.md from the registry of formats: python -m m2s.hub.docs_page > docs/checkpoints.md."""

import json
from pathlib import Path

from m2s.hub.formats import FORMATS

RELEASES = Path(__file__).parents[2] / "experiments" / "results" / "releases.json"

INTRODUCTION = """# Checkpoints of other projects

`m2s.load` and every command that takes a checkpoint read the files that these projects publish. Each arrives as a network, a
head, a process and a tokenizer, as if it had been trained here:

```text
m2s sample kuleshov-group/mdlm-owt --n 4 --out samples.txt     # from the Hugging Face hub
m2s certify duo.ckpt --data texts/                             # a Lightning checkpoint: its bound with a 95 % limit
m2s audit louaaron/sedd-small --n 16 --out audit/              # do its scores have a posterior?
m2s convert kuleshov-group/mdlm-owt runs/mdlm                  # as a folder of m2s
```

In Python: `model, head = m2s.load("kuleshov-group/mdlm-owt")`, then `m2s.sample(model, head, (4, 1024), steps=128)`.

No package of these projects is needed, and no flash-attn. No code of a checkpoint is run. Pickles are read by a list of
allowed operations (`m2s/hub/pickles.py`): what a pickle would import or call is replaced by an object that does nothing. The
loaders are strict: a missing or unexpected tensor, or one of another shape, is an error that lists it. Averaged (EMA) weights
are used where the file has them.

## What m2s loads
"""

NOTES = """
GPT-2's tokenizer is read from its list of merges. Commands download the list where it is missing (0.5 MB). `m2s.load` does
not: run `m2s data download gpt2` before. Another tokenizer needs its `tokenizer.json` beside the weights. Without it the
checkpoint loads, samples are token ids, and `checkpoint.tokenizer` is None. A mask that is not the last id of its vocabulary
becomes the last state: rows of the embedding and of the last layer are reordered, and the tokenizer leaves
the mask out.

MD4 has released code and no weights. Its training does not store its configuration: write it as `config.json`. The arrays are
read without JAX, which needs tensorstore (`pip install "m2s-diffusion[orbax]"`). Its U-Net for images is not loaded.

A state of SEDD or RADD, checkpoint.pth, holds weights alone. The number of heads and the noise are in `.hydra/config.yaml` of
the run, which must be beside it or one folder up.

Some differences to the code of the authors remain:

- GIDD pads the vocabulary to a multiple of 128 rows in a folder of its training, and has them in its softmax. Here they are
  left out.
- MDLM, DUO and BD3-LM put <|endoftext|> at both ends of every window of text. BD3-LM never masks the first one. For samples as
  theirs, clamp the first token (`clamp` of `m2s.sample`).
- GIDD is trained on documents that begin and end with <|endoftext|>, and are padded.
- A network of BD3-LM with smaller blocks is not loaded: it gives no posterior of all positions at once.

A layout of your own is one registration, also in a plugin. [The page on Python](python.md#the-hugging-face-hub) has the rest
of `m2s.hub`:

```python
from m2s.hub.formats import FORMATS, CheckpointFormat

print(", ".join(FORMATS))  # each has recognize(place) and load(place, settings)
print(FORMATS["mdlm"].layout)
```

## Denoisers of transformers

`m2s.from_transformers(model, process)` takes a network of the package transformers that returns logits for token ids: LLaDA,
Dream, DiffusionGemma, BERT. It is given tokens alone. Its mask may be anywhere in its vocabulary, and columns that belong to no
token are ignored. The logits of Dream predict the next position, and are shifted. A causal network is an error.

```python
import torch
from transformers import BertConfig, BertForMaskedLM

import m2s

config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
process = m2s.Absorbing(23, m2s.Linear())  # 24 ids, of which 4 is the mask; the other columns are padding
checkpoint = m2s.from_transformers(BertForMaskedLM(config), process, mask=4, length=8)
ids = checkpoint.model.to_network(checkpoint.sample(2, steps=4))  # in BERT's ids
```

## How this is tested

`tests/hub` has each architecture once more, as a plain function in float64 that was written from the paper. Loaded networks
agree with it to 1e-10 on random weights. The released weights are not part of the tests.

`scripts/compare_release.py` compares a loader with the network of the authors, imported from a clone of their repository. This
was done by hand, in float32, on random weights of a small size. The column *parameters* counts their network at the published
size. `experiments/results/releases.json` has the commits.
"""


def formats_table() -> str:
    """Return the table of formats, in Markdown."""
    rows = [
        f"| {entry.title} | {entry.layout} | {entry.process} | {entry.time} | {entry.tokenizer} |" for entry in FORMATS.values()
    ]
    head = "| checkpoint | files, and what they are recognized by | process; head | the network is given | tokenizer |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def releases_table(results: Path = RELEASES) -> str:
    """Return the table of comparisons with the code of the authors, in Markdown.

    Args:
        results: The results of `scripts/compare_release.py`.
    """
    found = json.loads(results.read_text())
    rows = [
        f"| {name} | [{one['repository']}](https://github.com/{one['repository']}) | {one['parameters']:,} | "
        f"{one['largest_output']:.1f} | {one['largest_difference']:.1e} |"
        for name, one in found.items()
    ]
    head = "| loader | code of the authors | parameters | largest output | largest difference |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def page() -> str:
    """Return the text of docs/checkpoints.md."""
    return "\n".join([INTRODUCTION, formats_table(), NOTES, releases_table(), ""])


if __name__ == "__main__":
    print(page(), end="")
