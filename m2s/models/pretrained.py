"""`save_pretrained`, `from_pretrained` and `push_to_hub` of networks, in the form of PyTorchModelHubMixin.

The folder has config.json, the settings of the network, and model.safetensors, its weights. It has neither head nor process: a
checkpoint (`m2s.save`, `m2s.load`) has these too, and is what `m2s sample` reads.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from m2s import remote
from m2s.errors import UserError
from m2s.io import atomic_write, read_json, write_json
from m2s.version import __version__

Network = TypeVar("Network", bound="Pretrained")
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


class Pretrained(nn.Module):
    """A network whose settings and weights can be saved without its head.

    Attributes:
        config: The settings, a dataclass.
        config_class: The class of the settings.
    """

    config: Any
    config_class: ClassVar[Any]

    def save_pretrained(self, folder: str | Path) -> Path:
        """Save settings, weights and a model card.

        Args:
            folder: Where to write; created if it does not exist.

        Returns:
            The folder.

        Raises:
            UserError: A setting is an object, which JSON cannot hold. Nothing is written.
        """
        settings = asdict(self.config)
        for name in settings:
            value = getattr(self.config, name)
            if not isinstance(value, bool | int | float | str | list | tuple | None):
                hint = "use m2s.save(folder, model, head), which holds it"
                raise UserError(option=name, value=value, reason="JSON cannot hold it", hint=hint)
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        with atomic_write(place / WEIGHTS) as temporary:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}, temporary)
        with atomic_write(place / CARD) as temporary:
            temporary.write_text(self._card(), encoding="utf-8")
        write_json(place / CONFIG, {"m2s": __version__, "class": type(self).__name__, "settings": settings})
        return place

    @classmethod
    def from_pretrained(cls: type[Network], path_or_repo: str | Path, device: torch.device | str = "cpu") -> Network:
        """Load a network that `save_pretrained` wrote.

        Args:
            path_or_repo: A folder, or a repository "owner/name" on the Hugging Face hub.
            device: Where the network is put.

        Returns:
            The network, in evaluation mode.

        Raises:
            FileNotFoundError: There is no such folder or repository, or the hub cannot be reached.
            UserError: The folder holds something else.
        """
        folder = remote.locate(path_or_repo, (CONFIG, WEIGHTS))
        found = read_json(folder / CONFIG, "save the network again")
        if found.get("class") != cls.__name__ or not isinstance(found.get("settings"), dict):
            held = f"a {found['class']}" if "settings" in found else "a checkpoint or another project's model"
            hint = "load a checkpoint with m2s.load, which returns model and head"
            raise UserError(f"{folder} holds {held}, not a network that {cls.__name__}.save_pretrained wrote: {hint}")
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in found["settings"].items()}
        with torch.random.fork_rng(devices=[]):  # initial weights are replaced and must not use up random numbers
            model = cls(cls.config_class(**settings))
        model.load_state_dict(load_file(folder / WEIGHTS), assign=True)
        return model.to(device).eval()

    def push_to_hub(self, repo_id: str, private: bool = False) -> str:
        """Upload settings, weights and a model card to the Hugging Face hub.

        Args:
            repo_id: The repository, "owner/name"; created if it does not exist.
            private: Create a private repository.

        Returns:
            The address of the repository.

        Raises:
            ValueError: The name of the repository is invalid.
            ConnectionError: The hub cannot be reached or does not allow the upload.
            ImportError: `huggingface_hub` is not installed.
        """
        remote.check_repository(repo_id)
        with tempfile.TemporaryDirectory(prefix="m2s-") as folder:
            return remote.upload(self.save_pretrained(folder), repo_id, (CONFIG, WEIGHTS), private)

    def _card(self) -> str:
        """A short model card, with the header that the hub reads."""
        name, count = type(self).__name__, sum(weight.numel() for weight in self.parameters())
        header = "---\nlibrary_name: m2s\ntags:\n- discrete-diffusion\n- m2s\n---\n"
        use = f'```python\nfrom m2s.models import {name}\n\nmodel = {name}.from_pretrained("OWNER/NAME")\n```\n'
        note = "The head, which says what its output means, is not part of it."
        return f"{header}\n# {name} of m2s ({count:,} parameters)\n\n{note}\n\n{use}"
