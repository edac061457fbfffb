"""Suite 6: files from others. Nothing in them runs, nothing is written outside the folder of a command, nothing hangs."""

import functools
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from .campaign import Suite, suite
from .commands import DRAW, TRAIN, Command, base, copy_inputs, new_folder, run_command, snapshot, words
from .fork import forked
from .fuzz_api import MEMORY
from .fuzz_files import RESUMED, make_inputs
from .io_errors import status, user_message

CANARY = "executed"
"""The file that hostile code would write, beside the folder of the command."""
SECRET = b"a secret outside the folder"


class Bomb:
    """An object whose pickle writes the canary when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


class Writer(torch.nn.Module):
    """A TorchScript that writes a file when it is called."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Save the input, and return features."""
        torch.save(x, self.path)
        return x.mean((2, 3))


def _pickle_weights(run: Path, canary: Path) -> None:
    (run / "model.safetensors").write_bytes(pickle.dumps(Bomb(canary)))


def _pickle_beside(run: Path, canary: Path) -> None:
    (run / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "checkpoint.pth", "model.pt", "checkpoints-meta/checkpoint.pth"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(pickle.dumps(Bomb(canary)))


def _torch_weights(run: Path, canary: Path) -> None:
    torch.save({"model": Bomb(canary)}, run / "model.safetensors")


def _script_weights(run: Path, canary: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Identity(), torch.zeros(1)), str(run / "model.safetensors"))


def _header(run: Path, change: Callable[[dict[str, Any]], None], rest: bytes | None = None) -> None:
    path = run / "model.safetensors"
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + (data[end:] if rest is None else rest))


