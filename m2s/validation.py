"""Validation of arguments at the entry points of the library.

Dtypes and shapes are always checked. Values (token and time ranges, the sign of scores) are checked on the CPU, where reading
them costs nothing. On an accelerator a read would stop the stream, so values are checked there only in checked mode. NaN is
looked for in checked mode only, on every device. Inside a `torch.func` transform no value is checked: torch cannot read them.

    with m2s.checked():          # or M2S_CHECKED=1 in the environment
        loss = m2s.score_entropy(head, output, x_0, x_t, t)
"""

import contextlib
import math
import os
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from typing import TypeGuard

import torch
from torch import Tensor

from m2s.errors import UserError, UserTypeError
from m2s.transforms import is_fake, is_transformed

ROUNDING = 1e-5  # tolerance for negative entries of a score, relative to the largest entry of its row
_checked: ContextVar[bool] = ContextVar("m2s_checked", default=os.environ.get("M2S_CHECKED", "0") not in ("", "0"))


SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest normal number of float32."""


@contextlib.contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Check all values on all devices inside a `with` block: tokens, times, scores, NaN and the support condition.

    Args:
        on: False switches the checks off inside the block, whatever the environment says.

    Yields:
        None.

    Example:
        >>> with m2s.checked():
        ...     loss = m2s.score_entropy(head, output, x_0, x_t, t)
    """
    token = _checked.set(on)
    try:
        yield
    finally:
        _checked.reset(token)


def is_checked() -> bool:
    """Return whether checked mode is on. It is off inside `torch.compile` and `torch.func`, where values cannot be read."""
    return not torch.compiler.is_compiling() and _checked.get() and not is_transformed() and not is_fake()


def _may_read_values(x: Tensor) -> bool:
    """Return whether the values of `x` are checked: on the CPU, or in checked mode."""
    return (
        not torch.compiler.is_compiling()
        and (x.device.type == "cpu" or _checked.get())
        and not is_transformed()
        and not is_fake()
    )


def first_index(where: Tensor) -> tuple[int, ...]:
    """Return the index of the first true entry, for an error message.

    Args:
        where: A Boolean tensor with at least one true entry.
    """
    return tuple(int(i) for i in where.nonzero()[0])


def tokens(name: str, x: Tensor, states: int, what: str = "tokens") -> None:
    """Check that `x` holds integers in [0, states).

    Args:
        name: Name of the argument, for the error message.
        x: Tokens of any shape.
        states: Number of states.
        what: What the integers are, for the error message.

    Raises:
        UserTypeError: `x` is not a tensor of integers.
        UserError: A token lies outside the range.
    """
    if not isinstance(x, Tensor):
        raise UserTypeError(f"{name} must be a torch.Tensor of integers, not {type(x).__name__}", option=name)
    if x.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise UserTypeError(f"{name} must hold integers (torch.long), but its dtype is {x.dtype}", option=name)
    if x.numel() and _may_read_values(x):
        wide = x.long()  # a comparison in uint8 or int16 would wrap `states`
        bad = (wide < 0) | (wide >= states)
        if bad.any():
            at = first_index(bad)
            message = f"{name}{list(at)} is {int(x[at])}, but {what} must lie in 0..{states - 1}"
            raise UserError(message, option=name)


def times(name: str, t: Tensor, low: float = 0.0, high: float = 1.0, open_ends: bool = False) -> None:
    """Check that `t` holds floats in [low, high].

    Args:
        name: Name of the argument, for the error message.
        t: Times of any shape.
        low: Lower end.
        high: Upper end.
        open_ends: Whether the ends themselves are excluded.

    Raises:
        UserTypeError: `t` is not a tensor of floats.
        UserError: A time lies outside the interval.
    """
    if not isinstance(t, Tensor):
        raise UserTypeError(f"{name} must be a torch.Tensor of floats, not {type(t).__name__}", option=name)
    if not t.dtype.is_floating_point:
        raise UserTypeError(f"{name} must hold floats, but its dtype is {t.dtype}", option=name)
    if t.numel() and _may_read_values(t):
        # A subnormal number counts as 0: rates at that time, such as 1/t, overflow.
        least = torch.where(t.abs() < SMALLEST, 0, t) if open_ends else t
        inside = (least > low) & (t < high) if open_ends else (t >= low) & (t <= high)
        if not inside.all():
            at = first_index(~inside)
            interval = f"({low:g}, {high:g})" if open_ends else f"[{low:g}, {high:g}]"
            raise UserError(f"{name}{list(at)} is {float(t[at]):g}, but it must lie in {interval}", option=name)


