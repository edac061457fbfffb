"""The Hugging Face hub, reached only when a path is no folder here."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

SHOWN = 4  # names of folders in a complaint
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def locate(path_or_repo: str | Path, files: Sequence[str]) -> Path:
    """The folder itself, or a copy of the repository's `files` in the hub's cache."""
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise NotADirectoryError(f"{path} is a file, but a checkpoint is a folder: give {path.parent}")
    repo, missing = str(path_or_repo), f"there is no folder {path}{_beside(path)}"
    if not REPOSITORY.fullmatch(repo):
        raise FileNotFoundError(f'{missing}, and "{repo}" is not the name of a repository "owner/name"')
    hub = _hub(f"{missing}, and looking for the repository {repo}")
    try:
        return Path(hub.snapshot_download(repo, allow_patterns=list(files)))
    except OSError as error:
        raise FileNotFoundError(
            f"{missing}, and the repository {repo} could not be had from the Hugging Face hub "
            f"({type(error).__name__}): check the name, the connection, and HF_TOKEN where the repository is private"
        ) from error


def _beside(path: Path) -> str:
    """What folders there are where `path` is not, the nearest names first; nothing where that place is not there either."""
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    names.sort(key=lambda name: (-difflib.SequenceMatcher(None, path.name, name).ratio(), name))
    held = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f" ({path.parent.resolve() if path.parent == Path() else path.parent} holds {held or 'no folder'})"


def upload(folder: Path, repo: str, files: Sequence[str], private: bool) -> str:
    if not REPOSITORY.fullmatch(repo):
        raise ValueError(f'repo is "{repo}", but it must be "owner/name"')
    hub = _hub("uploading a checkpoint")
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=[*files, "README.md"])
    except OSError as error:
        raise ConnectionError(
            f"{repo} could not be written on the Hugging Face hub ({type(error).__name__}): check the connection, and that "
            "HF_TOKEN may write there"
        ) from error
    return str(address)


def _hub(purpose: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(f"{purpose} needs huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub
