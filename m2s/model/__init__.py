"""Networks: called as model(x_t, t, condition=None)."""

from m2s.model.dit import DiT, DiTConfig
from m2s.model.mask_at import MaskAt
from m2s.model.registry import NETWORKS, build, describe
from m2s.model.unet import UNet, UNetConfig

__all__ = ["NETWORKS", "DiT", "DiTConfig", "MaskAt", "UNet", "UNetConfig", "build", "describe"]
