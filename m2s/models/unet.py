"""A U-Net for images of discrete levels. With one resolution and 32 layers it is MD4's network for CIFAR-10 (after VDM)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, pad, scaled_dot_product_attention, silu

from m2s import validation
from m2s.dtypes import at_least_float32
from m2s.errors import UserError
from m2s.models.condition import Condition
from m2s.models.pretrained import Pretrained
from m2s.ops import group_norm

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 32, "multipliers": (1, 2), "layers": 1},
    "mnist": {"width": 64, "multipliers": (1, 2, 2), "layers": 2},
    "md4": {"width": 128, "multipliers": (1,), "layers": 32, "dropout": 0.1, "rows": 257, "columns": 256},
}


@dataclass(frozen=True)
class UNetConfig:
    """Configuration of a `UNet`.

    Args:
        states: The number of input states, `process.states`: the levels and the mask where there is one.
        shape: (height, width) or (height, width, channels); a sequence holds the pixels row by row, channels last.
        mask: Whether the last state is the mask.
        input: A pixel enters as an "embedding" of its token, or as its "level" scaled to [-1, 1], with a flag for the mask.
        width: Channels of the first resolution, a multiple of 4.
        multipliers: Channels of each resolution in units of `width`; each resolution is half of the one before.
        layers: Residual blocks at each resolution on the way down.
        dropout: Dropout in the residual blocks.
        time: Whether the network sees the time.
        classes: The number of classes for class conditioning; None: none.
        label_dropout: Probability of hiding a label in training.
        rows: Rows of the embedding; None: `states`. MD4 has 257 whatever the process.
        columns: Columns of the output; None: `states`. MD4 has 256. A mask without a column gets zeros.
        groups: Groups of channels in every GroupNorm. None: groups of 4 channels, at most 32 groups; MD4 has 32 at every width.
        sinusoids: Features of the time: "cos-first" as in the transformer, or "sin-first" as in MD4 (`condition.sinusoids`).

    Raises:
        ValueError: A value is out of range, or two of them contradict each other.
    """

    states: int
    shape: tuple[int, ...]
    mask: bool = False
    input: Literal["embedding", "level"] = "embedding"
    width: int = 64
    multipliers: tuple[int, ...] = (1, 2, 2)
    layers: int = 2
    dropout: float = 0.0
    time: bool = True
    classes: int | None = None
    label_dropout: float = 0.1
    rows: int | None = None
    columns: int | None = None
    groups: int | None = None
    sinusoids: Literal["cos-first", "sin-first"] = "cos-first"

    def __post_init__(self) -> None:
        for name in ("mask", "time"):
            validation.boolean(name, getattr(self, name))
        validation.positive_int("states", self.states, low=2 + self.mask)
        if len(self.shape) not in (2, 3):
            raise UserError(option="shape", value=self.shape, expected="(height, width) or (height, width, channels)")
        for name in ("width", "layers"):
            validation.positive_int(name, getattr(self, name))
        for name in ("shape", "multipliers"):
            for size in getattr(self, name):
                validation.positive_int(f"every entry of {name}", size)
        if self.classes is not None:
            validation.positive_int("classes", self.classes)
        if self.width % 4:
            hint = "channels are normalized in groups of 4"
            raise UserError(option="width", value=self.width, expected="a multiple of 4", hint=hint)
        if self.groups is not None:
            validation.positive_int("groups", self.groups)
            if self.width % self.groups:
                raise UserError(option="groups", value=self.groups, expected=f"a divisor of width = {self.width}")
        validation.choice("sinusoids", self.sinusoids, ("cos-first", "sin-first"))
        if not self.multipliers:
            raise UserError(option="multipliers", value=(), expected="at least one number, for one resolution")
        factor = 2 ** (len(self.multipliers) - 1)
        if any(side % factor for side in self.shape[:2]):
            raise UserError(
                option="multipliers",
                value=self.multipliers,
                reason=f"{len(self.multipliers)} resolutions need images with sides that are multiples of {factor}, not "
                f"{self.shape}",
                hint="give fewer, or pad the images",
            )
        validation.choice("input", self.input, ("embedding", "level"))
        for name in ("dropout", "label_dropout"):
            validation.in_interval(name, getattr(self, name), "[0, 1)")
        if self.rows is not None:
            validation.positive_int("rows", self.rows, low=self.states)
        if self.columns is not None:
            validation.positive_int("columns", self.columns, low=self.levels)

    @property
    def levels(self) -> int:
        """The states that are not the mask."""
        return self.states - self.mask

    @property
    def channels(self) -> int:
        """Color channels of a pixel."""
        return self.shape[2] if len(self.shape) == 3 else 1

    @classmethod
    def preset(cls, size: str, states: int, shape: tuple[int, ...], **options: Any) -> "UNetConfig":
        """Return the configuration of a named size: tiny, mnist or md4.

        Args:
            size: "tiny" (width 32, for 8 x 8 digits on a CPU), "mnist" (width 64, three resolutions) or "md4" (MD4's network
                for CIFAR-10).
            states: The number of input states, `process.states`.
            shape: (height, width) or (height, width, channels) of an image.
            **options: Other fields of `UNetConfig`. They take precedence over the values of the size.

        Raises:
            ValueError: `size` is unknown, or an option is invalid.
        """
        validation.choice("size", size, SIZES)
        return cls(states, shape, **{**SIZES[size], **options})


class GroupNormFloat32(nn.GroupNorm):
    """GroupNorm in float32.

    A compiler for a GPU gets the formula instead of torch's kernel, which converts to channels-first; the convolutions here use
    channels-last.

    Args:
        channels: The number of channels.
        groups: The number of groups; None: groups of 4 channels, at most 32 groups.
    """

    def __init__(self, channels: int, groups: int | None = None) -> None:
        super().__init__(min(32, channels // 4) if groups is None else groups, channels, eps=1e-6)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Normalize each group of channels of each image.

        Args:
            x: Features, [B, C, H, W].

        Returns:
            Normalized features, scaled and shifted per channel, [B, C, H, W].
        """
        if not (x.is_cuda and torch.compiler.is_compiling()):
            return super().forward(x)
        groups = at_least_float32(x).unflatten(1, (self.num_groups, -1))
        centered = groups - groups.mean((2, 3, 4), keepdim=True)
        variance = centered.square().mean((2, 3, 4), keepdim=True)
        scale, shift = (value.unflatten(0, (self.num_groups, -1))[None, :, :, None, None] for value in (self.weight, self.bias))
        return (centered * torch.rsqrt(variance + self.eps) * scale + shift).flatten(1, 2)

    def with_silu(self, x: Float[Tensor, "B C H W"], shift: Float[Tensor, "B C"] | None = None) -> Float[Tensor, "B C H W"]:
        """Return silu(norm(x + shift)), by a Triton kernel where kernels run.

        Args:
            x: Features, [B, C, H, W].
            shift: A number for each channel of each image, [B, C]; None: no shift.

        Returns:
            The result, [B, C, H, W]. By a kernel it is channels-last, in the dtype of autocast or of the weight.
        """
        if group_norm.is_fused(x, self.num_groups):
            return group_norm.group_norm_silu(x, shift, self.weight, self.bias, self.num_groups, self.eps, fused=True)
        return silu(self(x if shift is None else x + shift[:, :, None, None]))


def convolution(inputs: int, outputs: int, stride: int = 1, zero: bool = False) -> nn.Conv2d:
    """Return a 3 x 3 convolution that keeps the resolution, or divides it by `stride`.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: The stride.
        zero: Initialize weight and bias at zero.
    """
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
    if zero:
        nn.init.zeros_(layer.weight)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """x + conv(dropout(silu(norm(conv(silu(norm(x))) + linear(c))))), with x projected to `outputs` channels.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        condition_width: Features of the conditioning vector; None: there is none.
        dropout: Dropout before the second convolution.
        groups: Groups of the GroupNorms, as in `GroupNormFloat32`.
    """

    def __init__(
        self, inputs: int, outputs: int, condition_width: int | None, dropout: float, groups: int | None = None
    ) -> None:
        super().__init__()
        self.norm1, self.conv1 = GroupNormFloat32(inputs, groups), convolution(inputs, outputs)
        self.norm2, self.conv2 = GroupNormFloat32(outputs, groups), convolution(outputs, outputs, zero=True)
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
        self.condition = None if condition_width is None else nn.Linear(condition_width, outputs, bias=False)
        if self.condition is not None:
            nn.init.zeros_(self.condition.weight)

    def forward(self, x: Float[Tensor, "B C H W"], c: Float[Tensor, "B D"] | None) -> Float[Tensor, "B E H W"]:
        """Apply the residual block.

        Args:
            x: Features, [B, inputs, H, W].
            c: Conditioning vectors, [B, condition_width]; None without them.

        Returns:
            Features, [B, outputs, H, W].
        """
        h = self.conv1(self.norm1.with_silu(x))
        shift = None if self.condition is None else self.condition(c)
        return self.skip(x) + self.conv2(self.dropout(self.norm2.with_silu(h, shift)))