def align(name: str, t: Tensor, x: Tensor) -> Tensor:
    """Reshape `t` of shape [B] so that it broadcasts over `x` of shape [B, L].

    Args:
        name: Name of `t`, for the error message.
        t: Times, whose shape is the start of the shape of `x`: [B], [B, L], or [] for one time at every site.
        x: Tokens, [B, L] or any other shape.

    Returns:
        `t` with dimensions of size one appended.

    Raises:
        UserError: The shape of `t` is not the start of the shape of `x`.
    """
    if t.ndim > x.ndim or t.shape != x.shape[: t.ndim]:
        message = f"{name} has shape {list(t.shape)}, but it must be the start of the tokens' shape {list(x.shape)}"
        raise UserError(message, option=name)
    return t.reshape(t.shape + (1,) * (x.ndim - t.ndim))


def not_after(name: str, s: Tensor, other: str, t: Tensor) -> None:
    """Check that `s` is at most `t` everywhere.

    Args:
        name: Name of `s`, for the error message.
        s: Earlier times.
        other: Name of `t`, for the error message.
        t: Later times, of the same shape.

    Raises:
        UserError: The shapes differ, or a time of `s` lies above that of `t`.
    """
    same_shape(name, s, other, t)
    if s.numel() and _may_read_values(s) and (s > t).any():
        at = first_index(s > t)
        limit = f"{other}{list(at)} = {float(t[at]):g}"
        raise UserError(f"{name}{list(at)} is {float(s[at]):g}, but it must not lie above {limit}", option=name)


def instance(name: str, value: object, kind: type, example: str) -> None:
    """Check the class of an argument.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.
        kind: The class.
        example: What the argument must be, with an example, as the end of "must be ...".

    Raises:
        UserTypeError: `value` is not an instance of `kind`.
    """
    if isinstance(value, kind):
        return
    network = isinstance(value, torch.nn.Module)
    shown = type(value).__name__ if network or isinstance(value, Tensor) else repr(value)
    swapped = (network and name == "head") or (name == "model" and hasattr(value, "log_score"))
    given = "a network" if network else "a head"
    hint = f"this is {given}: the network comes first and the head second, (model, head, ...)" if swapped else None
    raise UserTypeError(option=name, expected=f"{example}, not {shown}", hint=hint)


def one_per_example(name: str, value: Tensor, other: str, x: Tensor) -> None:
    """Check that `value` is a tensor with one row for each example of `x`.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.
        other: Name of `x`, for the error message.
        x: The examples, [B, ...].

    Raises:
        UserTypeError: `value` is not a tensor, or has no dimension.
        UserError: The numbers of rows differ.
    """
    if not isinstance(value, Tensor) or value.ndim == 0:
        raise UserTypeError(f"{name} must be a torch.Tensor with a row for each of {other}, not {value!r}", option=name)
    if len(value) != len(x):
        message = f"{name} has {len(value)} rows, but {other} has {len(x)}: there must be one for each"
        raise UserError(message, option=name)


def same_shape(name: str, x: Tensor, other: str, y: Tensor) -> None:
    """Check that two tensors have the same shape.

    Args:
        name: Name of `x`, for the error message.
        x: A tensor.
        other: Name of `y`, for the error message.
        y: Another tensor.

    Raises:
        UserError: The shapes differ.
    """
    if x.shape != y.shape:
        message = f"{name} has shape {list(x.shape)}, but {other} has shape {list(y.shape)}: they must agree"
        raise UserError(message, option=name)


def tensor(name: str, value: object) -> None:
    """Check that `value` is a tensor, and not an object with a tensor in its attribute `logits`.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.

    Raises:
        UserTypeError: `value` is not a tensor.
    """
    if not isinstance(value, Tensor):
        has_logits = isinstance(getattr(value, "logits", None), Tensor)
        hint = "hand over its .logits, as model = lambda x_t, t, condition=None: net(x_t).logits does" if has_logits else None
        raise UserTypeError(option=name, expected=f"a torch.Tensor, not {type(value).__name__}", hint=hint)


def missing_mask_hint(columns: int, states: int) -> str:
    """Return the end of an error message about too few columns, when the mask's column may be missing.

    Args:
        columns: Number of columns.
        states: Number of states that the process has.

    Returns:
        The hint, or the empty string unless exactly one column is missing.
    """
    if columns != states - 1:
        return ""
    return " (if the process has a mask, that is its last state, and needs a column too: vocab + 1 in all)"


def probabilities(name: str, value: Tensor, x_t: Tensor, states: int, wider: bool = False) -> None:
    """Check the dtype and shape of a posterior, score or network output.

    Args:
        name: Name of the argument, for the error message.
        value: The argument, [*site, states].
        x_t: Current tokens, [*site].
        states: Number of states.
        wider: Whether `value` is the output of a network, which may have padded columns past `states`.

    Raises:
        UserTypeError: `value` is not a tensor of floats.
        UserError: The shape does not fit, or `value` contains NaN (in checked mode).
    """
    tensor(name, value)
    if not value.dtype.is_floating_point:
        raise UserTypeError(f"{name} must hold floats, but its dtype is {value.dtype}", option=name)
    if value.shape[:-1] != x_t.shape:
        shape, expected = list(value.shape), [*x_t.shape, states]
        message = f"{name} has shape {shape}, but x_t has shape {list(x_t.shape)}: expected {expected}"
        raise UserError(message, option=name)
    if value.shape[-1] < states or (value.shape[-1] > states and not wider):
        columns = value.shape[-1]
        message = f"{name} has {columns} columns, but the process has {states} states: "
        message += f"the network has too few outputs, its last layer needs {states}" if wider else f"expected {states}"
        raise UserError(message + missing_mask_hint(columns, states), option=name)
    not_nan(name, value)


