"""What a call may be given, said at the door.

Dtypes and shapes are always checked. Values (tokens, times, the sign of scores) are checked on the CPU, where looking costs
nothing; on an accelerator a look would stop the stream, so there they are checked, as NaN is everywhere, only in checked mode:

    with m2s.checked():          # or M2S_CHECKED=1 in the environment
        loss = m2s.score_entropy(head, output, x_0, x_t, t)
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

ROUNDING = 1e-5  # of a score, relative to the greatest of its row
_checked: ContextVar[bool] = ContextVar("m2s_checked", default=os.environ.get("M2S_CHECKED", "0") not in ("", "0"))


@contextlib.contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Inside the block every value is checked, on every device: tokens, times, scores, NaN, the support condition."""
    token = _checked.set(on)
    try:
        yield
    finally:
        _checked.reset(token)


def is_checked() -> bool:
    return not torch.compiler.is_compiling() and _checked.get()


def _looks_at_values(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and (x.device.type == "cpu" or _checked.get())


def first_index(where: Tensor) -> tuple[int, ...]:
    """Index of the first true entry, to be named in an error."""
    return tuple(int(i) for i in where.nonzero()[0])


def tokens(name: str, x: Tensor, states: int) -> None:
    """`x` holds integers in [0, states)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of integers, not {type(x).__name__}")
    if x.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise TypeError(f"{name} must hold integers (torch.long), but its dtype is {x.dtype}")
    if x.numel() and _looks_at_values(x):
        wide = x.long()  # a narrow dtype would wrap the bound instead of the comparison
        bad = (wide < 0) | (wide >= states)
        if bad.any():
            at = first_index(bad)
            raise ValueError(f"{name}{list(at)} is {int(x[at])}, but tokens must lie in 0..{states - 1}")


def times(name: str, t: Tensor, low: float = 0.0, high: float = 1.0, open_ends: bool = False) -> None:
    """`t` holds floats in [low, high], or strictly between them."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of floats, not {type(t).__name__}")
    if not t.dtype.is_floating_point:
        raise TypeError(f"{name} must hold floats, but its dtype is {t.dtype}")
    if t.numel() and _looks_at_values(t):
        inside = (t > low) & (t < high) if open_ends else (t >= low) & (t <= high)
        if not inside.all():
            at = first_index(~inside)
            interval = f"({low:g}, {high:g})" if open_ends else f"[{low:g}, {high:g}]"
            raise ValueError(f"{name}{list(at)} is {float(t[at]):g}, but it must lie in {interval}")


def align(name: str, t: Tensor, x: Tensor) -> Tensor:
    """`t` of shape [B] made to broadcast over `x` of shape [B, L] (any leading shape; a 0-d `t` serves every site)."""
    if t.ndim > x.ndim or t.shape != x.shape[: t.ndim]:
        raise ValueError(f"{name} has shape {list(t.shape)}, but it must be the start of the tokens' shape {list(x.shape)}")
    return t.reshape(t.shape + (1,) * (x.ndim - t.ndim))


def not_after(name: str, s: Tensor, other: str, t: Tensor) -> None:
    """`s` is nowhere later than `t`."""
    same_shape(name, s, other, t)
    if s.numel() and _looks_at_values(s) and (s > t).any():
        at = first_index(s > t)
        raise ValueError(
            f"{name}{list(at)} is {float(s[at]):g}, but it must not lie above {other}{list(at)} = {float(t[at]):g}"
        )


def instance(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {example}, not {value!r}")


def one_per_example(name: str, value: Tensor, other: str, x: Tensor) -> None:
    """`value` is a tensor with a row for each of `x`."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        raise TypeError(f"{name} must be a torch.Tensor with a row for each of {other}, not {value!r}")
    if len(value) != len(x):
        raise ValueError(f"{name} has {len(value)} rows, but {other} has {len(x)}: there must be one for each")


def same_shape(name: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.shape != y.shape:
        raise ValueError(f"{name} has shape {list(x.shape)}, but {other} has shape {list(y.shape)}: they must agree")


def tensor(name: str, value: object) -> None:
    """`value` is a tensor, and not something that holds one as its logits."""
    if not isinstance(value, Tensor):
        held = isinstance(getattr(value, "logits", None), Tensor)
        advice = ": hand over its .logits, as model = lambda x_t, t, condition=None: net(x_t).logits does" if held else ""
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}{advice}")


def missing_mask_hint(columns: int, states: int) -> str:
    """The end of a complaint about too few columns, where the one that is lacking may be the mask's."""
    if columns != states - 1:
        return ""
    return "; if the process has a mask, that is its last state, and the network needs a column for it too: vocab + 1 in all"


def probabilities(name: str, value: Tensor, x_t: Tensor, states: int, wider: bool = False) -> None:
    """`value` is [*sites, states] over the sites of `x_t`; `wider` allows padded columns."""
    tensor(name, value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name} must hold floats, but its dtype is {value.dtype}")
    if value.shape[:-1] != x_t.shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but x_t has shape {list(x_t.shape)}: expected {[*x_t.shape, states]}"
        )
    if value.shape[-1] < states or (value.shape[-1] > states and not wider):
        atleast = "at least " if wider else ""
        raise ValueError(
            f"{name} has {value.shape[-1]} columns, but the process has {states} states: expected {atleast}{states}"
            f"{missing_mask_hint(value.shape[-1], states)}"
        )
    not_nan(name, value)


def not_nan(name: str, value: Tensor) -> None:
    """No NaN in `value`; looked at in checked mode only."""
    if is_checked() and value.isnan().any():
        raise ValueError(f"{name}{list(first_index(value.isnan()))} is NaN")


def not_negative(name: str, value: Tensor) -> None:
    if value.numel() and _looks_at_values(value) and (value < 0).any():
        at = first_index(value < 0)
        raise ValueError(f"{name}{list(at)} is {float(value[at]):g}, but it must not be negative")


def score(name: str, value: Tensor, x_t: Tensor) -> None:
    """No entry off x_t is negative, as those of log-scores are, by more than rounding beside the greatest of its row."""
    if not value.numel() or not _looks_at_values(value):
        return
    bad = value < -ROUNDING * value.amax(-1, keepdim=True).clamp(min=0)
    if bad.any() and bad.scatter_(-1, x_t.long().unsqueeze(-1), False).any():
        at = first_index(bad)
        raise ValueError(
            f"{name}{list(at)} is {float(value[at]):g}, but a score is a ratio of probabilities: is this log s? "
            "give score.exp(), or head.log_score(output, x_t, t).exp()"
        )


def positive_int(name: str, value: int, low: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} is {value}, but it must be at least {low}")
