"""The transformer of MD4's release for text: gated MLPs, norms without weights, rotary positions over pairs of neighbors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, pad, scaled_dot_product_attention, silu

from m2s import validation
from m2s.dtypes import at_least_float32
from m2s.errors import UserError
from m2s.models.condition import Condition
from m2s.models.pretrained import Pretrained
from m2s.models.rotary import angles

EPS = 1e-5
Gate = Literal["glu", "swiglu", "geglu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "swiglu": silu,
    "geglu": lambda x: gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class MD4TransformerConfig:
    """Configuration of an `MD4Transformer`.

    Args:
        states: The number of input states: the clean tokens, and the mask, which is last.
        width: Features of a position, a multiple of twice the number of heads.
        depth: The number of blocks.
        heads: The number of attention heads.
        hidden: Hidden features of the MLPs.
        condition_width: Features of the conditioning vector.
        gate: The activation of gates and of the conditioning vector: "glu" is the sigmoid, "swiglu" SiLU, "geglu" GELU.
        length: The maximum number of positions; None: no limit.

    Raises:
        ValueError: A value is out of range.
    """

    states: int
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 2048
    condition_width: int = 64
    gate: Gate = "glu"
    length: int | None = None

    def __post_init__(self) -> None:
        validation.positive_int("states", self.states, low=3)
        for name in ("width", "depth", "heads", "hidden", "condition_width"):
            validation.positive_int(name, getattr(self, name))
        if self.length is not None:
            validation.positive_int("length", self.length)
        validation.choice("gate", self.gate, tuple(ACTIVATIONS))
        if self.width % (2 * self.heads):
            expected = f"a multiple of twice the number of heads ({2 * self.heads})"
            raise UserError(option="width", value=self.width, expected=expected, hint="rotary positions turn pairs of features")
        if self.condition_width % 2:
            raise UserError(option="condition_width", value=self.condition_width, expected="even: half of it are sines")


def _turn(x: Float[Tensor, "B H L D"], cos: Float[Tensor, "L E"], sin: Float[Tensor, "L E"]) -> Float[Tensor, "B H L D"]:
    """Rotate the pairs (x_{2i}, x_{2i+1}) by the angles of their position."""
    a, b = at_least_float32(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class _Block(nn.Module):
    """x + gate attention(norm(x)), then x + gate mlp(norm(x)), each norm shifted and scaled by the condition."""

    def __init__(self, config: MD4TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.activation = config.heads, ACTIVATIONS[config.gate]
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, config.hidden, bias=False), nn.Linear(width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, width, bias=False)
        self.modulation = nn.Linear(config.condition_width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Float[Tensor, "B L D"], c: Float[Tensor, "B C"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B L D"]:
        """Add both branches.

        Args:
            x: Residual stream, [B, L, D].
            c: Conditioning vectors, after their activation, [B, C].
            cos: Cosines of the rotary angles, [L, head width / 2].
            sin: Sines, likewise.

        Returns:
            The residual stream, [B, L, D].
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, -1)
        y = layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale1) + shift1
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        mixed = scaled_dot_product_attention(_turn(q, cos, sin), _turn(k, cos, sin), v)
        x = x + gate1 * self.out(mixed.transpose(1, 2).flatten(-2))
        y = layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale2) + shift2
        return x + gate2 * self.down(self.activation(self.gate(y)) * self.up(y))


class MD4Transformer(Pretrained):
    """MD4's transformer: model(x_t, t) -> logits [B, L, states]. The column of the mask, which is never predicted, is zero.

    Args:
        config: The configuration.
    """

    config: MD4TransformerConfig
    config_class = MD4TransformerConfig

    def __init__(self, config: MD4TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.condition_width
        self.embedding = nn.Embedding(config.states, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.condition = Condition(width, width, 4 * width, sin_first=True)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.modulation = nn.Linear(width, 2 * config.width)
        self.head = nn.Linear(config.width, config.states - 1, bias=False)
        for parameter in (self.modulation.weight, self.modulation.bias, self.head.weight):
            nn.init.zeros_(parameter)

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"], condition: Tensor | None = None
    ) -> Float[Tensor, "B L S"]:
        """Return the logits of all states at every position.

        Args:
            x_t: Noisy tokens, [B, L], below `config.states`.
            t: Times in [0, 1], [B].
            condition: None: the network has no classes.

        Returns:
            Logits [B, L, states], in float32 or wider.

        Raises:
            ValueError: A token, a shape or the length is invalid.
        """
        config = self.config
        validation.tokens("x_t", x_t, config.states)
        if x_t.ndim != 2:
            raise ValueError(f"x_t has shape {list(x_t.shape)}, but it must be [samples, positions]")
        if config.length is not None and x_t.shape[1] > config.length:
            raise UserError(f"x_t has {x_t.shape[1]} sites, but the network was made for at most {config.length}")
        x, head = self.embedding(x_t.long()), config.width // config.heads
        c = self.condition(x_t, t, condition)
        assert c is not None
        c = ACTIVATIONS[config.gate](c)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        both = angles(x_t.shape[1], head, x_t.device, dtype=dtype)
        cos, sin = both[0][:, : head // 2], both[1][:, head // 2 :]
        for block in self.blocks:
            x = block(x, c, cos, sin)
        with torch.autocast(x.device.type, enabled=False):
            x = at_least_float32(x)
            shift, scale = self.modulation(c.to(self.modulation.weight.dtype)).unsqueeze(1).chunk(2, -1)
            hidden = layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift
            return pad(linear(hidden, self.head.weight.to(hidden.dtype)), (0, 1))
