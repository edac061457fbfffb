"""What a network hands over: logits, or hidden states with the last layer not yet applied; and how it is asked for them."""

import inspect
import re
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from m2s import validation
from m2s.dtypes import at_least_float32
from m2s.ops.last_layer import Output, Unprojected
from m2s.process import Process

DTYPES = re.compile(r"same dtype|scalar type|input dtype|\.dtype to be equal|Input type \(")  # torch, where two do not fit


def padded_logits(output: Output, x_t: Tensor, states: int) -> Float[Tensor, "*site V"]:
    """At least `states` columns, in float32 at least; those past them mean nothing."""
    if isinstance(output, Unprojected):
        output.wide_enough(states)
        output = output.project()
    validation.probabilities("output", output, x_t, states, wider=True)
    return at_least_float32(output)


def logits(output: Output, x_t: Tensor, states: int) -> Float[Tensor, "*site {states}"]:
    """The columns that mean something, in float32 at least. The one place where padding is cut off."""
    return padded_logits(output, x_t, states)[..., :states]


def check_model(model: object, process: Process) -> None:
    """The network is one, not an objective that holds one; its table of tokens, where it is seen to have one, has a row for
    the mask too."""
    from m2s.heads.heads import Head  # which is built on this file

    if isinstance(getattr(model, "head", None), Head) and callable(getattr(model, "loss", None)):
        raise TypeError(f"model is an m2s.{type(model).__name__}, which returns a loss: give the network, not the objective")
    rows = getattr(getattr(model, "embedding", None), "num_embeddings", None)
    if rows == process.vocab < process.states:
        raise ValueError(f"the network's embedding has {rows} rows: {_takes(process)}")


def call_model(
    model: Callable[..., Output], process: Process, x_t: Tensor, t: Tensor, condition: Tensor | None = None, **cached: Tensor
) -> Output:
    """What the network says: model(x_t, t), or model(x_t, t, condition) where there is one; or why it says nothing of use."""
    given = (x_t, t) if condition is None else (x_t, t, condition)
    try:
        output = model(*given, **cached)
    except IndexError as error:
        also = "" if condition is None else f" and a condition {list(condition.shape)}"
        raise IndexError(f"the network failed at tokens {list(x_t.shape)}{also} ({error}): {_takes(process)}") from error
    except TypeError as error:
        if not _refuses(model, given, cached):
            raise
        call = f"model(x_t, t{'' if condition is None else ', condition'})"
        raise TypeError(
            f"the network cannot be called as {call} ({error}): it must take (x_t, t, condition=None); for one that reads "
            "tokens alone give lambda x_t, t, condition=None: net(x_t)"
        ) from error
    except (RuntimeError, ValueError) as error:
        if not DTYPES.search(str(error)):
            raise
        tokens, time = (str(value.dtype).removeprefix("torch.") for value in (x_t, t))
        raise TypeError(
            f"the network failed at dtypes that do not fit ({error}): it is given x_t in {tokens} and t in {time}, whatever "
            "its weights are in; cast t inside, t.to(weight.dtype), or keep the weights in float32 and use torch.autocast"
        ) from error
    if not isinstance(output, Unprojected):
        validation.tensor("the network's output", output)
    return output


def _takes(process: Process) -> str:
    """What a network must be able to read."""
    mask = "" if process.mask is None else ", the last one the mask"
    return f"under {process} it must take process.states = {process.states} states, 0..{process.states - 1}{mask}"


def _refuses(model: Callable[..., Output], given: tuple[Tensor, ...], cached: dict[str, Tensor]) -> bool:
    """Whether the arguments do not fit the network; else an error comes from its inside."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(*given, **cached)
    except TypeError:
        return True
    return False
