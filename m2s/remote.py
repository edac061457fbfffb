"""Download from and upload to the Hugging Face hub."""

import difflib
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from m2s.io import is_likely_local, similar_path

LISTED = 4  # names of folders in an error message
OFFLINE = (ConnectionError, TimeoutError, socket.gaierror)
# Classes of httpx, requests and huggingface_hub, by name, because none of these is required.
OFFLINE_NAMES = {"ConnectError", "ConnectTimeout", "OfflineModeIsEnabled", "ReadTimeout", "ProxyError"}
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def locate(path_or_repo: str | Path, files: Sequence[str], suffixes: Sequence[str] = ()) -> Path:
    """Return a local folder or file, or download a repository.

    Args:
        path_or_repo: A folder, a file, or a repository "owner/name".
        files: The files to download.
        suffixes: The suffixes of files that are returned as they are.

    Returns:
        The folder or the file, or a copy of the repository in the hub's cache.

    Raises:
        FileNotFoundError: There is no such folder, and the repository cannot be downloaded.
        NotADirectoryError: The path is a file without one of the suffixes.
        ImportError: `huggingface_hub` is not installed.
    """
    if not isinstance(path_or_repo, str | Path):
        raise TypeError(f"a checkpoint is the path of a folder or the name of a repository, not {type(path_or_repo).__name__}")
    path = Path(path_or_repo).expanduser()
    try:
        if path.is_dir():
            return path
        there = path.exists()
    except OSError as error:  # such as a name that is too long
        raise FileNotFoundError(f"there is no folder {str(path)[:100]}: {error.strerror}") from None
    if there and path.suffix in suffixes:
        return path
    if there:
        holds = path.name in files or any((path.parent / name).is_file() for name in files)
        folder = path.parent.resolve() if path.parent == Path() else path.parent
        advice = f"give {folder}" if holds else "give the folder of a run, such as runs/digits (m2s train makes one)"
        raise NotADirectoryError(f"{path} is a file, but a checkpoint is a folder: {advice}")
    repo, missing = str(path_or_repo), f"there is no folder {path}{folders_beside(path)}"
    if not REPOSITORY.fullmatch(repo):
        raise FileNotFoundError(f'{missing}, and "{repo}" is not the name of a repository "owner/name"')
    try:
        hub = _hub("a repository")
    except ImportError:
        if is_likely_local(repo):
            raise FileNotFoundError(f"{missing}: {_advice(path)}") from None
        raise ImportError(f"{missing}; {if_on_the_hub('repository', repo, 'huggingface_hub')}") from None
    try:
        return Path(hub.snapshot_download(repo, allow_patterns=list(files)))
    except Exception as error:  # its classes differ between versions of huggingface_hub
        if is_offline(error):
            if is_likely_local(repo):
                raise FileNotFoundError(f"{missing}: {_advice(path)}") from error
            raise FileNotFoundError(
                f"{missing}, and the Hugging Face hub cannot be reached to look for the repository {repo}: this machine is "
                "offline, or HF_HUB_OFFLINE is set. Copy the folder of the checkpoint here and give its path"
            ) from error
        raise FileNotFoundError(
            f"{missing}, and the repository {repo} could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}): check the name, the connection, and HF_TOKEN where the repository is private"
        ) from error


def _advice(path: Path) -> str:
    """What to do about a path that does not exist."""
    similar = similar_path(path)
    return "check the path" if similar is None else f"did you mean {similar}?"


def if_on_the_hub(kind: str, name: str, package: str) -> str:
    """Return the end of an error message about OWNER/NAME that is no path, where a package for the hub is not installed.

    Args:
        kind: What the hub may have, such as "repository".
        name: OWNER/NAME.
        package: The package to install, as pip takes it.
    """
    return f"if you mean the {kind} {name} of the Hugging Face hub: pip install {package}"


def is_offline(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, says that there is no connection.

    Args:
        error: An error of huggingface_hub, or of the library with which it connects.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OFFLINE) or type(seen).__name__ in OFFLINE_NAMES:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def check_repository(repo: str) -> None:
    """Check the name of a repository.

    Args:
        repo: The repository, "owner/name".

    Raises:
        ValueError: The name is invalid.
    """
    if not REPOSITORY.fullmatch(repo):
        raise ValueError(f'repo is "{repo}", but it must be "owner/name"')


def folders_beside(path: Path) -> str:
    """Return the folders beside a path that does not exist, similar names first; empty where its parent does not exist either.

    Args:
        path: The path.
    """
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    names.sort(key=lambda name: (-difflib.SequenceMatcher(None, path.name, name).ratio(), name))
    held = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
    return f" ({path.parent.resolve() if path.parent == Path() else path.parent} holds {held or 'no folder'})"


def upload(folder: Path, repo: str, files: Sequence[str], private: bool) -> str:
    """Upload files to a repository.

    Args:
        folder: The folder that holds the files.
        repo: The repository, "owner/name"; created if it does not exist.
        files: The names of the files. `README.md` is uploaded too, where there is one.
        private: Create a private repository.

    Returns:
        The address of the repository.

    Raises:
        ValueError: The name of the repository is invalid.
        ConnectionError: The hub cannot be reached or does not allow the upload.
        ImportError: `huggingface_hub` is not installed.
    """
    check_repository(repo)
    hub = _hub("uploading a checkpoint")
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=[*files, "README.md"])
    except Exception as error:
        if is_offline(error):
            raise ConnectionError(
                f"{repo} could not be written: the Hugging Face hub cannot be reached, because this machine is offline or "
                "HF_HUB_OFFLINE is set. Use save_pretrained, and upload the folder from a machine with a connection"
            ) from error
        raise ConnectionError(
            f"{repo} could not be written on the Hugging Face hub ({type(error).__name__}): check the connection, and that "
            "HF_TOKEN may write there"
        ) from error
    return str(address)


def _hub(purpose: str) -> ModuleType:
    """Import huggingface_hub, which is optional."""
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(f"{purpose} needs huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub
