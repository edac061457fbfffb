"""Calling a network and reading its output: logits, or hidden states whose last layer is not yet applied."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from m2s import validation
from m2s.dtypes import at_least_float32
from m2s.errors import UserError
from m2s.ops.last_layer import Output, Unprojected
from m2s.process import Process


def padded_logits(output: Output, x_t: Tensor, states: int) -> Float[Tensor, "*site V"]:
    """Return the output as a tensor in float32 or wider, with its padding.

    Args:
        output: Logits, [*site, V] with V >= states, or hidden states with the last layer not yet applied.
        x_t: Current tokens, [*site].
        states: Number of states.

    Returns:
        Logits, [*site, V]. Columns past `states` have no meaning.

    Raises:
        TypeError: The output is not a tensor of floats.
        ValueError: The shape does not fit.
    """
    if isinstance(output, Unprojected):
        output.wide_enough(states)
        output = output.project()
    validation.probabilities("the network's output", output, x_t, states, wider=True)
    return at_least_float32(output)


def logits(output: Output, x_t: Tensor, states: int) -> Float[Tensor, "*site {states}"]:
    """Return the output in float32 or wider without its padding. Padding is removed nowhere else.

    Args:
        output: Logits, [*site, V] with V >= states, or hidden states with the last layer not yet applied.
        x_t: Current tokens, [*site].
        states: Number of states.

    Returns:
        Logits, [*site, states].
    """
    return padded_logits(output, x_t, states)[..., :states]


def check_model(model: object, process: Process) -> None:
    """Check that a model is a network, and that it has an input and an output for every state.

    The number of its states is `config.states` of a network of `m2s.models`, or the number of rows of a table `embedding`. A
    network without either is not checked.

    Args:
        model: The network.
        process: The forward process.

    Raises:
        TypeError: The model cannot be called, or is an objective, which returns a loss.
        ValueError: The network has fewer states than the process, or the table `model.embedding` has no row for the mask.
    """
    if not callable(model):
        raise TypeError(f"model is {model!r:.80}, expected a network that is called as model(x_t, t)")
    if hasattr(getattr(model, "head", None), "log_score") and callable(getattr(model, "loss", None)):
        raise TypeError(f"model is an m2s.{type(model).__name__}, which returns a loss: give the network, not the objective")
    states = getattr(getattr(model, "config", None), "states", None)
    if isinstance(states, int) and states < process.states:
        raise UserError(f"the network has too few outputs, config.states = {states}: {_required_states(process)}")
    rows = getattr(getattr(model, "embedding", None), "num_embeddings", None)
    if rows == process.vocab < process.states:
        raise ValueError(f"the network's embedding has {rows} rows: {_required_states(process)}")


def check_batch(name: str, x: Tensor, model: object) -> None:
    """Check that tokens are a batch of sequences where the model is a network of `m2s.models`, which reads nothing else.

    Args:
        name: The name of the argument, for the message of an error.
        x: Tokens.
        model: The network. Another one may take tokens of any shape [B, ...].

    Raises:
        UserError: The tokens do not have two dimensions.
    """
    if isinstance(getattr(getattr(model, "config", None), "states", None), int) and x.ndim != 2:
        hint = f"for one sequence give {name}[None]" if x.ndim == 1 else f"give {name}.reshape(len({name}), -1)"
        raise UserError(f"{name} has shape {list(x.shape)}, but it must be [samples, positions]: {hint}", option=name)


def call_model(
    model: Callable[..., Output], process: Process, x_t: Tensor, t: Tensor, condition: Tensor | None = None, **cached: Tensor
) -> Output:
    """Call a network, and explain the errors that come from arguments it cannot take.

    Args:
        model: The network, called as model(x_t, t), or as model(x_t, t, condition) if there is a condition.
        process: The forward process, for error messages.
        x_t: Current tokens, [B, L].
        t: Times, [B].
        condition: Class labels or other conditions, or None.
        **cached: Further arguments of autoregressive networks.

    Returns:
        The output: logits or `m2s.Unprojected`.

    Raises:
        IndexError: The network has no row for a token.
        TypeError: The network cannot be called in this way, its weights have another dtype than its inputs, or its output is
            not a tensor.
    """
    given = (x_t, t) if condition is None else (x_t, t, condition)
    try:
        output = model(*given, **cached)
    except IndexError as error:
        also = "" if condition is None else f" and a condition {list(condition.shape)}"
        raise IndexError(
            f"the network failed at tokens {list(x_t.shape)}{also} ({error}): {_required_states(process)}"
        ) from error
    except TypeError as error:
        if _accepts(model, given, cached):
            raise
        call = f"model(x_t, t{'' if condition is None else ', condition'})"
        raise TypeError(
            f"the network cannot be called as {call} ({error}): it must take (x_t, t, condition=None); for one that reads "
            "tokens alone give lambda x_t, t, condition=None: net(x_t)"
        ) from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _fails_by_dtype(model, given, cached):
            raise
        tokens, time = (str(value.dtype).removeprefix("torch.") for value in (x_t, t))
        raise TypeError(
            f"the network failed on the dtypes of its inputs ({error}): m2s calls it with x_t in {tokens} and t in {time}, "
            "whatever the dtype of its weights. Cast t in its forward, t.to(weight.dtype), or keep the weights in float32 and "
            "use torch.autocast"
        ) from error
    if not isinstance(output, Unprojected):
        validation.tensor("the network's output", output)
    return output


def hide_padding(model: object, x_t: Int[Tensor, "B L"], padded: Bool[Tensor, "B L"] | None) -> Int[Tensor, "B L"]:
    """Return the tokens as a network reads them: `model.padding_id` at padding.

    Args:
        model: The network. One without an attribute `padding_id`, or with None, reads the tokens as they are.
        x_t: Noisy tokens, [B, L].
        padded: True at padding, [B, L]; None: there is none.

    Returns:
        Tokens, [B, L].
    """
    number = getattr(model, "padding_id", None)
    return x_t if number is None or padded is None else x_t.masked_fill(padded, number)


def without_padding(model: Callable[..., Output], weight: Float[Tensor, "B L"] | None) -> Callable[..., Output]:
    """Return a network that reads padding where weights are 0.

    Args:
        model: The network, called as model(x_t, t) or model(x_t, t, condition).
        weight: The weight of each position of the examples that it will be called with, [B, L]; None: there is no padding.

    Returns:
        The network itself where it has no `padding_id`.
    """
    if weight is None or getattr(model, "padding_id", None) is None:
        return model
    padded = weight == 0

    def network(x_t: Tensor, t: Tensor, *condition: Tensor) -> Output:
        return model(hide_padding(model, x_t, padded), t, *condition)

    return network


def _required_states(process: Process) -> str:
    """Return the end of an error message: the states that a network must be able to read."""
    mask = "" if process.mask is None else ", the last one the mask"
    return f"under {process} it must take process.states = {process.states} states, 0..{process.states - 1}{mask}"


def _accepts(model: Callable[..., Output], given: tuple[Tensor, ...], cached: dict[str, Tensor]) -> bool:
    """Return whether the arguments fit the network's signature, so that an error comes from its inside."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):  # a callable without a signature
        return True
    try:
        signature.bind(*given, **cached)
    except TypeError:
        return False
    return True


def _fails_by_dtype(model: Callable[..., Output], given: tuple[Tensor, ...], cached: dict[str, Tensor]) -> bool:
    """Return whether a failed call failed because the dtypes of a layer's inputs and weights differ.

    The call is repeated to find the innermost module that fails. The dtypes are the cause if that module succeeds with its
    inputs in the dtype of its weights. This does not depend on the wording of torch's errors.
    """
    running: list[tuple[nn.Module, Any]] = []  # modules that were entered and not left

    def enter(module: nn.Module, inputs: Any) -> None:
        running.append((module, inputs))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with torch.no_grad():
            model(*given, **cached)
    except Exception:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if not running:
        return False
    module, inputs = running[-1]
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), None)
    if dtype is None or all(value.dtype == dtype for value in inputs if isinstance(value, Tensor)):
        return False
    # First floats alone, as tokens for an embedding must stay integers; then integers too, as a linear layer needs them.
    for integers in (False, True):
        cast = [
            value.to(dtype) if isinstance(value, Tensor) and (integers or value.is_floating_point()) else value
            for value in inputs
        ]
        try:
            with torch.no_grad():
                module(*cast)
        except Exception:
            continue
        return True
    return False
