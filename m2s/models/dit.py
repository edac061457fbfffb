"""The diffusion transformer of SEDD and MDLM, its time-free form (RADD) and its causal form (autoregressive)."""

from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from m2s import validation
from m2s.errors import UserError
from m2s.models.condition import Condition
from m2s.models.pretrained import Pretrained
from m2s.models.rotary import angles
from m2s.ops.dense import dense
from m2s.ops.last_layer import Output, Unprojected
from m2s.ops.norm import add_norm, is_fused
from m2s.ops.rotary import joint
from m2s.ops.rotary.naive import rotary
from m2s.process import Schedule

FREQUENCIES = 256  # sinusoids of the time
MULTIPLE = 64  # rows of the embedding and of the last layer are padded to a multiple of this
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 128, "depth": 4, "heads": 4},
    "small": {"width": 768, "depth": 12, "heads": 12},
    "medium": {"width": 1024, "depth": 24, "heads": 16},
}


@dataclass(frozen=True)
class DiTConfig:
    """Configuration of a `DiT`.

    Args:
        states: The number of input states: `process.states`, the tokens and the mask where there is one.
        width: Features of a position, a multiple of twice the number of heads.
        depth: The number of blocks.
        heads: The number of attention heads.
        condition_width: Features of the conditioning vector.
        dropout: Dropout in the residual branches.
        time: Whether the network sees the time. Without time and classes there is no modulation (RADD).
        causal: Each position sees itself and the positions before it (autoregressive).
        classes: The number of classes for class conditioning; label `classes` and condition=None mean "no label".
        label_dropout: Probability of hiding a label in training.
        length: The maximum number of positions; None: no limit.
        clock: A schedule whose total noise sigma(t) the network sees in place of t (SEDD); None: t itself.
        constant_time: The network is given 0 in place of the time, as in MDLM's release (`time_conditioning: False`). It has
            the parameters of a network with time, and its output does not depend on it.
        label_after_silu: Condition on silu(time) + silu(class), as in UDLM, in place of silu(time + class).
        norm_bias: Every LayerNorm has a bias, initialized at one, as in RADD.
        padding: The network reads the id `states` as padding: no position attends to it. Not for a causal network, which does
            not see what follows.
        qk_norm: Queries and keys are divided by their root mean square over a head, so that no attention logit exceeds the
            square root of the head's width.
        gates: The initial gates of residual branches. "zero" is adaLN-zero. "one": the last projection of each branch starts at
            zero instead, as in a network without time. Both networks start as the identity.
        embedding_std: Standard deviation of the initial token embeddings.

    Raises:
        ValueError: A value is out of range, or two of them contradict each other.
    """

    states: int
    width: int = 768
    depth: int = 12
    heads: int = 12
    condition_width: int = 128
    dropout: float = 0.0
    time: bool = True
    causal: bool = False
    classes: int | None = None
    label_dropout: float = 0.1
    length: int | None = None
    clock: Schedule | None = None
    constant_time: bool = False
    label_after_silu: bool = False
    norm_bias: bool = False
    padding: bool = False
    qk_norm: bool = False
    gates: Literal["zero", "one"] = "zero"
    embedding_std: float = 0.02

    def __post_init__(self) -> None:
        validation.positive_int("states", self.states, low=2)
        for name in ("time", "constant_time", "causal", "label_after_silu", "norm_bias", "padding", "qk_norm"):
            validation.boolean(name, getattr(self, name))
        if self.clock is not None:
            validation.instance("clock", self.clock, Schedule, "None or a schedule such as m2s.LogLinear()")
            if not self.time:
                raise UserError(
                    option="clock", value=self.clock, reason="time is False", hint="a network that sees no time has no clock"
                )
        if self.constant_time and not self.time:
            hint = "a network without time has nothing that could be constant"
            raise UserError(option="constant_time", value=True, reason="time is False", hint=hint)
        for name in ("width", "depth", "heads", "condition_width"):
            validation.positive_int(name, getattr(self, name))
        for name in ("classes", "length"):
            if getattr(self, name) is not None:
                validation.positive_int(name, getattr(self, name))
        if self.label_after_silu and self.classes is None:
            hint = "there is no class embedding to add"
            raise UserError(option="label_after_silu", value=True, reason="the network has no classes", hint=hint)
        if self.padding and self.causal:
            reason = "a causal network does not see the positions after a token"
            raise UserError(option="padding", value=True, reason=reason, hint="pad at the end, and leave padding out")
        if self.width % (2 * self.heads):
            expected = f"a multiple of twice the number of heads ({2 * self.heads})"
            raise UserError(option="width", value=self.width, expected=expected, hint="rotary positions turn pairs of features")
        for name in ("dropout", "label_dropout"):
            validation.in_interval(name, getattr(self, name), "[0, 1)")
        validation.choice("gates", self.gates, ("zero", "one"))
        validation.positive_number("embedding_std", self.embedding_std)

    @property
    def rows(self) -> int:
        """Rows of the embedding and of the last layer: `states` padded to a multiple of 64 (50,257 -> 50,304)."""
        return -(-self.states // MULTIPLE) * MULTIPLE

    @classmethod
    def preset(cls, size: str, states: int, **options: Any) -> "DiTConfig":
        """Return the configuration of a named size: tiny, small or medium.

        Args:
            size: "tiny" (4 blocks, width 128, 4 heads), "small" (12 x 768 x 12) or "medium" (24 x 1024 x 16).
            states: The number of input states, `process.states`.
            **options: Other fields of `DiTConfig`. They take precedence over the values of the size.

        Raises:
            ValueError: `size` is unknown, or an option is invalid.
        """
        validation.choice("size", size, SIZES)
        return cls(states, **{**SIZES[size], **options})


def layer_norm(config: DiTConfig) -> nn.LayerNorm:
    """Return a LayerNorm with the bias that the configuration asks for.

    Args:
        config: The configuration of the network.
    """
    layer = nn.LayerNorm(config.width, bias=config.norm_bias)
    if config.norm_bias:
        nn.init.ones_(layer.bias)
    return layer


def zero_init(*layers: nn.Module) -> None:
    """Initialize all parameters of some layers at zero.

    Args:
        layers: The layers.
    """
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)


