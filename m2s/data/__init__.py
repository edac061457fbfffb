"""Data sets and tokenizers. An image data set is one file here and one name in the list below; text is prepared once.

images = m2s.data.load("mnist")                      # .train and .test [N, L] uint8, labels, .vocab, .shape
m2s.data.prepare_text("texts/", "packed/", tokenizer)      # any folder of .txt, .jsonl or .parquet
tokens = m2s.data.Tokens("packed/", "train", length=512)   # tokens[i] is [512] int64
for indices in m2s.data.batches(len(tokens), global_batch=64, seed=0, start=step):
    x_0 = tokens[indices]
"""

from pathlib import Path

from m2s.data.cifar10 import CIFAR10
from m2s.data.digits import DIGITS
from m2s.data.files import BadData, root
from m2s.data.images import Images, ImageSet
from m2s.data.mnist import MNIST
from m2s.data.order import batch_indices, batches
from m2s.data.text import prepare_text
from m2s.data.tokenizer import GPT2, Bytes, Characters, Tokenizer
from m2s.data.tokens import Tokens, check_text
from m2s.errors import UserError

DATASETS = {images.name: images for images in (DIGITS, MNIST, CIFAR10)}


def load(name: str, folder: Path | str | None = None, hub: bool = False) -> Images:
    """The image data set `name`, from `folder` (default: $M2S_DATA/name) or, with `hub`, from the Hugging Face hub."""
    if name not in DATASETS:
        raise UserError(f"there is no data set {name!r}: choose from {', '.join(DATASETS)}")
    return DATASETS[name].load(folder, hub)


__all__ = [
    "DATASETS",
    "GPT2",
    "BadData",
    "Bytes",
    "Characters",
    "ImageSet",
    "Images",
    "Tokenizer",
    "Tokens",
    "batch_indices",
    "batches",
    "check_text",
    "load",
    "prepare_text",
    "root",
]
