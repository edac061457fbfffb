"""Suite 3: damaged files. A command reads them, or says in one line what is wrong with them; it is never silently wrong."""

import functools
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import m2s.training.loop
from m2s.training.log import NAME as LOG

from .campaign import Suite, suite
from .commands import (
    DRAW,
    NETWORK,
    RUN,
    TRAIN,
    Command,
    base,
    copy_inputs,
    new_folder,
    run_command,
    run_forked,
    snapshot,
    words,
)
from .fork import Ended, forked
from .io_errors import user_message
from .mutate import damage_arrays, damage_bytes, damage_json, damage_lines, damage_safetensors, damage_text_or_json

Damage = Callable[[bytes, random.Random], bytes]

TEXT_RUN = (*NETWORK, *RUN, *words("--data.length 16 --optimizer.warmup 1 --device cpu --kernels reference"))
RESUMED = (*TRAIN, *words("--save-every 1 --keep 2"))
SAMPLE = Command(("sample", "m2s", "--out", "samples.npz", *DRAW), ("m2s",))
UNSIGNED_SAMPLE = Command(("sample", "unsigned", "--out", "samples.npz", *DRAW), ("unsigned",))
UNSIGNED_BPD = Command(words("evaluate bpd unsigned --limit 2 --passes 2 --device cpu --out bpd.json"), ("unsigned",))
BPD = Command(words("evaluate bpd m2s --limit 2 --passes 2 --device cpu --out bpd.json"), ("m2s",))
REPORT = Command(words("report m2s --out report.html"), ("m2s",))
REPORT_RESULTS = Command(words("report measured --out report.html"), ("measured",))
INIT = Command(("train", "digits", "--out", "new", "--init", "m2s", *TRAIN), ("m2s",))
RESUME = Command(("train", "digits", "--out", "halfway", *RESUMED), ("halfway",))
TEXT_TRAIN = Command(
    ("train", "owt", "--method", "m2s-offset", "--data.folder", "packed", "--out", "run", *TEXT_RUN), ("packed",)
)
TEXT_BPD = Command(words("evaluate bpd text --data packed --passes 2 --limit 2 --device cpu"), ("packed", "text"))
TEXT_CHECK = Command(words("data check packed"), ("packed",))
TEXT_RESUME = Command(words("data prepare texts --out unpacked --tokenizer bytes --shard-tokens 150"), ("texts", "unpacked"))
TEXT_NEW = Command(words("data prepare texts --out new --tokenizer bytes"), ("texts",))
NGRAMS = Command(words("evaluate ngrams drawn.npz --reference digits:test --out ngrams.json"), ("drawn.npz",))
FID = Command(words("evaluate fid drawn.npz --against digits:test --limit 8 --few --no-kid --out fid.json"), ("drawn.npz",))
CLAMP = Command(("sample", "m2s", "--clamp", "clamp.npy", "--out", "samples.npz", *DRAW), ("m2s", "clamp.npy"))
MNIST = Command(words("evaluate ngrams drawn.npz --reference mnist:test --out ngrams.json"), ("drawn.npz", "data"))


LEVELS = 17  # of the images of m2s.data.digits


@dataclass(frozen=True)
class Target:
    """A kind of file to damage.

    Args:
        files: Their patterns, in the folder of a case.
        damage: How they are damaged.
        commands: The commands that read them.
        unchanged: The command ends as without damage, or says what is wrong. Otherwise other results are possible, because
            the file is an option of the user.
    """

    files: tuple[str, ...]
    damage: Damage
    commands: tuple[Command, ...]
    unchanged: bool = False


