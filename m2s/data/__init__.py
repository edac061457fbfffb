"""Data sets and tokenizers.

    images = m2s.data.load("mnist")                            # .train and .test [N, L] uint8, labels, .vocab, .shape
    m2s.data.prepare_text("texts/", "packed/", tokenizer)      # any folder of .txt, .jsonl or .parquet
    tokens = m2s.data.Tokens("packed/", "train", length=512)   # tokens[i] is [512] int64
    for indices in m2s.data.batches(len(tokens), global_batch=64, seed=0, start=step):
        x_0 = tokens[indices]

`DATASETS` names everything that `m2s train --data.name` can open. A plugin registers its own data set with one line:

    m2s.data.DATASETS.add("my_data", open_my_data)             # open_my_data(folder, length, hub) -> Source
"""

from m2s.data.cifar10 import CIFAR10
from m2s.data.digits import DIGITS
from m2s.data.files import BadData, root
from m2s.data.image_set import ImageSet, image_sets, load
from m2s.data.images import ImageDataset
from m2s.data.mnist import MNIST
from m2s.data.order import batch_indices, batches
from m2s.data.sequences import Sequences, collate
from m2s.data.source import DATASETS, Batch, ImageSource, Source, TextSource, open_source, open_text
from m2s.data.text import prepare_text
from m2s.data.tokenizer import GPT2, Bytes, Characters, HuggingFace, Tokenizer
from m2s.data.tokens import Tokens, check_text

for _images in (DIGITS, MNIST, CIFAR10):
    DATASETS.add(_images.name, _images)
DATASETS.add("text", open_text)

__all__ = [
    "DATASETS",
    "GPT2",
    "BadData",
    "Batch",
    "Bytes",
    "Characters",
    "HuggingFace",
    "ImageDataset",
    "ImageSet",
    "ImageSource",
    "Sequences",
    "Source",
    "TextSource",
    "Tokenizer",
    "Tokens",
    "batch_indices",
    "batches",
    "check_text",
    "collate",
    "image_sets",
    "load",
    "open_source",
    "prepare_text",
    "root",
]