class Attention(nn.Module):
    """x + attention between all pixels of the image, with one head.

    Args:
        channels: The number of channels.
        groups: Groups of the GroupNorm, as in `GroupNormFloat32`.
    """

    def __init__(self, channels: int, groups: int | None = None) -> None:
        super().__init__()
        self.norm = GroupNormFloat32(channels, groups)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Attend between all pixels of each image.

        Args:
            x: Features, [B, C, H, W].

        Returns:
            x plus the attention branch, [B, C, H, W].
        """
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).unsqueeze(1).chunk(3, -1)
        mixed = self.out(scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + mixed.transpose(1, 2).unflatten(2, x.shape[2:])


class Up(nn.Module):
    """Double the resolution by nearest-neighbor interpolation and a convolution.

    Args:
        channels: The number of channels.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = convolution(channels, channels)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C 2*H 2*W"]:
        """Double the resolution.

        Args:
            x: Features, [B, C, H, W].

        Returns:
            Features, [B, C, 2 H, 2 W].
        """
        return self.conv(interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(Pretrained):
    """A U-Net: model(x_t, t, condition=None) -> logits [B, L, columns], L = height * width * channels.

    Down: `layers` residual blocks at each resolution. Middle: block, attention, block. Up: one more block than down at each
    resolution, each with a skip connection. The body may run under autocast; the last layer runs in float32.

    Args:
        config: The configuration.
    """

    config: UNetConfig
    config_class = UNetConfig

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        width, sizes = config.width, [config.width * factor for factor in config.multipliers]
        conditioned = width if config.time or config.classes is not None else None

        def block(inputs: int, outputs: int) -> Residual:
            return Residual(inputs, outputs, conditioned, config.dropout, config.groups)

        inputs = (config.time, config.classes, config.label_dropout)
        self.condition = Condition(width, width, 4 * width, *inputs, sin_first=config.sinusoids == "sin-first")
        self.embedding = nn.Embedding(config.rows or config.states, width) if config.input == "embedding" else None
        features = width if config.input == "embedding" else 1 + config.mask
        self.first = convolution(config.channels * features, width)
        skips = [width]  # channels of the skip connections
        channels = width
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for i, size in enumerate(sizes):
            for _ in range(config.layers):
                self.down.append(block(channels, size))
                skips.append(channels := size)
            if i < len(sizes) - 1:
                self.down.append(convolution(channels, channels, stride=2))
                skips.append(channels)
        self.middle = nn.ModuleList([block(channels, channels), Attention(channels, config.groups), block(channels, channels)])
        for i, size in reversed(list(enumerate(sizes))):
            for _ in range(config.layers + 1):
                self.up.append(block(channels + skips.pop(), size))
                channels = size
            if i > 0:
                self.up.append(Up(channels))
        self.norm = GroupNormFloat32(channels, config.groups)
        self.last = convolution(channels, config.channels * (config.columns or config.states), zero=True)

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"] | None = None, condition: Int[Tensor, "B"] | None = None
    ) -> Float[Tensor, "B L V"]:
        """Return the logits of all states at every site.

        Args:
            x_t: Noisy tokens, [B, L], below `config.states`: pixels row by row, channels last.
            t: Times in [0, 1], [B]. A network without time input ignores them and allows None.
            condition: Class labels, [B]; None: no labels.

        Returns:
            Logits, [B, L, max(columns, states)], in float32 or wider. A state without a column has the logit 0.

        Raises:
            ValueError: A token or a shape is invalid.
            TypeError: `t` is None, but the network sees the time.
        """
        validation.tokens("x_t", x_t, self.config.states)
        if x_t.ndim != 2 or x_t.shape[1] != math.prod(self.config.shape):
            raise ValueError(
                f"x_t has shape {list(x_t.shape)}, but the network is for images {list(self.config.shape)}: expected "
                f"[samples, {math.prod(self.config.shape)}]"
            )
        c = self.condition(x_t, t, condition)
        x = self.first(self._features(x_t.long()))
        skips = [x]
        for layer in self.down:
            x = layer(x, c) if isinstance(layer, Residual) else layer(x)
            skips.append(x)
        for layer in self.middle:
            x = layer(x, c) if isinstance(layer, Residual) else layer(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1), c) if isinstance(layer, Residual) else layer(x)
        with torch.autocast(x.device.type, enabled=False):
            if not group_norm.is_fused(x, self.norm.num_groups):
                x = x.to(self.norm.weight.dtype)
            x = at_least_float32(self.norm.with_silu(x))
            assert self.last.bias is not None
            logits = conv2d(x, at_least_float32(self.last.weight), at_least_float32(self.last.bias), padding=1)
        logits = logits.permute(0, 2, 3, 1).reshape(*x_t.shape, -1)
        missing = self.config.states - logits.shape[-1]
        return pad(logits, (0, missing)) if missing > 0 else logits

    def _features(self, x_t: Tensor) -> Float[Tensor, "B C H W"]:
        """Return the input features of every pixel [B, channels * features, height, width]."""
        image = x_t.reshape(-1, *self.config.shape[:2], self.config.channels)
        if self.embedding is not None:
            features = self.embedding(image)
        else:
            level = image * (2 / (self.config.levels - 1)) - 1
            masked = image == self.config.levels
            features = torch.stack([level.where(~masked, 0), masked] if self.config.mask else [level], -1)
            features = features.to(self.first.weight.dtype)
        return features.flatten(-2).permute(0, 3, 1, 2)
