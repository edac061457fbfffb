"""Networks of other projects as plain float64 functions of their tensors, written from the papers, and files in their layouts.

The transformer of SEDD, MDLM, UDLM, DUO, GIDD, RADD and BD3-LM: Peebles & Xie (2023) with rotary positions (Su et al. 2021).
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu, softmax

WIDTH, BLOCKS, HEADS, COND, LENGTH = 16, 2, 2, 12, 10


def dit_shapes(
    rows: int, classes: int | None = None, norm_bias: bool = False, time: bool = True, width: int = WIDTH, blocks: int = BLOCKS,
    heads: int = HEADS, cond: int = COND,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Names and shapes, in the order in which the authors' modules register them."""
    d = width
    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (rows, d)}
    if time:
        shapes |= {"sigma_map.mlp.0.weight": (cond, 256), "sigma_map.mlp.0.bias": (cond,)}
        shapes |= {"sigma_map.mlp.2.weight": (cond, cond), "sigma_map.mlp.2.bias": (cond,)}
    if classes is not None:
        shapes |= {"cond_map.embedding_table.weight": (classes + 1, cond)}
    shapes |= {"rotary_emb.inv_freq": (d // heads // 2,)}

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (d,), **({f"{name}.bias": (d,)} if norm_bias else {})}

    for i in range(blocks):
        block = {**norm("norm1"), "attn_qkv.weight": (3 * d, d), "attn_out.weight": (d, d), **norm("norm2")}
        block |= {"mlp.0.weight": (4 * d, d), "mlp.0.bias": (4 * d,), "mlp.2.weight": (d, 4 * d), "mlp.2.bias": (d,)}
        if time:
            block |= {"adaLN_modulation.weight": (6 * d, cond), "adaLN_modulation.bias": (6 * d,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {f"output_layer.{name}": shape for name, shape in norm("norm_final").items()}
    shapes |= {"output_layer.linear.weight": (rows, d), "output_layer.linear.bias": (rows,)}
    if time:
        shapes |= {"output_layer.adaLN_modulation.weight": (2 * d, cond), "output_layer.adaLN_modulation.bias": (2 * d,)}
    return shapes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random weights, none of which is zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: ("norm" in name and name.endswith("weight")) + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    if "rotary_emb.inv_freq" in weights:
        half = shapes["rotary_emb.inv_freq"][0]
        weights["rotary_emb.inv_freq"] = 10_000.0 ** (-torch.arange(half) / half)
    return weights


def plain_dit(
    weights: Mapping[str, Tensor], x: Tensor, noise: Tensor | None, label: Tensor | None = None, heads: int = HEADS
) -> Tensor:
    """The output of the last layer, [B, L, rows]: adaLN-zero blocks with the sinusoids of `noise` [B]; None: no time."""
    w = {name: value.double() for name, value in weights.items()}

    def linear(value: Tensor, name: str) -> Tensor:
        return value @ w[name + ".weight"].T + w.get(name + ".bias", torch.zeros(()))

    def norm(value: Tensor, name: str) -> Tensor:
        centered = value - value.mean(-1, keepdim=True)
        normal = centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-5)
        return normal * w[name + ".weight"] + w.get(name + ".bias", torch.zeros(()))

    def turned(value: Tensor) -> Tensor:
        """[B, H, L, E]: the pair (i, i + E/2) at position p turned by p 10000^{-2i/E}."""
        half = value.shape[-1] // 2
        angle = torch.arange(value.shape[-2]).double()[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
        a, b = value[..., :half], value[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    c = None
    if noise is not None:
        angle = noise.double()[:, None] * 10_000.0 ** (-torch.arange(128).double() / 128)
        c = torch.cat([angle.cos(), angle.sin()], -1)
        c = silu(linear(silu(linear(c, "sigma_map.mlp.0")), "sigma_map.mlp.2"))
        if label is not None:
            c = c + silu(w["cond_map.embedding_table.weight"][label])

    def modulation(name: str, count: int) -> list[Tensor]:
        if c is None:
            return [torch.zeros(()), torch.zeros(()), torch.ones(())] * (count // 3) if count > 2 else [torch.zeros(())] * 2
        return list(linear(c, name)[:, None].chunk(count, -1))

    h = w["vocab_embed.embedding"][x]
    blocks = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    for i in range(blocks):
        block = f"blocks.{i}."
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(block + "adaLN_modulation", 6)
        qkv = linear(norm(h, block + "norm1") * (1 + scale1) + shift1, block + "attn_qkv")
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        seen = softmax(turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        h = h + gate1 * linear(seen.transpose(1, 2).flatten(-2), block + "attn_out")
        inner = gelu(linear(norm(h, block + "norm2") * (1 + scale2) + shift2, block + "mlp.0"), approximate="tanh")
        h = h + gate2 * linear(inner, block + "mlp.2")
    shift, scale = modulation("output_layer.adaLN_modulation", 2)
    return linear(norm(h, "output_layer.norm_final") * (1 + scale) + shift, "output_layer.linear")


@contextmanager
def class_named(module: str, name: str) -> Iterator[type]:
    """A class that pickle finds under a name of another package, and that is gone afterwards."""
    cls = type(name, (), {"__module__": module, "__qualname__": name})
    parts = module.split(".")
    created = []
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path)
            created.append(path)
    setattr(sys.modules[module], name, cls)
    try:
        yield cls
    finally:
        for path in created:
            del sys.modules[path]


def save_lightning(path: Path, config: dict[str, Any], weights: Mapping[str, Tensor], **changes: Any) -> Path:
    """A Lightning checkpoint: the configuration as objects of omegaconf, an object of the authors, and an average.

    The raw weights differ from the averaged ones, which are `weights`.
    """
    with (
        class_named("omegaconf.dictconfig", "DictConfig") as dict_config,
        class_named("omegaconf.listconfig", "ListConfig") as list_config,
        class_named("omegaconf.nodes", "AnyNode") as any_node,
        class_named("authors.dataloader", "Tokenizer") as tokenizer,
    ):

        def node(value: Any) -> Any:
            kind = dict_config if isinstance(value, dict) else list_config if isinstance(value, list) else any_node
            made = kind.__new__(kind)
            made._metadata, made._parent = {"optional": True}, None
            if kind is any_node:
                made._val = value
            else:
                made._content = (
                    {key: node(entry) for key, entry in value.items()} if kind is dict_config else list(map(node, value))
                )
            return made

        state = OrderedDict(("backbone." + name, value + 1) for name, value in weights.items())
        average = [value for name, value in weights.items() if "inv_freq" not in name]
        checkpoint = {
            "epoch": 3,
            "global_step": 1_000_000,
            "state_dict": state,
            "loops": {"fit_loop": {"state_dict": {}}},
            "optimizer_states": [
                {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.99)}]}
            ],
            "hparams_name": "kwargs",
            "hyper_parameters": {"config": node(config), "tokenizer": tokenizer()},
            "ema": {"decay": 0.9999, "num_updates": 1_000_000, "shadow_params": average},
            **changes,
        }
        torch.save(checkpoint, path)
    return path
