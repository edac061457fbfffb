"""Seeded damage to JSON files: bytes that are cut off or changed, values that are missing, of another type or impossible."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

VALUES: list[Any] = [None, True, -1, 0, 3, 0.5, "", "text", "line\nbreak \x1b[31m", "../secret", [], [None], {}, {"a": {}}]
DEEP = b"[" * 100_000


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from places(part, (*path, key))


def parent(value: Any, path: tuple[Any, ...]) -> Any:
    """The object or list that holds a place."""
    for key in path[:-1]:
        value = value[key]
    return value


def _edit(change: Callable[[random.Random, Any, Any], None]) -> Callable[[random.Random, bytes], bytes]:
    """A mutation of one value of the parsed file."""

    def mutate(rng: random.Random, data: bytes) -> bytes:
        value = json.loads(data)
        path = rng.choice(list(places(value)))
        change(rng, parent(value, path), path[-1])
        return json.dumps(value).encode()

    return mutate


def _put(*values: Any) -> Callable[[random.Random, Any, Any], None]:
    def change(rng: random.Random, holder: Any, key: Any) -> None:
        holder[key] = rng.choice(values)

    return change


def _remove(rng: random.Random, holder: Any, key: Any) -> None:
    del holder[key]


def _flip(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def _duplicate(rng: random.Random, data: bytes) -> bytes:
    """Give the outermost object one of its keys twice."""
    value = json.loads(data)
    if not isinstance(value, dict):
        return b'{"a": 1, "a": 2}'
    key = rng.choice(list(value))
    return b"{" + json.dumps(key).encode() + b": 1, " + data.lstrip()[1:]


def _deep(rng: random.Random, data: bytes) -> bytes:
    """Nest a value more deeply than Python's recursion limit."""
    place = rng.randrange(len(data))
    return data[:place] + DEEP + data[place:]


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "empty": lambda rng, data: b"",
    "truncated": lambda rng, data: data[: rng.randrange(len(data))],
    "flipped": _flip,
    "zeros": lambda rng, data: data[: (place := rng.randrange(len(data)))] + bytes(len(data) - place),
    "not utf-8": lambda rng, data: data[: (place := rng.randrange(len(data)))] + b"\xff\xfe" + data[place:],
    "key removed": _edit(_remove),
    "other type": _edit(_put(*VALUES)),
    "huge": _edit(_put(10**30, -(10**30), 10**400, 1e308)),
    "digits": lambda rng, data: data.replace(b"1", b"9" * 5000, 1),
    "not finite": _edit(_put(float("nan"), float("inf"), float("-inf"))),
    "nested": _deep,
    "key twice": _duplicate,
    "another root": lambda rng, data: json.dumps(rng.choice(VALUES)).encode(),
}


def cases(count: int) -> list[tuple[str, int]]:
    """Each kind of damage with `count` seeds, for `pytest.mark.parametrize`."""
    return [(kind, seed) for kind in MUTATIONS for seed in range(count)]


def mutate(kind: str, seed: int, data: bytes) -> bytes:
    """Damage the contents of a JSON file.

    Args:
        kind: A key of `MUTATIONS`.
        seed: The seed of the damage.
        data: The contents.
    """
    return MUTATIONS[kind](random.Random(f"{kind} {seed}"), data)
