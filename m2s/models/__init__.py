"""Networks. All are called as model(x_t, t, condition=None)."""

from m2s.models.dit import DiT, DiTConfig
from m2s.models.mask_at import MaskAt
from m2s.models.registry import NETWORKS, build, describe
from m2s.models.unet import UNet, UNetConfig

__all__ = ["NETWORKS", "DiT", "DiTConfig", "MaskAt", "UNet", "UNetConfig", "build", "describe"]