TARGETS = {
    "config": Target(("m2s/config.json",), damage_text_or_json, (SAMPLE, BPD, REPORT, INIT)),
    "weights": Target(("m2s/model.safetensors",), damage_safetensors, (SAMPLE, BPD, INIT), unchanged=True),
    "unsigned-weights": Target(("unsigned/model.safetensors",), damage_safetensors, (UNSIGNED_SAMPLE, UNSIGNED_BPD)),
    "state": Target(("halfway/state/*/*.json",), damage_text_or_json, (RESUME,), unchanged=True),
    "shard": Target(("halfway/state/*/*.safetensors",), damage_safetensors, (RESUME,), unchanged=True),
    "record": Target(("halfway/train.json",), damage_text_or_json, (RESUME,), unchanged=True),
    "log": Target(("halfway/log.jsonl",), damage_lines, (RESUME,)),
    "report": Target(("measured/*.json", "measured/*.jsonl", "measured/*.npz"), damage_bytes, (REPORT_RESULTS,)),
    "result": Target(("measured/train.json", "measured/bpd.json"), damage_json, (REPORT_RESULTS,)),
    "packed-meta": Target(("packed/meta.json",), damage_text_or_json, (TEXT_TRAIN, TEXT_CHECK, TEXT_BPD)),
    "packed-tokens": Target(("packed/*.bin",), damage_bytes, (TEXT_TRAIN, TEXT_CHECK), unchanged=True),
    "packing": Target(("unpacked/plan.json", "unpacked/progress.json"), damage_text_or_json, (TEXT_RESUME,), unchanged=True),
    "documents": Target(("texts/*",), damage_bytes, (TEXT_NEW,)),
    "samples": Target(("drawn.npz",), damage_arrays, (NGRAMS, FID)),
    "clamp": Target(("clamp.npy",), damage_bytes, (CLAMP,)),
    "idx": Target(("data/mnist/*",), damage_bytes, (MNIST,)),
}
"""The files that m2s reads."""

CASES = {"config": 1500, "weights": 400, "unsigned-weights": 400, "state": 500, "shard": 300, "record": 500, "log": 300}
CASES |= {"report": 200, "result": 300, "packed-meta": 500, "packed-tokens": 200, "packing": 300, "documents": 200}
CASES |= {"samples": 500, "clamp": 100, "idx": 150}


@functools.cache
def make_inputs() -> None:
    """Make the inputs that only these suites need: text, an unfinished run and an unfinished preparation."""
    folder = base()
    shutil.copytree(folder / "m2s", folder / "measured")
    shutil.copytree(folder / "m2s", folder / "unsigned")
    config = json.loads((folder / "unsigned" / "config.json").read_text())
    del config["sha256"]  # so that the reader of the weights sees the damage
    (folder / "unsigned" / "config.json").write_text(json.dumps(config))

    def stop(*_: object) -> None:
        os._exit(0)

    def unfinished_run() -> None:
        gradient = m2s.training.loop.Trainer.gradient

        def until_step_three(trainer: m2s.training.loop.Trainer, batch: object) -> object:
            return stop() if trainer.progress.step == 3 else gradient(trainer, batch)  # type: ignore[arg-type]

        m2s.training.loop.Trainer.gradient = until_step_three  # type: ignore[method-assign, assignment]
        run_command(RESUME.arguments)

    def unfinished_text() -> None:
        import m2s.data.pack

        encode = m2s.data.pack._encode
        count = [0]

        def until_document_six(*given: object) -> object:
            count[0] += 1
            return stop() if count[0] == 6 else encode(*given)  # type: ignore[arg-type]

        m2s.data.pack._encode = until_document_six  # type: ignore[assignment]
        run_command(TEXT_RESUME.arguments)

    for work in (
        unfinished_run,
        unfinished_text,
        lambda: run_command(
            words("data prepare texts --out packed --tokenizer bytes --shard-tokens 150 --validation-fraction 0.333")
        ),
        lambda: run_command((*TEXT_TRAIN.arguments, "--out", "text")),
        lambda: run_command(words("evaluate bpd m2s --limit 2 --passes 2 --device cpu --out measured/bpd.json")),
    ):
        ended = forked(work, folder)
        assert ended.code == 0, ended.err
    shutil.copy(folder / "drawn.npz", folder / "measured" / "samples.npz")
    np.save(folder / "clamp.npy", np.full((4, 64), -1))
    _write_small_mnist(folder / "data" / "mnist")


def _write_small_mnist(folder: Path) -> None:
    """Write idx files with a few images."""
    folder.mkdir(parents=True)
    for name, count in (("train", 3), ("t10k", 2)):
        pixels = bytes(range(256)) * (count * 28 * 28 // 256 + 1)
        head = b"".join(number.to_bytes(4, "big") for number in (0x803, count, 28, 28))
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + pixels[: count * 28 * 28])
        (folder / f"{name}-labels-idx1-ubyte").write_bytes((0x801).to_bytes(4, "big") + count.to_bytes(4, "big") + bytes(count))


