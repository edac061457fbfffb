"""Help pages: every command has an example, and every option has a help text of one paragraph."""

import dataclasses
import typing

import pytest
from typing_extensions import Doc

from m2s.cli import COMMANDS, commands, main
from m2s.cli.options import command_options, subcommands
from m2s.presets import PRESETS


def leaves() -> dict[str, type]:
    """Every command without subcommands, by the words that name it; presets of m2s train belong to the configuration."""
    found: dict[str, type] = {}
    for name, command in commands().items():
        inner = {} if name == "train" else subcommands(command)
        found |= {f"{name} {word}": kind for word, kind in inner.items()} if inner else {name: command}
    return found


@pytest.mark.parametrize("name", [name for name in leaves() if name != "train"])
def test_every_option_has_a_help_text(name: str) -> None:
    command = leaves()[name]
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        metadata = getattr(hints[field.name], "__metadata__", ())
        texts = [mark.documentation if isinstance(mark, Doc) else getattr(mark, "help", None) for mark in metadata]
        if command.__doc__ and f"{field.name}: " in command.__doc__:  # a registered metric describes its options under Args:
            continue
        (text,) = filter(None, texts)
        assert len(text) > 10 and "\n" not in text, field.name


@pytest.mark.parametrize("name", leaves())
def test_every_command_has_an_example(name: str) -> None:
    assert f"Example: m2s {name}" in str(leaves()[name].__doc__)


@pytest.mark.parametrize("words", [[], ["data"], ["evaluate"]], ids=" ".join)
def test_overview_has_a_summary_of_each_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--help"])
    text = capsys.readouterr().out
    children = subcommands(COMMANDS[words[0]]) if words else COMMANDS
    assert exit_.value.code == 0 and text.startswith(f"usage: {' '.join(['m2s', *words])} [-h] {{")
    for name, command in children.items():
        summary = " ".join(str(command.__doc__).split("\n\n")[0].split())
        assert f"\n  {name} " in text and summary[:20] in text


@pytest.mark.parametrize("path", [[], ["data"], ["evaluate"], ["data", "check"], ["train", "digits"]], ids=" ".join)
def test_help_is_also_a_command(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`m2s help COMMAND` is `m2s COMMAND --help`, and `m2s` alone prints the commands."""
    pages = []
    for words in (["help", *path], [*path, "--help"], *([[]] if not path else [])):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        pages.append(capsys.readouterr().out)
        assert exit_.value.code == 0
    assert len(set(pages)) == 1 and pages[0].startswith(f"usage: {' '.join(['m2s', *path])}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["train", "digit"], "unknown preset 'digit'; did you mean digits?"),
        (["evaluate", "bdp"], "unknown metric 'bdp'; did you mean bpd?"),
        (["data", "prepar"], "unknown command 'prepar' of m2s data; did you mean prepare?"),
        (["data"], "m2s data needs a command: download, prepare, check, list, adversaries"),
        (["train", "--steps", "3"], f"m2s train needs a preset before any option: {', '.join(PRESETS)}"),
    ],
)
def test_unknown_words_are_named_by_what_they_are(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2 and capsys.readouterr().err == f"m2s: {said}\n"


def test_sampler_options_are_generated_from_the_samplers() -> None:
    for name in ("sample", "audit", "repair"):
        options = command_options(commands()[name])
        assert {"--corrections", "--sites", "--leap", "--entry", "--strength"} <= set(options)
        assert options["--corrections"].kind is int and options["--leap"].kind is float
        assert not options["--corrections"].required
