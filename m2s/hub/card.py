"""The model card of a checkpoint: README.md with the header that the Hugging Face hub reads."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from m2s.heads import Head
from m2s.version import __version__

CARD = "README.md"
PAPER = "Mean-to-Score Discrete Diffusion: Posterior-Mean Denoisers for Score Entropy"
AUTHORS = "Li, Jingyuan and Jiang, Xiaoyi and Jiang, Yixuan and Liu, Wei and Zhu, Yi and Shi, Zuoqiang and Hu, Pipi"


def model_card(
    model: nn.Module,
    head: Head,
    data: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    command: str | None = None,
    place: str = "OWNER/NAME",
    sections: Mapping[str, str] | None = None,
) -> str:
    """Return a model card.

    Args:
        model: The network.
        head: Its head.
        data: The description of its data, or None.
        config: The contents of config.json; its entry "extra" has method, steps and validation of a run.
        command: How the network was trained; None: the card does not say.
        place: What `m2s.load` takes.
        sections: Further sections, by heading.

    Returns:
        Markdown with a YAML header.
    """
    extra = config.get("extra") or {}
    method, process = str(extra.get("method", "custom")), type(head.process).__name__
    tags = ["discrete-diffusion", "m2s", _plain(method), process.lower()]
    header = ["---", "library_name: m2s", "tags:", *(f"- {tag}" for tag in dict.fromkeys(tags)), "---"]
    parameters = sum(weight.numel() for weight in model.parameters())
    rows = {
        "method": method,
        "head": repr(head),
        "process": repr(head.process),
        "network": f"{type(model).__name__}, {parameters:,} parameters",
        "data": ", ".join(f"{name} {value}" for name, value in (data or {}).items()) or "not recorded",
        "steps": extra.get("step"),
        "seed": extra.get("seed"),
        "NELBO on held-out data": _bits(extra, data),
        "m2s": config.get("m2s", __version__),
    }
    table = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value is not None]
    lines = [
        *header,
        "",
        f"# A discrete diffusion model ({_plain(method)}, {process.lower()} process)",
        "",
        "| | |",
        "|---|---|",
        *table,
        "",
        "## Use",
        "",
        "```python",
        "import m2s",
        "",
        f'checkpoint = m2s.load("{place}")' + ("  # this repository, or a folder" if place == "OWNER/NAME" else ""),
        "tokens = checkpoint.sample(16)",
        "```",
        "",
    ]
    if command is not None:
        lines += ["## Training", "", "```bash", command.replace("```", ""), "```", ""]
    for heading, text in (sections or {}).items():
        lines += [f"## {heading}", "", text, ""]
    lines += [
        "## Citation",
        "",
        "```bibtex",
        "@misc{li-m2s,",
        f"  title = {{{PAPER}}},",
        f"  author = {{{AUTHORS}}},",
        "}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def position_name(data: Mapping[str, Any] | None) -> str:
    """Return what a likelihood of some data is given per: dimension of images, character or token of text, else position.

    Args:
        data: The description of the data, or None.
    """
    kind = (data or {}).get("kind")
    if kind == "image":
        return "dimension"
    if kind != "text" or data is None:
        return "position"
    tokenizer = data.get("tokenizer")
    return "character" if isinstance(tokenizer, Mapping) and tokenizer.get("kind") == "Characters" else "token"


def _bits(extra: Mapping[str, Any], data: Mapping[str, Any] | None) -> str | None:
    """The validation of a run, where it is recorded."""
    bits, error = extra.get("validation_bits"), extra.get("validation_error")
    if not isinstance(bits, int | float) or not isinstance(error, int | float):
        return None
    return f"{bits:.4f} ± {error:.4f} bits per {position_name(data)} (standard error over examples)"


def _plain(text: str) -> str:
    """A name that is safe in YAML: letters, digits and dashes."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-" for letter in text)


def _cell(value: Any) -> str:
    """A value in one cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
