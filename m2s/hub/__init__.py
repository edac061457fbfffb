"""Save, load and share checkpoints."""

from m2s.hub import builtin
from m2s.hub.checkpoint import Checkpoint, load, push
from m2s.hub.config import CLASSES, from_dict, to_dict
from m2s.hub.saving import save
from m2s.hub.transformers import from_transformers

__all__ = ["CLASSES", "Checkpoint", "builtin", "from_dict", "from_transformers", "load", "push", "save", "to_dict"]