@functools.cache
def undamaged(command: Command) -> tuple[Ended, dict[str, bytes]]:
    """Run a command without damage.

    Args:
        command: The command.

    Returns:
        How it ended, and the files that it left.
    """
    make_inputs()
    folder = new_folder()
    copy_inputs(command, folder)
    ended, files = run_forked(command, folder), snapshot(folder)
    shutil.rmtree(folder)
    return ended, files


def damaged_file(name: str, dice: random.Random) -> str:
    """Damage a file, and run a command that reads it.

    Args:
        name: The name of the target.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    make_inputs()
    target, folder = TARGETS[name], new_folder()
    command = dice.choice(target.commands)
    expected = undamaged(command)
    copy_inputs(command, folder)
    try:
        path = dice.choice(sorted(path for pattern in target.files for path in folder.glob(pattern)))
        before = path.read_bytes()
        after = target.damage(before, dice)
        path.write_bytes(after)
        ended = run_forked(command, folder)
        wrong = user_message(ended) or _unsafe_output(ended)
        if not wrong and ended.code == 0:
            wrong = _silent(name, target, folder, path, (before, after), expected[1])
        where = path.relative_to(folder)
        return f"{' '.join(command.arguments[:3])} with a damaged {where}: {wrong}\n{describe(before, after)}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def describe(before: bytes, after: bytes) -> str:
    """Show the place where two files differ.

    Args:
        before: The file.
        after: The damaged file.
    """
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return f"at byte {at}: {before[at : at + 60]!r} became {after[at : at + 60]!r}"


def _unsafe_output(ended: Ended) -> str:
    """Control characters from a file must not reach the terminal."""
    for text in (ended.out, ended.err):
        if "\x1b" in text or "\x07" in text:
            return f"control characters reach the terminal: {text!r}"
    return ""


def _silent(
    name: str, target: Target, folder: Path, path: Path, change: tuple[bytes, bytes], expected: dict[str, bytes]
) -> str:
    """Whether a command that ended with success has a wrong result."""
    found = snapshot(folder)
    where = str(path.relative_to(folder))
    if name == "log":
        return _log_lost_records(folder / path.parent.name / LOG, *change)
    if "samples.npz" in found:
        with np.load(io.BytesIO(found["samples.npz"])) as file:
            if file["tokens"].min() < 0 or file["tokens"].max() >= LEVELS:
                return "it draws tokens outside the vocabulary"
    if "bpd.json" in found and _has_null(json.loads(found["bpd.json"]).get("nelbo")):
        return "it writes a NELBO that is not a number"
    if not target.unchanged:
        return ""
    # The damaged file itself may stay, also under another name.
    others = {key for key in {*found, *expected} if key != where and ".damaged" not in key and not key.startswith(where + "/")}
    different = sorted(key for key in others if found.get(key) != expected.get(key))
    return f"silently other files: {', '.join(different)}" if different else ""


def _has_null(value: object) -> bool:
    """Whether a JSON value holds null or NaN."""
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    return value is None or value != value


def _log_lost_records(path: Path, before: bytes, after: bytes) -> str:
    """Whether a record of an undamaged line is lost."""

    def key(line: bytes) -> str:
        return json.dumps({name: value for name, value in json.loads(line).items() if name == "step" or "bits" in name})

    intact = {key(a) for a, b in zip(before.splitlines(), after.splitlines(), strict=False) if a == b}
    stored = set()
    for line in path.read_bytes().splitlines():
        try:
            stored.add(key(line))
        except (ValueError, AttributeError):
            continue
    missing = sorted(intact - stored)
    return f"records of undamaged lines are lost: {missing}" if missing else ""


def _suites() -> list[Suite]:
    """The suites of all targets."""
    return [
        suite(
            f"fuzz-{name}",
            "a damaged file",
            lambda number, dice, name=name: damaged_file(name, dice),
            target=CASES[name],
            short=2 if CASES[name] >= 300 else 1,
        )
        for name in TARGETS
    ]


SUITES = _suites()
