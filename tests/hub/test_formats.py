"""The registry of checkpoint formats: the page that lists them, published sizes, and formats of plugins."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import m2s
from m2s import hub
from m2s.hub import docs_page
from m2s.hub.formats import FORMATS, CheckpointFormat, Loaded, bd3lm, gidd, mdlm, sedd
from plain_networks import dit_shapes

pytestmark = pytest.mark.usefixtures("without_shape_hook")
ROOT = Path(__file__).parents[2]
RELEASES = json.loads((ROOT / "experiments" / "results" / "releases.json").read_text())
LARGE = {"width": 768, "blocks": 12, "heads": 12, "cond": 128}
HUB = {"hidden_dim": 768, "cond_dim": 128, "n_blocks": 12, "n_heads": 12, "model_length": 1024, "dropout": 0.1}
MODEL = {"hidden_size": 768, "cond_dim": 128, "n_blocks": 12, "n_heads": 12, "length": 1024, "dropout": 0.1}
TOKENS = {"tokens": 50_257, "noise": {"type": "loglinear"}}
GIDD = {"hidden_size": 768, "timestep_cond_dim": 128, "num_hidden_layers": 12, "num_attention_heads": 12, "max_seq_len": 512}
# The configuration of a published checkpoint, and options of its tensors.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mdlm": ({**HUB, "model_type": "mdlm", "vocab_size": 50_258, "time_conditioning": False}, {}),
    "udlm": ({**HUB, "model_type": "udlm", "vocab_size": 30_522, "model_length": 128, "time_conditioning": True}, {}),
    "duo": ({**HUB, "model_type": "duo", "vocab_size": 50_258}, {}),
    "bd3lm": ({**HUB, "model_type": "bd3lm", "vocab_size": 50_258, "block_size": 1024, "adaln": True}, {}),
    "gidd": ({**GIDD, "vocab_size": 50_259, "p_uniform": 0.1}, {}),
    "sedd": ({**TOKENS, "model": {**MODEL, "scale_by_sigma": True}, "graph": {"type": "absorb"}}, {}),
    "radd": ({**TOKENS, "model": {**MODEL, "type": "ddit_wot"}}, {"norm_bias": True, "time": False}),
}


def test_the_page_lists_every_format() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    assert page == docs_page.page(), "python -m m2s.hub.docs_page > docs/checkpoints.md"
    assert all(f"| {entry.title} |" in page for entry in FORMATS.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device: our network has the parameters of the authors' module, and zeros for the padding."""
    config, options = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    states = RELEASES[name]["states"]
    shapes = dit_shapes(states, **LARGE, **options)
    with torch.device("meta"):
        tensors = {key: torch.empty(shape) for key, shape in shapes.items()}
        for module in (bd3lm, gidd, mdlm, sedd):
            monkeypatch.setattr(module, "read_weights", lambda *_, given=tensors: given)
        found = hub.formats.recognize(tmp_path)
        assert found is not None and found[0].name == name
        model = found[0].load(tmp_path, found[1]).model
    published = sum(math.prod(shape) for key, shape in shapes.items() if "inv_freq" not in key)
    assert published == RELEASES[name]["parameters"]
    padding = (model.config.rows - states) * (2 * 768 + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == published + padding


def test_a_plugin_adds_a_format(tmp_path: Path) -> None:
    """Recognized by its contents, after the formats of m2s; also as a single file."""

    def load(place: Path, settings: Any) -> Loaded:
        assert place.name == "weights.mine" and settings == {"states": 5}
        model = m2s.models.DiT(m2s.models.DiTConfig(5, width=8, depth=1, heads=2, condition_width=4, length=6))
        return Loaded(model, m2s.Posterior(m2s.Uniform(5, m2s.Linear())), {"kind": "text", "length": 6}, None)

    def recognize(place: Path) -> dict[str, Any] | None:
        return {"states": 5} if place.suffix == ".mine" else None

    texts = {"layout": "a file", "process": "Uniform", "time": "t", "tokenizer": "none"}
    FORMATS.add("mine", CheckpointFormat("mine", "Mine", **texts, recognize=recognize, load=load, suffixes=(".mine",)))
    try:
        (tmp_path / "weights.mine").write_bytes(b"")
        checkpoint = m2s.load(tmp_path / "weights.mine")
        assert checkpoint.config["extra"] == {"mine": {"states": 5}} and checkpoint.sample(2, steps=1).shape == (2, 6)
    finally:
        FORMATS.remove("mine")
    with pytest.raises(NotADirectoryError, match="is a file, but a checkpoint is a folder"):
        m2s.load(tmp_path / "weights.mine")
