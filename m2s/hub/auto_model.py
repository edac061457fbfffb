"""Checkpoints of m2s as models of transformers: `AutoModel.from_pretrained` reads the folders that `m2s.save` writes.

transformers is optional, and this module is imported only by those who use it. Importing it registers the model type "m2s":

    import m2s.hub.auto_model
    model = AutoModel.from_pretrained("runs/mine")          # an M2SModel
    logits = model(input_ids=x_t, t=t).logits               # those of m2s.load("runs/mine").model, bit for bit
    tokens = model.checkpoint.sample(16)

The folder has the format of m2s, in which weights are named "model.*". So `save_pretrained` writes what `m2s.load` and the
commands read.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

try:
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import MaskedLMOutput
except ImportError as error:
    raise ImportError("M2SModel needs transformers of version 5 or newer: pip install 'm2s-diffusion[judge]'") from error

from m2s.data import tokenizer as tokenizers
from m2s.errors import UserError
from m2s.heads import Head
from m2s.heads.output import hide_padding
from m2s.hub.checkpoint import Checkpoint, describe, load
from m2s.hub.config import from_dict, network_from_dict
from m2s.hub.description import MODEL_TYPE
from m2s.hub.folder import MODEL
from m2s.ops.last_layer import Unprojected

CONTENTS = ("format", "m2s", "model", "head", "data", "tokenizer", "extra")  # of config.json


class M2SConfig(PreTrainedConfig):
    """The contents of the `config.json` of a checkpoint, as a configuration of transformers.

    Attributes:
        model: The kind and the settings of the network.
        head: The description of the head and its process.
        data: A description of the data, or None.
        tokenizer: A description of the tokenizer, or None.
        extra: Anything else, such as a step count.
    """

    model_type = MODEL_TYPE

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "M2SConfig":
        """Return the configuration of a checkpoint.

        Args:
            checkpoint: The checkpoint.
        """
        found = describe(checkpoint)
        return cls(**{name: found[name] for name in CONTENTS}, architectures=["M2SModel"])


class M2SModel(PreTrainedModel):
    """A network of m2s with its head, as a `PreTrainedModel`.

    Args:
        config: The configuration, `M2SConfig.of(checkpoint)`.

    Attributes:
        model: The network, which is called as model(x_t, t, condition).
        head: What its output means.

    Raises:
        UserError: The configuration does not describe a network.
    """

    config_class = M2SConfig
    main_input_name = "input_ids"
    _keys_to_ignore_on_load_unexpected = (r"^process\.",)  # matrices of the head

    def __init__(self, config: M2SConfig) -> None:
        super().__init__(config)
        if not isinstance(getattr(config, "model", None), Mapping):
            raise UserError("the configuration does not describe a network: use M2SConfig.of(checkpoint)")
        self.model = network_from_dict(config.model)
        self.head: Head | None = None if _has_matrices(config.head) else from_dict(config.head)
        self._tokenizer: tokenizers.Tokenizer | None = None
        self.post_init()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "M2SModel":
        """Return a checkpoint as a model of transformers. It shares the weights.

        Args:
            checkpoint: The checkpoint, such as `m2s.load("runs/mine")`.
        """
        model = cls(M2SConfig.of(checkpoint))
        model.model, model.head, model._tokenizer = checkpoint.model, checkpoint.head, checkpoint.tokenizer
        return model.train(checkpoint.model.training)

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, *arguments: Any, **options: Any) -> "M2SModel":
        """Load a checkpoint that `m2s.save` or `save_pretrained` wrote.

        Args:
            path_or_repo: A folder, or a repository "owner/name" on the Hugging Face hub.
            arguments: Those of `PreTrainedModel.from_pretrained`.
            options: Those of `PreTrainedModel.from_pretrained`, such as `dtype` and `device_map`.

        Returns:
            The model, in evaluation mode.
        """
        model = super().from_pretrained(path_or_repo, *arguments, **options)
        found = model[0] if isinstance(model, tuple) else model
        if found.head is None:  # its matrices are in the file of the weights
            found.head = load(path_or_repo).head
        if Path(path_or_repo).is_dir() and found.config.tokenizer is not None:
            found._tokenizer = tokenizers.from_dict(found.config.tokenizer, Path(path_or_repo))
        return model

    @property
    def checkpoint(self) -> Checkpoint:
        """The network and the head as a checkpoint of m2s, with `sample`, `evaluate` and `save`. It shares the weights."""
        assert self.head is not None
        settings = {name: getattr(self.config, name, None) for name in CONTENTS}
        return Checkpoint(self.model, self.head, self._tokenizer, settings["data"], settings)

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        t: Float[Tensor, "B"] | None = None,
        condition: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> MaskedLMOutput:
        """Call the network.

        Args:
            input_ids: Tokens x_t, [B, L].
            t: Times, [B]. A network without time conditioning needs none.
            condition: Conditions, [B, ...], or None.
            attention_mask: 0 at padding, [B, L]. It needs a network that reads padding.
            others: Arguments that pipelines pass, such as `position_ids`. They are not used.

        Returns:
            An output whose `logits` are [B, L, states]. The head says what they mean.

        Raises:
            UserError: The network sees the time and none is given, or there is padding that it cannot read.
        """
        if t is None:
            if getattr(self.model.config, "time", True):
                raise UserError(option="t", reason="this network sees the time", hint="give the times of the samples")
            t = torch.zeros(len(input_ids), device=input_ids.device)
        if attention_mask is not None and not bool(attention_mask.all()):
            if getattr(self.model, "padding_id", None) is None:
                hint = "leave padding out; in a pipeline give lengths that are multiples of the block"
                raise UserError(option="attention_mask", reason="the network was trained without padding", hint=hint)
            input_ids = hide_padding(self.model, input_ids, attention_mask == 0)
        output = self.model(input_ids, t) if condition is None else self.model(input_ids, t, condition)
        logits = output.project() if isinstance(output, Unprojected) else output
        return MaskedLMOutput(logits=logits[..., : self.config.model["states"]])

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Save the checkpoint with its model card, in the format of m2s.

        Args:
            save_directory: The folder; created if it does not exist.
            is_main_process: Whether this process writes.
            state_dict: The weights, where they are gathered from several processes.
            push_to_hub: Also upload it, to the repository `repo_id`.
            options: `repo_id` and `private` of the upload. Others, such as the size of a part, are not used.
        """
        if not is_main_process:
            return
        checkpoint = self.checkpoint
        if state_dict is not None:
            network = copy.deepcopy(self.model)
            network.load_state_dict({name.removeprefix(MODEL): value for name, value in state_dict.items()})
            checkpoint = Checkpoint(network, checkpoint.head, checkpoint.tokenizer, checkpoint.data, checkpoint.config)
        checkpoint.save_pretrained(save_directory)
        if push_to_hub:
            checkpoint.push_to_hub(options.get("repo_id") or Path(save_directory).name, bool(options.get("private")))

    def push_to_hub(self, repo_id: str, private: bool = False, command: str | None = None, **options: Any) -> str:
        """Upload the checkpoint with its model card to the Hugging Face hub.

        Args:
            repo_id: The repository, "owner/name"; created if it does not exist.
            private: Create a private repository.
            command: How the network was trained, for the card.
            options: Others of `PreTrainedModel.push_to_hub`, which are not used.

        Returns:
            The address of the repository.
        """
        return self.checkpoint.push_to_hub(repo_id, private, command)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Networks of m2s initialize their own weights."""


def _has_matrices(description: Any) -> bool:
    """Whether a description refers to tensors of the file of the weights."""
    if not isinstance(description, Mapping):
        return False
    return "tensor" in description or any(_has_matrices(value) for value in description.values())


AutoConfig.register(MODEL_TYPE, M2SConfig)
AutoModel.register(M2SConfig, M2SModel)
AutoModelForMaskedLM.register(M2SConfig, M2SModel)
