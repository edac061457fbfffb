"""Compare a checkpoint that m2s loads with the network of its authors, on random weights.

    git clone https://github.com/kuleshov-group/mdlm /somewhere/mdlm
    python scripts/compare_release.py mdlm --clone /somewhere/mdlm

The authors' module is imported from your clone, with plain attention in the place of flash_attn. Its weights are drawn at
random, saved in the layout that is published, and loaded by `m2s.load`. Both networks then see the same tokens and times. The
largest difference of their outputs is written to experiments/results/releases.json, and with it the number of parameters of
the published size, which is counted on the meta device. The modules need einops and omegaconf; MD4's needs jax, flax and orbax.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import m2s  # noqa: E402
from m2s.io import write_json  # noqa: E402

OUT = ROOT / "experiments" / "results" / "releases.json"
LENGTH, BATCH, SEED = 64, 3, 0
SMALL = {"hidden_size": 64, "cond_dim": 32, "n_blocks": 3, "n_heads": 4}
PUBLISHED = {"hidden_size": 768, "cond_dim": 128, "n_blocks": 12, "n_heads": 12}


def install_flash_attn() -> None:
    """Put plain attention and rotations under the names of flash_attn that these projects call."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, H, D], cos and sin [L, D/2]: the two halves of a head are the pairs."""
        a, b = x.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def rotate_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = qkv.unbind(2)
        return torch.stack([rotate(q, cos, sin), rotate(k, cos, sin), v], 2)

    def attend(qkv: Tensor, ends: Tensor, longest: int, dropout: float, causal: bool) -> Tensor:
        q, k, v = (part.unflatten(0, (-1, longest)).transpose(1, 2) for part in qkv.unbind(1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return mixed.transpose(1, 2).flatten(0, 1)

    def module(name: str, **functions: Any) -> types.ModuleType:
        made = sys.modules[name] = types.ModuleType(name)
        vars(made).update(functions)
        made.__spec__ = importlib.util.spec_from_loader(name, None)
        return made

    package = module("flash_attn")
    package.layers = module("flash_attn.layers")  # type: ignore[attr-defined]
    rotary = module("flash_attn.layers.rotary", apply_rotary_emb_qkv_=rotate_qkv, apply_rotary_emb_torch=rotate)
    package.layers.rotary = rotary  # type: ignore[attr-defined]
    interface = module("flash_attn.flash_attn_interface", flash_attn_varlen_qkvpacked_func=attend)
    package.flash_attn_interface = interface  # type: ignore[attr-defined]


def import_file(path: Path, package: str = "peer") -> types.ModuleType:
    """Import a file of a clone, whose relative imports are looked up in its folder."""
    parent = sys.modules.setdefault(package, types.ModuleType(package))
    parent.__path__ = [str(path.parent)]
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"{package}.{path.stem}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Release:
    """A release, and how its network is built and called.

    Args:
        repository: Where its code is.
        file: The module, in the clone.
        build: Builds the network: build(module, sizes, states).
        call: Calls it: call(network, tokens, noise).
        write: Writes the files that are published: write(folder, network, sizes, states).
        states: The number of token ids.
        noise: What the network is given at our times.
    """

    repository: str
    file: str
    build: Callable[[types.ModuleType, dict[str, int], int], nn.Module]
    call: Callable[[nn.Module, Tensor, Tensor], Tensor]
    write: Callable[[Path, nn.Module, dict[str, int], int], None]
    states: int
    noise: Callable[[Tensor], Tensor]


def sigma(t: Tensor) -> Tensor:
    """The total noise of the log-linear schedule."""
    return -torch.log1p(-(1 - 1e-3) * t)


def config(sizes: dict[str, int], **more: Any) -> Any:
    """A configuration as the training code of these projects reads it."""
    from omegaconf import OmegaConf

    model = {**sizes, "length": LENGTH, "max_seq_len": LENGTH, "dropout": 0.1, "scale_by_sigma": True}
    model |= {
        "tie_word_embeddings": False,
        "use_checkpoint": False,
        "dtype": "float32",
        "type": "ddit_wot",
        "attn_backend": "sdpa",
    }
    return OmegaConf.create({"model": model, **more})


def hub_sizes(sizes: dict[str, int], states: int) -> dict[str, Any]:
    """A configuration as the hub files of MDLM, UDLM, DUO and BD3-LM hold it."""
    names = {"hidden_dim": "hidden_size", "cond_dim": "cond_dim", "n_blocks": "n_blocks", "n_heads": "n_heads"}
    return {**{name: sizes[key] for name, key in names.items()}, "vocab_size": states, "model_length": LENGTH, "dropout": 0.1}


def write_hub(kind: str, prefix: str = "backbone.", **more: Any) -> Callable[[Path, nn.Module, dict[str, int], int], None]:
    """Write config.json and pytorch_model.bin."""

    def write(folder: Path, network: nn.Module, sizes: dict[str, int], states: int) -> None:
        settings = {"model_type": kind, **hub_sizes(sizes, states), **more}
        (folder / "config.json").write_text(json.dumps(settings))
        torch.save({prefix + name: value for name, value in network.state_dict().items()}, folder / "pytorch_model.bin")

    return write


def write_gidd(folder: Path, network: nn.Module, sizes: dict[str, int], states: int) -> None:
    """Write config.json and pytorch_model.bin of GIDD."""
    names = {"hidden_size": "hidden_size", "timestep_cond_dim": "cond_dim", "num_hidden_layers": "n_blocks"}
    settings = {name: sizes[key] for name, key in names.items()}
    settings |= {"num_attention_heads": sizes["n_heads"], "vocab_size": states, "max_seq_len": LENGTH, "p_uniform": 0.1}
    (folder / "config.json").write_text(json.dumps(settings))
    torch.save(network.state_dict(), folder / "pytorch_model.bin")


def write_sedd(radd: bool) -> Callable[[Path, nn.Module, dict[str, int], int], None]:
    """Write config.json and pytorch_model.bin of SEDD or RADD."""

    def write(folder: Path, network: nn.Module, sizes: dict[str, int], states: int) -> None:
        model = {**sizes, "length": LENGTH, "dropout": 0.1, "scale_by_sigma": False, "type": "ddit_wot" if radd else "ddit"}
        settings: dict[str, Any] = {"tokens": states - 1, "noise": {"type": "loglinear"}, "model": model}
        settings |= {} if radd else {"graph": {"type": "absorb"}}
        (folder / "config.json").write_text(json.dumps(settings))
        torch.save(network.state_dict(), folder / "pytorch_model.bin")

    return write


def build_gidd(module: types.ModuleType, sizes: dict[str, int], states: int) -> nn.Module:
    """Build GIDD's network of the hub."""
    settings = sys.modules["peer.configuration_dit"].DITConfig(
        vocab_size=states,
        max_seq_len=LENGTH,
        hidden_size=sizes["hidden_size"],
        timestep_cond_dim=sizes["cond_dim"],
        num_hidden_layers=sizes["n_blocks"],
        num_attention_heads=sizes["n_heads"],
        p_uniform=0.1,
    )
    return module.DIT(settings)


def build_sedd(module: types.ModuleType, sizes: dict[str, int], states: int) -> nn.Module:
    """Build SEDD's network, without the factor of the noise, which is not part of the network here."""
    settings = config(sizes, tokens=states - 1, graph={"type": "absorb"})
    settings.model.scale_by_sigma = False
    return module.SEDD(settings)


def call_sedd(network: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """SEDD's network writes 0 at the current token; the comparison leaves these entries out."""
    output: Tensor = network(x, noise)
    return output.masked_fill(nn.functional.one_hot(x, output.shape[-1]).bool(), float("nan"))


def plain_call(network: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """Call a network with tokens and noise."""
    output = network(x, noise)
    return output[0] if isinstance(output, tuple) else output


RELEASES = {
    "sedd": Release(
        "louaaron/Score-Entropy-Discrete-Diffusion",
        "model/transformer.py",
        build_sedd,
        call_sedd,
        write_sedd(False),
        50_258,
        sigma,
    ),
    "mdlm": Release(
        "kuleshov-group/mdlm",
        "models/dit.py",
        lambda module, sizes, states: module.DIT(config(sizes), states),
        plain_call,
        write_hub("mdlm", time_conditioning=False),
        50_258,
        torch.zeros_like,
    ),
    "udlm": Release(
        "kuleshov-group/discrete-diffusion-guidance",
        "models/hf/modeling_udlm.py",
        lambda module, sizes, states: module.DITBackbone(module.UDLMConfig(**hub_sizes(sizes, states))),
        plain_call,
        write_hub("udlm", time_conditioning=True),
        30_522,
        sigma,
    ),
    "duo": Release(
        "s-sahoo/duo",
        "models/dit.py",
        lambda module, sizes, states: module.DIT(config(sizes, algo={"causal_attention": False}), states),
        plain_call,
        write_hub("duo"),
        50_258,
        sigma,
    ),
    "bd3lm": Release(
        "kuleshov-group/bd3lms",
        "models/hf/modeling_bd3lm.py",
        lambda module, sizes, states: module.DITBackbone(
            module.BD3LMConfig(**hub_sizes(sizes, states), block_size=LENGTH, attn_backend="sdpa")
        ),
        lambda network, x, noise: network(torch.cat([x, x], 1), noise)[0],
        write_hub("bd3lm", block_size=LENGTH, adaln=True, cross_attn=True, time_conditioning=False),
        50_258,
        torch.zeros_like,
    ),
    "gidd": Release("dvruette/gidd", "gidd/models/modeling_dit.py", build_gidd, plain_call, write_gidd, 50_259, lambda t: t),
    "radd": Release(
        "ML-GSAI/RADD",
        "model/transformer.py",
        lambda module, sizes, states: module.RADD(config(sizes, tokens=states - 1)),
        lambda network, x, noise: network.logits(x),
        write_sedd(True),
        50_258,
        sigma,
    ),
}


def randomize(network: nn.Module) -> None:
    """Draw all parameters, so that no gate is closed and no layer is zero."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(("norm" in name and name.endswith("weight")) + scale * noise)


def commit_of(clone: Path) -> str:
    """The commit that a clone is at."""
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def compare_md4(clone: Path) -> dict[str, Any]:
    """Compare MD4's transformer, of flax, with a checkpoint that orbax writes. It needs jax, flax and orbax-checkpoint.

    Args:
        clone: The clone of its repository.

    Returns:
        The largest difference, and what it was found with.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as orbax

    sys.path.insert(0, str(clone))
    from md4.models import backward  # type: ignore[import-not-found]

    states, rng = 50_258, np.random.default_rng(SEED)
    settings = {"mlp_type": "glu", "cond_type": "adaln_zero", "outside_embed": False, "vocab_size": states - 1}
    small = {"n_layers": 3, "feature_dim": 16, "num_heads": 4, **settings}
    x = rng.integers(0, states, (BATCH, LENGTH))
    x[:, ::3] = states - 1
    t = np.array([0.01, 0.4, 0.95], np.float32)

    def shapes(sizes: dict[str, Any]) -> Any:
        network = backward.DiscreteClassifier(**sizes)
        return network, jax.eval_shape(lambda key: network.init(key, x, t=t), jax.random.PRNGKey(0))["params"]

    _, full = shapes({"n_layers": 12, "feature_dim": 64, "num_heads": 12, **settings})
    network, described = shapes(small)
    values = jax.tree.map(lambda one: (rng.standard_normal(one.shape) * one.shape[0] ** -0.5).astype(np.float32), described)
    with tempfile.TemporaryDirectory() as folder:
        managed = orbax.CheckpointManager(f"{folder}/checkpoints", checkpointers={"train_state": orbax.PyTreeCheckpointer()})
        managed.save(1, items={"train_state": {"ema_params": {"classifier": values}}})
        managed.wait_until_finished()
        more = {"noise_schedule": "linear", "time_features": "t", "data_shape": [LENGTH], "task_type": "text"}
        (Path(folder) / "config.json").write_text(json.dumps({**small, **more}))
        model = m2s.load(folder).model
        managed.close()
    theirs = torch.from_numpy(np.array(network.apply({"params": values}, x, t=t)[0]))
    with torch.no_grad():
        ours = model(torch.from_numpy(x), torch.from_numpy(t))[..., : states - 1]
    return {
        "repository": "google-deepmind/md4",
        "commit": commit_of(clone),
        "file": "md4/models/backward.py",
        "states": states,
        "parameters": sum(math.prod(one.shape) for one in jax.tree.leaves(full)),
        "sizes": {**{name: small[name] for name in ("n_layers", "feature_dim", "num_heads")}, "length": LENGTH},
        "outputs": theirs.numel(),
        "largest_output": float(theirs.abs().max()),
        "largest_difference": float((theirs - ours).abs().max()),
    }


def compare(name: str, clone: Path) -> dict[str, Any]:
    """Compare one release.

    Args:
        name: The release.
        clone: The clone of its repository.

    Returns:
        The largest difference, and what it was found with.
    """
    release = RELEASES[name]
    module = import_file(clone / release.file)
    states = release.states
    torch.manual_seed(SEED)
    network = release.build(module, SMALL, states).eval()
    randomize(network)
    x = torch.randint(states, (BATCH, LENGTH))
    x[:, ::3] = states - 1
    t = torch.tensor([0.01, 0.4, 0.95])
    with tempfile.TemporaryDirectory() as folder:
        release.write(Path(folder), network, SMALL, states)
        checkpoint = m2s.load(folder)
    with torch.no_grad():
        theirs = release.call(network, x, release.noise(t))
        ours = checkpoint.model(x, t)[..., :states]  # the mask, where there is one, is their last id too
    difference = (theirs - ours).abs().nan_to_num(0.0)
    with torch.device("meta"):
        full = release.build(module, PUBLISHED, states)
    return {
        "repository": release.repository,
        "commit": commit_of(clone),
        "file": release.file,
        "states": states,
        "parameters": sum(parameter.numel() for parameter in full.parameters()),
        "sizes": {**SMALL, "length": LENGTH},
        "outputs": difference.numel(),
        "largest_output": float(theirs.nan_to_num(0.0).abs().max()),
        "largest_difference": float(difference.max()),
    }


def main() -> None:
    """Compare a release and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted([*RELEASES, "md4"]))
    parser.add_argument("--clone", type=Path, required=True, help="the clone of its repository")
    given = parser.parse_args()
    install_flash_attn()
    found = compare_md4(given.clone) if given.name == "md4" else compare(given.name, given.clone)
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    results[given.name] = {**found, "torch": torch.__version__, "precision": "float32"}
    write_json(OUT, dict(sorted(results.items())))
    print(json.dumps(results[given.name], indent=2))


if __name__ == "__main__":
    main()
