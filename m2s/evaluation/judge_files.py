"""Where the files of a judge are: a path, $M2S_DATA/judges, the local cache of the Hugging Face hub, or the hub."""

import importlib.util
import json
import re
from pathlib import Path

from m2s.data.files import root
from m2s.errors import UserError
from m2s.evaluation.gguf import gguf_values
from m2s.network import why_unreachable

DEFAULT_JUDGE = "HuggingFaceTB/SmolLM2-135M"
"""A small judge (270 MB, Apache-2.0) that runs on a CPU and that anyone can download."""
EXTRA = "'m2s-diffusion[judge]'"  # the packages that judges need, as pip takes them
SAME_WEIGHTS = ("", "bf16", "f16", "fp16", "f32", "fp32")  # parts of the name of a file that say nothing else about the model


def download_hint(name: str) -> str:
    """Say the three ways to get a judge.

    Args:
        name: The name of the judge.

    Returns:
        The end of an error message.
    """
    model, folder = name if _on_the_hub(name) else DEFAULT_JUDGE, root() / "judges"
    there = sorted(path.name for path in folder.glob("*") if path.suffix == ".gguf" or (path / "config.json").is_file())
    return (
        f"three ways to get one: (1) with a connection, here or elsewhere: `hf download {model} --local-dir "
        f"{folder / Path(model).name}`, after `hf auth login` and accepting its license where the model asks for that, as "
        f"Gemma does; (2) put a .gguf file of the model into {folder}; (3) give any other causal language model: --judge "
        f"FOLDER or --judge FILE.gguf ({folder} has {', '.join(there) or 'none'})"
    )


def _on_the_hub(name: str) -> bool:
    """Return whether a name can be one of the hub."""
    return name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf")


def locate(name: str) -> tuple[str, dict[str, str]]:
    """Return where transformers finds a judge.

    Args:
        name: A file, a folder, or a name on the hub, as for `load_judge`.

    Returns:
        The folder or the name on the hub, and further arguments of `from_pretrained`.

    Raises:
        UserError: There is no judge, or a package is missing.
    """
    path = find(name)
    if path is None:
        if not _on_the_hub(name):
            raise UserError(f"there is no judge at {name}; {download_hint(name)}")
        return name, {}
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = sorted(file.name for file in path.glob("*.gguf"))
            advice = f"give one of its files: {', '.join(inside)}" if inside else download_hint(name)
            raise UserError(
                f"the folder {path} holds no config.json, so it is not a judge of the Hugging Face format; {advice}"
            )
        if _is_m2s_checkpoint(path / "config.json"):
            raise UserError(
                f"{path} is an m2s run, which is no judge: give a causal language model of the Hugging Face format, such as "
                "gpt2-large. The perplexity of a text under an ar run of text is what m2s evaluate bpd RUN --data FILE gives"
            )
        return str(path), {}
    if path.suffix != ".gguf":
        raise UserError(
            f"{path} is not a judge: give a folder with config.json, a .gguf file, or a name on the Hugging Face hub"
        )
    gguf_values(path)
    missing = [package for package in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"reading {path} needs {', '.join(missing)}: pip install {EXTRA}")
    return str(path.parent), {"gguf_file": path.name}


def find(name: str) -> Path | None:
    """Return the file or folder of a judge: as it is named, or in $M2S_DATA/judges.

    SmolLM2-135M is also found as SmolLM2-135M-Q8_0.gguf, in any case of letters. The shortest name is the closest.

    Args:
        name: A file, a folder, or a name on the hub.

    Returns:
        The path; None where nothing is on this machine.
    """
    folder = root() / "judges"
    for path in (Path(name).expanduser(), folder / name, folder / Path(name).name):
        if path.exists():
            return path
    start = Path(name).name.lower()
    found = [path for path in folder.glob("*") if path.name.lower().startswith(start)]
    found = [path for path in found if path.suffix == ".gguf" or (path / "config.json").is_file()]
    return min(found, key=lambda path: (len(path.name), path.name), default=None) if _on_the_hub(name) else None


def describe_variant(name: str) -> str:
    """Return a line that says what the model in $M2S_DATA/judges is, where it was found for a name that is not its own.

    Args:
        name: The name that was asked for.

    Returns:
        The line. It is empty where the model has that name, also in another file format that keeps the weights.
    """
    start, path = Path(name).name.lower(), find(name)
    if (
        path is None
        or path.name.lower() == start
        or not path.name.lower().startswith(start)
        or Path(name).expanduser().exists()
    ):
        return ""
    words = re.split(r"[-.]", path.name.lower().removesuffix(".gguf").removeprefix(start).strip("-._"))
    bits = {word: re.match(r"i?q(\d)", word) for word in words}
    others = [f"{found[1]}-bit weights" if (found := bits[word]) else word for word in words if word not in SAME_WEIGHTS]
    if not others:
        return ""
    return f"the judge is {path}, which is not the base model {name} but a variant of it: {', '.join(others)}"


def require_download(name: str) -> None:
    """Check that a model of the hub is in the local cache, or that the hub can be reached.

    Args:
        name: The name on the hub.

    Raises:
        UserError: Neither is the case.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
    except ImportError:
        return  # transformers needs it too, and reports what is missing
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    reason = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else why_unreachable(ENDPOINT)
    if reason is not None:
        where = f"is not on this machine, and the Hugging Face hub cannot be reached ({reason})"
        raise UserError(f"the judge {name} {where}; {download_hint(name)}")


def _is_m2s_checkpoint(config: Path) -> bool:
    """Return whether m2s.hub.save wrote this config.json."""
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.keys() >= {"format", "m2s", "head"}
