"""Find and build samplers by name."""

from dataclasses import fields
from typing import Any

from m2s import validation
from m2s.errors import UserError
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
        UserError: There is no sampler of that name.
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
        UserError: There is no such sampler, it has no such option, or the option's value is out of range.
    """
    validation.instance("sampler", name, str, "the name of a sampler, or a sampler such as m2s.samplers.Bayes()")
    kind = SAMPLERS.find(name, "sampler")
    for option, value in options.items():
        readers = [known for known, one in SAMPLERS.items() if option in {field.name for field in fields(one)}]
        if name not in readers:
            known = f", only {', '.join(readers)}" if readers else ""
            reason = f"sampler {name!r} does not read it{known}"
            raise UserError(option=option, value=value, reason=reason, hint="leave it out")
    return kind(**options)
