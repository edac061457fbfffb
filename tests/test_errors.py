"""Errors for users: their messages, their parts, and the names that they suggest."""

import pickle

import pytest

from m2s.errors import UserError, suggest, suggestion


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"option": "steps", "value": 0, "expected": "at least 1", "hint": "try 100"},
            "steps is 0, but it must be at least 1: try 100",
        ),
        ({"option": "steps", "value": 0, "expected": "at least 1"}, "steps is 0, but it must be at least 1"),
        (
            {"option": "grid", "value": "sine", "hint": "choose from linear, cosine"},
            "grid is 'sine': choose from linear, cosine",
        ),
        ({"option": "out", "expected": "a folder", "hint": "give --out"}, "out must be a folder: give --out"),
        ({"option": "resume", "hint": "the folder has no checkpoint"}, "resume cannot be used: the folder has no checkpoint"),
    ],
)
def test_message_is_built_from_its_parts(parts: dict, message: str) -> None:
    error = UserError(**parts)
    assert str(error) == message
    for name in ("option", "value", "expected", "hint"):
        assert getattr(error, name) == parts.get(name)


def test_plain_message() -> None:
    error = UserError("data.bin is empty")
    assert str(error) == error.describe("--data") == "data.bin is empty"
    assert error.option is None and isinstance(error, ValueError)
    with pytest.raises(TypeError, match="needs a message or an option"):
        UserError()


def test_option_is_printed_as_it_is_typed() -> None:
    error = UserError(option="warmup", value=50, expected="at most the 3 steps of the run", hint="try 1")
    assert error.describe("--optimizer.warmup") == (
        "--optimizer.warmup is 50, but it must be at most the 3 steps of the run: try 1"
    )
    assert error.describe() == str(error)


def test_parts_survive_pickling() -> None:
    """The first process of a distributed run sends its errors to the others."""
    error = pickle.loads(pickle.dumps(UserError(option="steps", value=0, expected="at least 1")))
    assert str(error) == "steps is 0, but it must be at least 1"
    assert (error.option, error.value, error.describe("--steps")) == ("steps", 0, "--steps is 0, but it must be at least 1")


def test_suggestions() -> None:
    known = ["optimizer.clip", "optimizer.lr", "network.kind", "steps"]
    assert suggestion("clip", known) == "did you mean optimizer.clip?"
    assert suggestion("--model.kind", known) == "did you mean network.kind?"
    assert suggestion("zzz", known) == ""
    assert suggest("zzz", known) == "choose from optimizer.clip, optimizer.lr, network.kind, steps"
    assert suggest("step", known).startswith("did you mean steps")