def not_nan(name: str, value: Tensor) -> None:
    """Check in checked mode that a tensor contains no NaN.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.

    Raises:
        UserError: An entry is NaN.
    """
    # The maximum is NaN where an entry is. It reads the values once and stores no mask.
    if is_checked() and value.numel() and value.amax().isnan():
        raise UserError(f"{name}{list(first_index(value.isnan()))} is NaN", option=name)


def not_negative(name: str, value: Tensor) -> None:
    """Check that no entry is negative.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.

    Raises:
        UserError: An entry is negative.
    """
    if value.numel() and _may_read_values(value) and (value < 0).any():
        at = first_index(value < 0)
        raise UserError(f"{name}{list(at)} is {float(value[at]):g}, but it must not be negative", option=name)


def score(name: str, value: Tensor, x_t: Tensor) -> None:
    """Check that a score is not a log-score: entries off x_t are not negative, up to rounding.

    Args:
        name: Name of the argument, for the error message.
        value: Scores, [*site, states].
        x_t: Current tokens, [*site]. The entry at x_t is ignored.

    Raises:
        UserError: An entry is negative by more than `ROUNDING` times the largest entry of its row.
    """
    if not value.numel() or not _may_read_values(value):
        return
    bad = value < -ROUNDING * value.amax(-1, keepdim=True).clamp(min=0)
    if bad.any() and bad.scatter_(-1, x_t.long().unsqueeze(-1), False).any():
        at = first_index(bad)
        message = f"{name}{list(at)} is {float(value[at]):g}, but a score is a ratio of probabilities: is this log s?"
        raise UserError(f"{message} give score.exp(), or head.log_score(output, x_t, t).exp()", option=name)


def positive_int(name: str, value: int, low: int = 1) -> None:
    """Check that an argument is an integer of at least `low`.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.
        low: The least value that is allowed.

    Raises:
        UserTypeError: `value` is not an int.
        UserError: `value` is below `low`, or above the range of 64 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserTypeError(option=name, expected=f"an int, not {type(value).__name__}")
    if value < low:
        raise UserError(option=name, value=value, expected=f"at least {low}")
    if value >= 2**63:
        raise UserError(option=name, value=value, expected="below 2^63")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether an argument is a finite number that float can hold.

    Args:
        value: The argument.
    """
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an int above 1.8e308
        return False


def generator(name: str, value: object) -> None:
    """Check that an argument is a random generator of torch, or None.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.

    Raises:
        UserTypeError: It is something else.
    """
    if value is not None and not isinstance(value, torch.Generator):
        raise UserTypeError(option=name, expected=f"a torch.Generator or None, not {type(value).__name__}")


def float_matrices(name: str, value: object) -> Tensor:
    """Return matrices as a tensor.

    Args:
        name: Name of the argument, for the error message.
        value: A tensor, or nested lists or an array of numbers.

    Returns:
        The tensor.

    Raises:
        UserTypeError: It cannot be made a tensor.
    """
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserTypeError(option=name, expected=f"a torch.Tensor of floats, not {type(value).__name__}") from None


def positive_number(name: str, value: float) -> None:
    """Check that an argument is a finite number above zero.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.

    Raises:
        UserError: `value` is not a number, not finite, or not positive.
    """
    if not (is_number(value) and value > 0):
        raise UserError(option=name, value=value, expected="a positive number")


def in_interval(name: str, value: float, interval: str) -> None:
    """Check that a number lies in an interval.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.
        interval: The interval as the mathematical notation writes it: "(0, 1]" contains 1 and not 0.

    Raises:
        UserError: `value` lies outside. NaN lies outside of every interval.
    """
    low, high = map(float, interval[1:-1].split(","))
    if not is_number(value) or not (
        low < value < high or (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
    ):
        raise UserError(option=name, value=value, expected=f"in {interval}")


def boolean(name: str, value: object) -> None:
    """Check that an argument is True or False.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.

    Raises:
        UserTypeError: It is something else, such as 1 or a string.
    """
    if not isinstance(value, bool):
        raise UserTypeError(option=name, value=value, expected="True or False")


def choice(name: str, value: object, known: Collection[str]) -> None:
    """Check that an argument is one of several names.

    Args:
        name: Name of the argument, for the error message.
        value: The argument.
        known: The names.

    Raises:
        UserError: `value` is none of them.
    """
    if not isinstance(value, str) or value not in known:  # an array compares element by element
        raise UserError(option=name, value=value, expected=f"one of {', '.join(map(repr, known))}")
