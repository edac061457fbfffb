"""Checkpoint formats of other projects: one file each, registered in `FORMATS`. The first that recognizes a place loads it."""

from m2s.hub.formats import sedd, radd, mdlm, bd3lm, gidd, md4, lightning  # isort: skip  # noqa: F401
from m2s.hub.formats.base import FORMATS, CheckpointFormat, Loaded, recognize
from m2s.hub.formats.dit import Vocabulary
from m2s.hub.formats.tokenizers import gpt2_without_merges, tokenizer_hint

__all__ = ["FORMATS", "CheckpointFormat", "Loaded", "Vocabulary", "gpt2_without_merges", "recognize", "tokenizer_hint"]