def _absurd_shape(run: Path, canary: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        for entry in header.values():
            if "shape" in entry:
                entry["shape"] = [2**40, 2**20]

    _header(run, change)


def _wrong_dtype(run: Path, canary: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        for entry in header.values():
            if entry.get("dtype") == "F32":
                entry["dtype"] = "I32"

    _header(run, change)


def _nan_weights(run: Path, canary: Path) -> None:
    path = run / "model.safetensors"
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    path.write_bytes(data[:end] + struct.pack("<f", float("nan")) * ((len(data) - end) // 4))


def _truncated(run: Path, canary: Path) -> None:
    path = run / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _config(**changes: Any) -> Callable[[Path, Path], None]:
    def spoil(run: Path, canary: Path) -> None:
        path = run / "config.json"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            part = config
            *parents, last = key.split("__")
            for parent in parents:
                part = part[parent]
            part[last] = value
        path.write_text(json.dumps(config))

    return spoil


def _index(run: Path, canary: Path) -> None:
    (run / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embedding.weight": "../secret.bin", "x": "/etc/passwd"}}
    (run / "model.safetensors.index.json").write_text(json.dumps(index))


def _link(name: str, target: str = "../secret.bin") -> Callable[[Path, Path], None]:
    def spoil(run: Path, canary: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)

    return spoil


def _pipe(name: str) -> Callable[[Path, Path], None]:
    def spoil(run: Path, canary: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return spoil


def _link_state(run: Path, canary: Path) -> None:
    if (run / "state").is_dir():
        shutil.move(run / "state", run.parents[1] / "secret-folder" / "state")
        (run / "state").symlink_to("../../secret-folder/state")


def _pipe_in_state(name: str) -> Callable[[Path, Path], None]:
    def spoil(run: Path, canary: Path) -> None:
        for path in sorted(run.glob(f"state/*/{name}")):
            path.unlink()
            os.mkfifo(path)

    return spoil


def _without_checksum(spoil: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Also remove the checksum from config.json, so that the reader of the weights sees them."""

    def both(run: Path, canary: Path) -> None:
        spoil(run, canary)
        path = run / "config.json"
        config = json.loads(path.read_text())
        config.pop("sha256", None)
        path.write_text(json.dumps(config))

    return both


def _tokenizer(run: Path, canary: Path) -> None:
    _config(tokenizer={"kind": "HuggingFace", "file": "../secret.bin", "vocab": 17})(run, canary)


def _pickled_arrays(run: Path, canary: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
        text = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + pickle.dumps(Bomb(canary))
        file.writestr("tokens.npy", text)
        file.writestr("../../outside.npy", text)
    (run.parent / "drawn.npz").write_bytes(made.getvalue())


def _escape(run: Path, canary: Path) -> None:
    _config(extra={"x": "\x1b]0;title\x07"}, model__kind="\x1b[2Jdit")(run, canary)


SPOILS: dict[str, Callable[[Path, Path], None]] = {
    "pickle in the place of the weights": _pickle_weights,
    "pickles beside the configuration": _pickle_beside,
    "torch.save in the place of the weights": _torch_weights,
    "TorchScript in the place of the weights": _script_weights,
    "shapes of 2^60 numbers": _absurd_shape,
    "shapes of 2^60 numbers, no checksum": _without_checksum(_absurd_shape),
    "weights of another dtype": _wrong_dtype,
    "weights of another dtype, no checksum": _without_checksum(_wrong_dtype),
    "NaN weights": _nan_weights,
    "NaN weights, no checksum": _without_checksum(_nan_weights),
    "truncated weights": _truncated,
    "truncated weights, no checksum": _without_checksum(_truncated),
    "an index that names files outside": _index,
    "a network of 10,000,000 blocks": _config(model__depth=10_000_000),
    "a network of width 2^40": _config(model__width=2**40),
    "a vocabulary of 2^40": _config(head__process__vocab=2**40, model__states=2**40),
    "a path in the kind": _config(model__kind="../../../secret"),
    "a module in the kind": _config(head__kind="os.system"),
    "a tokenizer outside": _tokenizer,
    "control characters": _escape,
    "config.json is a link": _link("config.json"),
    "config.json.new is a link": _link("config.json.new"),
    "weights are a link": _link("model.safetensors"),
    "the lock is a link": _link(".lock"),
    "log.jsonl is a link": _link("log.jsonl"),
    "train.json is a link": _link("train.json"),
    "a state is a link": _link("state/step-00000009", "../../../secret-folder"),
    "the folder of the states is a link": _link_state,
    "state.json is a pipe": _pipe_in_state("state.json"),
    "manifest.json is a pipe": _pipe_in_state("manifest.json"),
    "the tensors of a state are a pipe": _pipe_in_state("*.safetensors"),
    "train.json is a pipe": _pipe("train.json"),
    "train.json is a device": _link("train.json", "/dev/zero"),
    "samples are a pipe": _pipe("../drawn.npz"),
    "config.json is a pipe": _pipe("config.json"),
    "weights are a pipe": _pipe("model.safetensors"),
    "log.jsonl is a pipe": _pipe("log.jsonl"),
    "pickled arrays": _pickled_arrays,
}
COMMANDS = {
    "sample": Command(("sample", "m2s", "--out", "samples.npz", *DRAW), ("m2s", "drawn.npz")),
    "bpd": Command(words("evaluate bpd m2s --limit 2 --passes 2 --device cpu"), ("m2s", "drawn.npz")),
    "init": Command(("train", "digits", "--out", "new", "--init", "m2s", *TRAIN), ("m2s", "drawn.npz")),
    "resume": Command(("train", "digits", "--out", "m2s", *RESUMED), ("m2s", "drawn.npz")),
    "report": Command(words("report m2s --out report.html"), ("m2s", "drawn.npz")),
    "ngrams": Command(words("evaluate ngrams drawn.npz --reference digits:test"), ("m2s", "drawn.npz")),
    "audit": Command(("audit", "m2s", "--out", "audit", *DRAW), ("m2s", "drawn.npz")),
}
PAIRS = [(spoil, command) for spoil in SPOILS for command in COMMANDS]


def hostile_folder(number: int, dice: random.Random) -> str:
    """Run a command on a hostile folder.

    Args:
        number: The number of the pair of a folder and a command.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    spoil, name = PAIRS[number]
    place = new_folder()
    folder, canary = place / "work", place / CANARY
    folder.mkdir()
    (place / "secret-folder").mkdir()
    (folder / "secret.bin").write_bytes(SECRET)
    command = COMMANDS[name]
    copy_inputs(command, folder)
    if name == "resume":  # an unfinished run, so that there is something to write
        make_inputs()
        shutil.rmtree(folder / "m2s")
        shutil.copytree(base() / "halfway", folder / "m2s")
    SPOILS[spoil](folder / "m2s", canary)
    outside = snapshot(place / "secret-folder")

    def work() -> None:
        limit = status("VmSize") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        run_command(command.arguments)

    try:
        ended = forked(work, folder, limit=30)
        wrong = user_message(ended)
        if canary.exists():
            wrong = "code of the file was executed"
        elif sorted(path.name for path in place.iterdir()) != ["secret-folder", "work"] or (
            snapshot(place / "secret-folder") != outside
        ):
            wrong = "a file was written outside the folder"
        elif (folder / "secret.bin").read_bytes() != SECRET:
            wrong = "a file was overwritten through a link"
        elif not wrong and any(sign in ended.out + ended.err for sign in ("\x1b", "\x07", SECRET.decode())):
            wrong = f"control characters or a secret reach the terminal\n{ended.err!r}"
        elif not wrong and spoil.startswith("NaN weights") and name in ("sample", "bpd", "init") and ended.code == 0:
            wrong = "NaN weights are used silently"
        return f"m2s {name}, {spoil}: {wrong}" if wrong else ""
    finally:
        shutil.rmtree(place, ignore_errors=True)


INJECTIONS = (
    "<script>document.title='EXECUTED'</script>",
    "<img src=x onerror=\"document.title='EXECUTED'\">",
    "</style><script>document.title='EXECUTED'</script>",
    "</title><script>document.title='EXECUTED'</script>",
    "\"><svg onload=document.title='EXECUTED'>",
    "' onmouseover='document.title=1' autofocus onfocus='document.title=\"EXECUTED\"",
    "javascript:document.title='EXECUTED'",
    "<!--><script>document.title='EXECUTED'</script>",
    "${document.title='EXECUTED'}{{7*7}}{% for x in y %}",
    "&lt;script&gt;document.title='EXECUTED'&lt;/script&gt;",
    "]]><script>document.title='EXECUTED'</script>",
    "<iframe srcdoc=\"<script>parent.document.title='EXECUTED'</script>\">",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@functools.cache
def browser() -> str:
    """The path of a browser; empty where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROME", ""), *BROWSERS))), "")


class Markup(HTMLParser):
    """The elements and attributes of a page that could run code. The page itself has none: its only script is data.

    Args:
        text: The page.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at an element."""
        if tag in ("script", "iframe", "object", "embed") and dict(attrs).get("type") != "application/json":
            self.found.append(tag)
        self.found += [name for name, value in attrs if name.startswith("on") or (value or "").startswith("javascript:")]


def inject(number: int, dice: random.Random) -> str:
    """Put markup into names, configurations and logs of a run, write its page, and open it in a browser.

    The policy of the page, which forbids scripts, is removed before: the markup itself must be escaped.

    Args:
        number: The number of the case; it chooses the markup.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    place, text = new_folder(), INJECTIONS[number % len(INJECTIONS)]
    name = f"run {text}".replace("/", "∕")[:200]
    copy_inputs(Command((), ("m2s", "drawn.npz")), place)
    run = place / name
    (place / "m2s").rename(run)
    shutil.copy(place / "drawn.npz", run / f"{name}.npz")
    original = {file: (run / file).read_text() for file in ("config.json", "train.json", "log.jsonl")}
    arguments = ("report", name, "--out", "page.html", "--title", text, "--notes", text)
    page = place / "page.html"
    try:
        # Too many changes make a run that is rejected. Then fewer strings are changed, until there is a page to open.
        for attempt in range(8):
            for file in ("config.json", "train.json"):
                changed = _injected(json.loads(original[file]), text, dice, 0.3 / (1 + attempt))
                (run / file).write_text(json.dumps(changed))
            lines = [_injected(json.loads(line), text, dice, 0.3) for line in original["log.jsonl"].splitlines()]
            (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            ended = forked(lambda: run_command(arguments), place)
            if wrong := user_message(ended):
                return f"{text}: {wrong}"
            if ended.code == 0:
                break
        else:
            return f"{text}: no page was written in eight attempts\n{ended.err}"
        source = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", source), encoding="utf-8")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [browser(), *options, f"--user-data-dir={place / 'profile'}", "--dump-dom", page.as_uri()]
        seen = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if seen.returncode != 0:
            return f"the browser fails: {seen.stderr[-500:]}"
        title = re.search(r"<title>(.*?)</title>", seen.stdout, re.S)
        if title is None or title[1] == "EXECUTED":
            return f"a script runs in the page: {text}"
        found = Markup(seen.stdout).found
        return f"markup of the run is markup of the page: {found}" if found else ""
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _injected(value: Any, text: str, dice: random.Random, part: float) -> Any:
    """Put a text into a part of the strings and keys of a JSON value."""
    if isinstance(value, dict):
        found = {key: _injected(entry, text, dice, part) for key, entry in value.items()}
        return {**found, text: text} if dice.random() < part else found
    if isinstance(value, list):
        return [_injected(entry, text, dice, part) for entry in value]
    return text if isinstance(value, str) and dice.random() < part else value


SUITES: list[Suite] = [
    suite("hostile", "a hostile folder or file", hostile_folder, total=lambda: len(PAIRS), short=10),
    suite(
        "injection",
        "markup in the HTML report, in Chromium",
        inject,
        target=3 * len(INJECTIONS),
        short=1,
        skip=lambda: "" if browser() else "there is no browser: apt-get install chromium, or set CHROME to the path of one",
    ),
]