class Dense(nn.Linear):
    """torch.nn.Linear whose products and gradients use kernels where the fused backend is used."""

    def forward(self, x: Float[Tensor, "*rows D"], fused: bool = False) -> Float[Tensor, "*rows W"]:
        """Return x W^T + b.

        Args:
            x: Input features, [*rows, D].
            fused: Whether fused kernels may be used.

        Returns:
            Output features, [*rows, W].
        """
        return dense(x, self.weight, self.bias, fused)


def is_unwrapped_dense(layer: nn.Module) -> TypeGuard[Dense]:
    """Return whether a fused operation may read the layer's weight and bias directly instead of calling the layer.

    That is not so for a layer that was replaced, wrapped (LoRA) or has hooks.

    Args:
        layer: The layer.
    """
    return type(layer) is Dense and not layer._forward_hooks and not layer._forward_pre_hooks


def apply_layer(layer: nn.Module, x: Tensor, fused: bool) -> Tensor:
    """Call a layer, with the choice of kernels where it is a `Dense`.

    Args:
        layer: Any layer.
        x: Its input [*rows, D].
        fused: Whether fused kernels may be used.

    Returns:
        Its output.
    """
    result: Tensor = layer(x, fused) if isinstance(layer, Dense) else layer(x)
    return result


class Modulation(nn.Module):
    """adaLN-zero (Peebles & Xie 2023): shifts, scales and gates, linear in the condition and initialized at zero.

    Args:
        condition_width: Features of the conditioning vector.
        width: Features of a position.
        count: How many vectors of `width` features are returned.
    """

    def __init__(self, condition_width: int, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(condition_width, count * width)
        zero_init(self.linear)

    @torch.no_grad()
    def set_to_one(self, *vectors: int) -> None:
        """Let some of the vectors start at one.

        Args:
            vectors: Their places among the `count` vectors.
        """
        for vector in vectors:
            self.linear.bias.chunk(self.count)[vector].fill_(1)

    def forward(self, c: Float[Tensor, "B C"]) -> tuple[Tensor, ...]:
        """Return the vectors that modulate a block.

        Args:
            c: Conditioning vectors, [B, C].

        Returns:
            `count` tensors, [B, 1, width] each.
        """
        return self.linear(c).unsqueeze(1).chunk(self.count, -1)


class Attention(nn.Module):
    """Softmax attention between all positions or, if causal, from each position to itself and those before it.

    Args:
        width: Features of a position.
        heads: The number of attention heads.
        causal: Whether attention is causal.
        normalize: Whether queries and keys are divided by their root mean square over a head.
    """

    def __init__(self, width: int, heads: int, causal: bool, normalize: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.normalize = heads, causal, normalize
        self.qkv = Dense(width, 3 * width, bias=False)
        self.out = Dense(width, width, bias=False)

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        cos: Tensor,
        sin: Tensor,
        fused: bool,
        cache: Tensor | None,
        at: Tensor | None,
        seen: Tensor | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Attend between the positions of each example.

        Without a cache, x holds all L positions. With a cache, x holds the L positions `at`. Their keys and values are written
        into the cache, and each position attends to the cached positions up to itself.

        Args:
            x: Normalized features, [B, L, D].
            cos: Cosines of the rotary angles from `m2s.models.rotary.angles`, [L, head width]. With a cache, one row for each
                entry of `at`, [B L, head width].
            sin: The second result of `angles`, in the shape of `cos`.
            fused: Whether fused kernels may be used.
            cache: Keys and values of this layer, [2, B, heads, length, head width], changed in place; None: no cache.
            at: Positions of the entries of x, [B, L]; None without a cache.
            seen: False at padding, which no position attends to, [B, 1, 1, L]; None: there is no padding.

        Returns:
            The attention branch, before its gate, [B, L, D].
        """
        if cache is None or at is None:
            if is_unwrapped_dense(self.qkv):
                q, k, v = joint(x, self.qkv.weight, cos, sin, self.heads, fused)
            else:
                q, k, v = rotary(apply_layer(self.qkv, x, fused), cos, sin, self.heads)
            q, k = self._normalized(q, k)
            mixed = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=self.causal)
        else:
            mixed = self._extended(apply_layer(self.qkv, x, fused), cos, sin, cache, at)
        return apply_layer(self.out, mixed.transpose(1, 2).flatten(-2), fused)

    def _normalized(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with root mean square 1 over a head. A rotation does not change their norm."""
        if not self.normalize:
            return q, k
        return rms_norm(q, q.shape[-1:]).to(q.dtype), rms_norm(k, k.shape[-1:]).to(k.dtype)

    def _extended(
        self,
        qkv: Float[Tensor, "B n W"],
        cos: Float[Tensor, "Bn D"],
        sin: Float[Tensor, "Bn D"],
        cache: Float[Tensor, "2 B H L D"],
        at: Int[Tensor, "B n"],
    ) -> Float[Tensor, "B H n D"]:
        """Write keys and values of the positions `at` [B, n] into the cache, and attend causally from them."""
        turned = rotary(qkv.reshape(1, at.numel(), -1), cos, sin, self.heads)  # each site by an angle of its own
        q, k, v = [part.squeeze(0).unflatten(1, at.shape).transpose(0, 1) for part in turned]
        q, k = self._normalized(q, k)
        index = at[:, None, :, None].expand_as(k)
        keys, values = cache[0].scatter_(2, index, k), cache[1].scatter_(2, index, v)
        seen = torch.arange(cache.shape[-2], device=at.device) <= at.unsqueeze(-1)
        return scaled_dot_product_attention(q, keys, values, attn_mask=seen.unsqueeze(1))


class Block(nn.Module):
    """x + gate attention(norm(x)), then x + gate mlp(norm(x)), each norm shifted and scaled by the condition.

    A residual branch is added inside the next norm's kernel. So a block receives the last branch and its gate beside x, and
    returns its own last branch and gate beside x.

    Args:
        config: The configuration of the network.
        conditioned: Whether there is a conditioning vector.
    """

    def __init__(self, config: DiTConfig, conditioned: bool) -> None:
        super().__init__()
        width = config.width
        self.norm1 = layer_norm(config)
        self.attention = Attention(width, config.heads, config.causal, config.qk_norm)
        self.norm2 = layer_norm(config)
        self.mlp = nn.Sequential(Dense(width, 4 * width), nn.GELU(approximate="tanh"), Dense(4 * width, width))
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()  # at 0 a compiler would copy
        self.modulation = Modulation(config.condition_width, width, 6) if conditioned else None
        if self.modulation is None or config.gates == "one":  # without gates that start at zero, the branches start at zero
            zero_init(self.attention.out, self.mlp[2])
        if self.modulation is not None and config.gates == "one":
            self.modulation.set_to_one(2, 5)  # the gates of attention and MLP

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        branch: Float[Tensor, "B L D"] | None,
        gate: Float[Tensor, "B 1 D"] | None,
        c: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        fused: bool,
        cache: Tensor | None,
        at: Tensor | None,
        seen: Tensor | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B L D"], Float[Tensor, "B 1 D"] | None]:
        """Add the previous branch to x, then compute attention and MLP.

        Args:
            x: Residual stream without the previous branch, [B, L, D].
            branch: The previous block's last branch, [B, L, D]; None in the first block.
            gate: The factor of `branch`, [B, 1, D]; None: 1.
            c: Conditioning vectors, [B, C]; None for a network without time and classes.
            cos: Cosines of the rotary angles from `m2s.models.rotary.angles`, [L, head width]. With a cache, one row for each
                entry of `at`, [B L, head width].
            sin: The second result of `angles`, in the shape of `cos`.
            fused: Whether fused kernels may be used.
            cache: Keys and values of this layer, [2, B, heads, length, head width], changed in place; None: no cache.
            at: Positions of the entries of x, [B, L]; None without a cache.
            seen: False at padding, [B, 1, 1, L]; None: there is no padding.

        Returns:
            The residual stream [B, L, D] without the MLP branch, the MLP branch [B, L, D], and its gate [B, 1, D] or None.
        """
        parts = (None,) * 6 if self.modulation is None else self.modulation(c)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x, y = add_norm(x, branch, gate, self.norm1.weight, self.norm1.eps, shift1, scale1, fused, self.norm1.bias)
        branch = self.dropout(self.attention(y, cos, sin, fused, cache, at, seen))
        x, y = add_norm(x, branch, gate1, self.norm2.weight, self.norm2.eps, shift2, scale2, fused, self.norm2.bias)
        return x, self.dropout(self._mlp(y, fused)), gate2

    def _mlp(self, y: Float[Tensor, "B L D"], fused: bool) -> Float[Tensor, "B L D"]:
        first, gelu, last = self.mlp
        return apply_layer(last, gelu(apply_layer(first, y, fused)), fused)


class DiT(Pretrained):
    """A diffusion transformer: model(x_t, t, condition=None) -> logits [B, L, rows], rows >= states.

    The columns past `states` are padding. The body may run under autocast; the last layer accumulates and returns float32. With
    `model.unprojected = True` the output is `m2s.Unprojected`: hidden states and the last layer, not multiplied out. A
    time-free network accepts t and ignores it.

    With `cache` (from `new_cache`), x_t holds only the tokens of the positions `at`, [B, n]. Their keys and values are
    written into the cache, and each of them attends to the cached positions up to itself.

    Args:
        config: The configuration.
    """

    config: DiTConfig
    config_class = DiTConfig

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.unprojected = False
        conditioned = config.time or config.classes is not None
        width = config.width
        self.embedding = nn.Embedding(config.rows, width)
        nn.init.normal_(self.embedding.weight, std=config.embedding_std)
        self.condition = Condition(
            config.condition_width,
            FREQUENCIES,
            config.condition_width,
            config.time,
            config.classes,
            config.label_dropout,
            config.clock,
            silu_each=config.label_after_silu,
            constant_time=config.constant_time,
        )
        self.blocks = nn.ModuleList(Block(config, conditioned) for _ in range(config.depth))
        self.norm = layer_norm(config)
        self.modulation = Modulation(config.condition_width, width, 2) if conditioned else None
        self.head = nn.Linear(width, config.rows)
        zero_init(self.head)

    @property
    def padding_id(self) -> int | None:
        """The id that the network reads as padding; None where it has none."""
        return self.config.states if self.config.padding else None

    def block_matrices(self) -> dict[str, int]:
        """Return the parameters that Muon updates, by name, each with the number of matrices stacked in it."""
        parts = {"attention.qkv.weight": 3, "attention.out.weight": 1, "mlp.0.weight": 1, "mlp.2.weight": 1}
        return {f"blocks.{number}.{name}": count for number in range(len(self.blocks)) for name, count in parts.items()}

    def new_cache(self, samples: int, length: int) -> Float[Tensor, "depth 2 {samples} heads {length} head"] | None:
        """Return an empty cache of keys and values for all layers, in the dtype of the network.

        Args:
            samples: The number B of sequences.
            length: The number L of positions of a complete sequence.

        Returns:
            Zeros [depth, 2, B, heads, L, head width]; None where keys and values depend on more than the tokens up to a
            position (a bidirectional network, or one with time input), and for a subclass with its own forward.

        Raises:
            ValueError: `length` exceeds `config.length`.
        """
        config, weight = self.config, self.embedding.weight
        if config.time or not config.causal or type(self).forward is not DiT.forward:
            return None
        self._check_length(length)
        kind = weight.device.type
        narrows = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind) if narrows else weight.dtype
        shape = (config.depth, 2, samples, config.heads, length, config.width // config.heads)
        return torch.zeros(shape, dtype=dtype, device=weight.device)

    def _check_length(self, length: int) -> None:
        if self.config.length is not None and length > self.config.length:
            raise UserError(f"x_t has {length} sites, but the network was made for at most {self.config.length}")

    def forward(
        self,
        x_t: Int[Tensor, "B L"],
        t: Float[Tensor, "B"] | None = None,
        condition: Int[Tensor, "B"] | None = None,
        cache: Float[Tensor, "depth 2 B heads length head"] | None = None,
        at: Int[Tensor, "B L"] | None = None,
    ) -> Output:
        """Return the logits of all states at every position, or `m2s.Unprojected`.

        Args:
            x_t: Noisy tokens, [B, L], below `config.states`; with `config.padding` that number itself at padding. With a cache,
                the tokens of the positions `at` only.
            t: Times in [0, 1], [B]. A network that does not depend on the time ignores them and allows None.
            condition: Class labels, [B]; None: no labels.
            cache: Keys and values from `new_cache`, [depth, 2, B, heads, length, head width], changed in place; None: no cache.
            at: Positions of the tokens in `x_t`, [B, L]; required with a cache.

        Returns:
            Logits [B, L, rows] in float32 or wider, rows >= `config.states`; or `m2s.Unprojected` if `unprojected` is set.

        Raises:
            ValueError: A token, a shape or the length is invalid, or only one of `cache` and `at` is given.
            TypeError: `t` is None, but the network sees the time.
        """
        states = self.config.states
        validation.tokens("x_t", x_t, states + self.config.padding)
        if x_t.ndim != 2:
            raise ValueError(f"x_t has shape {list(x_t.shape)}, but it must be [samples, positions]")
        if (cache is None) != (at is None):
            raise ValueError("give cache and at together: the keys and values so far, and the sites that x_t holds")
        length = x_t.shape[1] if cache is None else cache.shape[-2]
        self._check_length(length)
        c = self.condition(x_t, t, condition)
        if c is not None and not self.config.label_after_silu:
            c = silu(c)
        dtype = torch.float64 if self.embedding.weight.dtype == torch.float64 else torch.float32
        cos, sin = angles(length, self.config.width // self.config.heads, x_t.device, dtype=dtype)
        if at is not None:
            cos, sin = cos[at.flatten()], sin[at.flatten()]
        seen = None
        if self.config.padding:
            valid = x_t < states
            # A softmax over no position would be NaN. The output of an example that is all padding has no meaning.
            seen = (valid | ~valid.any(-1, keepdim=True))[:, None, None]
            x_t = x_t.clamp(max=states - 1)
        x, branch, gate = self.embedding(x_t.long()), None, None
        fused = is_fused(x)
        for number, block in enumerate(self.blocks):
            given = None if cache is None else cache[number]
            x, branch, gate = block(x, branch, gate, c, cos, sin, fused, given, at, seen)
        with torch.autocast(x.device.type, enabled=False):
            shift, scale = (None, None) if self.modulation is None else self.modulation(c)
        _, hidden = add_norm(x, branch, gate, self.norm.weight, self.norm.eps, shift, scale, fused, self.norm.bias)
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            hidden = hidden.to(torch.get_autocast_dtype("cuda"))  # operands of a product that is added up in float32
        output = Unprojected(hidden, self.head.weight, self.head.bias)
        return output if self.unprojected else output.project()
