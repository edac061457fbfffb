"""Reading and writing checkpoints."""

from m2s.hub.checkpoint import Checkpoint, load, push, save
from m2s.hub.config import from_dict, to_dict

__all__ = ["Checkpoint", "from_dict", "load", "push", "save", "to_dict"]
