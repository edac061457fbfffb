"""Find and build samplers by name."""

import difflib
from dataclasses import fields
from typing import Any

from m2s.samplers.base import SAMPLERS, NamedSampler
from m2s.samplers.capabilities import default_sampler

__all__ = ["SAMPLERS", "default_sampler", "find_sampler", "make_sampler"]


def find_sampler(sampler: str | NamedSampler) -> NamedSampler:
    """Return a sampler.

    Args:
        sampler: A name in `SAMPLERS`, for its default options, or a sampler object.

    Returns:
        The sampler object.

    Raises:
        ValueError: There is no sampler of that name.
    """
    return sampler if isinstance(sampler, NamedSampler) else make_sampler(sampler)


def make_sampler(name: str, **options: Any) -> NamedSampler:
    """Build a sampler from its name and options.

    Args:
        name: A name in `SAMPLERS`.
        options: Fields of its dataclass, by name.

    Returns:
        The sampler.

    Raises:
        ValueError: There is no such sampler, or it has no such option.
    """
    if not isinstance(name, str) or name not in SAMPLERS:
        near = difflib.get_close_matches(str(name), SAMPLERS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"there is no sampler {name!r}{hint}: choose from {', '.join(SAMPLERS)}")
    for option, value in options.items():
        readers = [known for known, kind in SAMPLERS.items() if option in {field.name for field in fields(kind)}]
        if name not in readers:
            raise ValueError(
                f"{option} is {value}, but sampler {name!r} does not read it, only {', '.join(readers)}: leave it out"
            )
    return SAMPLERS[name](**options)
