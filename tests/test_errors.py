"""Errors for users: their messages, their parts, and the names that they suggest."""

import pickle

import pytest

import m2s
from m2s.errors import UnsupportedError, UserError, UserTypeError, public_name, suggest, suggestion


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
        (
            {"option": "leap", "value": 0.1, "reason": "sampler 'bayes' does not read it", "hint": "leave it out"},
            "leap is 0.1, but sampler 'bayes' does not read it: leave it out",
        ),
        ({"option": "leap", "reason": "it is not read"}, "leap cannot be used: it is not read"),
        ({"option": "resume", "hint": "the folder has no checkpoint"}, "resume cannot be used: the folder has no checkpoint"),
    ],
)
def test_message_is_built_from_its_parts(parts: dict, message: str) -> None:
    error = UserError(**parts)
    assert str(error) == message
    for name in ("option", "value", "expected", "reason", "hint"):
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


def test_an_option_of_a_section() -> None:
    error = UserError(option="width", value=7, expected="even", hint="try 8").within("network")
    assert str(error) == "network.width is 7, but it must be even: try 8" and error.option == "network.width"
    assert error.within("network") is error
    assert str(UserError("no data").within("data")) == "data: no data"
    assert isinstance(UserTypeError(option="width", expected="an int").within("network"), UserTypeError)


def test_a_wrong_type_is_also_a_type_error() -> None:
    error = pickle.loads(pickle.dumps(UserTypeError(option="steps", expected="an int, not float")))
    assert isinstance(error, TypeError) and isinstance(error, UserError) and error.option == "steps"


def test_an_unsupported_head_names_the_options_of_the_supported_classes() -> None:
    error = UnsupportedError("this loss", "LogScore()", m2s.Posterior, m2s.Uniform, hint="use another")
    assert str(error) == "this loss is for m2s.Posterior over m2s.Uniform, not for LogScore(): use another"
    assert error.describe({m2s.Uniform: "--process.kind uniform"}) == (
        "this loss is for m2s.Posterior over m2s.Uniform (--process.kind uniform), not for LogScore(): use another"
    )
    assert str(UnsupportedError("it", "B", process="a chain")) == "it is for a chain, not for B"
    assert str(pickle.loads(pickle.dumps(error))) == str(error) and isinstance(error, TypeError)


def test_classes_are_named_as_users_import_them() -> None:
    assert public_name(m2s.Absorbing) == "m2s.Absorbing"
    assert public_name(m2s.heads.NextToken) == "m2s.heads.NextToken"


def test_suggestions() -> None:
    known = ["optimizer.clip", "optimizer.lr", "network.kind", "steps"]
    assert suggestion("clip", known) == "did you mean optimizer.clip?"
    assert suggestion("--model.kind", known) == "did you mean network.kind?"
    assert suggestion("zzz", known) == ""
    assert suggest("zzz", known) == "choose from optimizer.clip, optimizer.lr, network.kind, steps"
    assert suggest("step", known).startswith("did you mean steps")
