"""Networks by name, so that a checkpoint can say which network it holds."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from torch import nn

from m2s.errors import UserTypeError
from m2s.models.dit import DiT, DiTConfig
from m2s.models.md4 import MD4Transformer, MD4TransformerConfig
from m2s.models.unet import UNet, UNetConfig
from m2s.registry import Registry


class NetworkEntry(NamedTuple):
    """An entry of `NETWORKS`.

    Args:
        config: The dataclass of the network's settings.
        module: The network's class. Its constructor takes a `config`, which it stores as `self.config`.
    """

    config: type
    module: type[nn.Module]


NETWORKS: Registry[tuple[type, type[nn.Module]]] = Registry("network")
NETWORKS.add("dit", NetworkEntry(DiTConfig, DiT))
NETWORKS.add("unet", NetworkEntry(UNetConfig, UNet))
NETWORKS.add("md4-transformer", NetworkEntry(MD4TransformerConfig, MD4Transformer))


def build(config: Mapping[str, Any]) -> nn.Module:
    """Build a network, with random weights.

    Args:
        config: "kind", a name in `NETWORKS`, and the network's settings: {"kind": "dit", "states": 27, ...}. Lists stand for
            tuples, because JSON has no tuples.

    Returns:
        The network.

    Raises:
        ValueError: There is no such network, or it has no such setting.
        UserTypeError: The network does not store its settings.
    """
    options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    kind = options.pop("kind", None)
    if kind not in NETWORKS:
        raise ValueError(
            f"the network's kind is {kind!r}, but it must be one of {', '.join(NETWORKS)}; register a network of your own with "
            "m2s.models.NETWORKS.add(name, (config class, module class)) first"
        )
    settings, network = NETWORKS[kind]
    known = [field.name for field in fields(settings)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{kind} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    made = network(settings(**options))
    if not hasattr(made, "config"):
        raise UserTypeError(
            f"the network {network.__name__} does not store its settings: write self.config = config in its constructor, so "
            "that a checkpoint can name them"
        )
    return made


def describe(model: nn.Module) -> dict[str, Any]:
    """Return the kind and the settings of a network, as `build` takes them.

    Args:
        model: The network.

    Returns:
        "kind" and the settings. A clock is a schedule object, which JSON cannot hold: see `m2s.hub.config`.

    Raises:
        TypeError: The network's class is not in `NETWORKS`.
    """
    for kind, (_, network) in NETWORKS.items():
        if type(model) is network:
            return {"kind": kind, **vars(model.config)}
    raise TypeError(
        f"model is a {type(model).__name__}, which is not registered: call m2s.models.NETWORKS.add(name, (config class, module "
        "class)); the module stores its configuration as self.config"
    )
