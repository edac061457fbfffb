"""Commands and options as data, and the check of a command line against them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from m2s.cli.options import UnknownOptionError, check_arguments, command_options, find_command, flag, subcommands
from m2s.errors import UserError


@dataclass(frozen=True)
class Inner:
    weight_decay: float = 0.0
    fused: bool = False


@dataclass(frozen=True)
class Outer:
    place: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PLACE")]
    out: Path
    inner: Inner = field(default_factory=Inner)
    flat: Annotated[Inner, tyro.conf.arg(name="")] = field(default_factory=Inner)
    labels: tuple[int, ...] = ()
    kind: Literal["a", "b"] = "a"
    top_k: int | None = None
    verbose: bool = False


@dataclass(frozen=True)
class Group:
    action: Annotated[Outer, tyro.conf.subcommand("go")] | Annotated[Inner, tyro.conf.subcommand("stop")]


def test_options_of_a_dataclass() -> None:
    options = command_options(Outer)
    assert list(options) == [
        "PLACE",
        "--out",
        "--inner.weight-decay",
        "--inner.fused",
        "--inner.no-fused",
        "--weight-decay",
        "--fused",
        "--no-fused",
        "--labels",
        "--kind",
        "--top-k",
        "--verbose",
        "--no-verbose",
    ]
    assert [name for name, option in options.items() if option.required] == ["PLACE", "--out"]
    assert options["--labels"].many and options["--kind"].choices == ("a", "b") and options["--top-k"].optional
    assert flag("optimizer.weight_decay") == "--optimizer.weight-decay"


def test_tyro_has_the_same_options() -> None:
    words = [
        "x",
        "--out",
        "y",
        "--inner.weight-decay",
        "1",
        "--inner.no-fused",
        "--fused",
        "--labels",
        "1",
        "2",
        "--top-k",
        "3",
    ]
    check_arguments(Outer, words)
    parsed = tyro.cli(Outer, args=words)
    assert parsed == Outer("x", Path("y"), Inner(1.0), Inner(fused=True), (1, 2), "a", 3)


def test_commands_are_found_by_their_words() -> None:
    assert list(subcommands(Group)) == ["go", "stop"] and subcommands(Inner) == {}
    assert find_command(["group", "go", "x"], {"group": Group}) == (["group", "go"], Outer)
    assert find_command(["group"], {"group": Group}) == (["group"], None)
    assert find_command(["other"], {"group": Group}) == ([], None)


@pytest.mark.parametrize(
    "words",
    ["x --out y", "--out=y x", "x --out y --top_k 3", "x --out y --top-k -1", "x --out y --top-k None", "x --labels --out y"],
)
def test_valid_arguments(words: str) -> None:
    check_arguments(Outer, words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--out y", "PLACE is missing"),
        ("x", "--out is missing"),
        ("x z --out y", "unexpected argument z"),
        ("x --out", "--out needs a value"),
        ("x --out y --kind c", "--kind is 'c', but it must be one of a, b"),
        ("x --out y --labels 1 b", "--labels is '1 b', but it must be whole numbers"),
        ("x --out y --top-k 1.5", "--top-k is '1.5', but it must be a whole number"),
        ("x --out y --inner.weight-decay much", "--inner.weight-decay is 'much', but it must be a number"),
    ],
)
def test_invalid_arguments(words: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        check_arguments(Outer, words.split())
    assert said in str(error.value)


def test_unknown_option_knows_the_others() -> None:
    with pytest.raises(UnknownOptionError) as error:
        check_arguments(Outer, ["x", "--out", "y", "--topk", "3"])
    assert error.value.name == "--topk" and "--top-k" in error.value.known and "PLACE" not in error.value.known
