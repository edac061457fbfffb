"""Networks by name, so that a checkpoint can say which one it holds."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from m2s.models.dit import DiT, DiTConfig
from m2s.models.unet import UNet, UNetConfig

NETWORKS: dict[str, tuple[type, type[nn.Module]]] = {"dit": (DiTConfig, DiT), "unet": (UNetConfig, UNet)}


def build(config: Mapping[str, Any]) -> nn.Module:
    """Build a network from its description, with new weights.

    Args:
        config: What `describe` returns: {"kind": "dit", "states": 27, ...}. Lists stand for tuples, as in JSON.

    Returns:
        The network.

    Raises:
        ValueError: There is no such kind, or it has no such setting.
    """
    options = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.items()
    }  # JSON has lists only
    kind = options.pop("kind", None)
    if kind not in NETWORKS:
        raise ValueError(f"the network's kind is {kind!r}, but it must be one of {', '.join(NETWORKS)}")
    settings, network = NETWORKS[kind]
    known = [field.name for field in fields(settings)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{kind} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    return network(settings(**options))


def describe(model: nn.Module) -> dict[str, Any]:
    """Describe a network by its kind and its configuration, as `build` reads it.

    Args:
        model: A network whose class is registered in `NETWORKS`.

    Returns:
        {"kind": ..., **configuration}. The value of "clock" is a schedule, which JSON cannot hold.

    Raises:
        TypeError: The class is not registered.
    """
    for kind, (_, network) in NETWORKS.items():
        if type(model) is network:
            return {"kind": kind, **vars(model.config)}
    raise TypeError(
        f"model is a {type(model).__name__}, which no file can name: add it to m2s.models.NETWORKS as "
        "{kind: (configuration dataclass, module class)}; the module keeps its configuration in `.config`"
    )
