"""What a callback of `m2s.sample` receives, and a callback that records all states."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.samplers.prediction import Prediction

SHOWN_STEPS, SHOWN_SAMPLES, SHOWN_TOKENS = 6, 4, 16  # of a trajectory in a notebook


class StepEvent(NamedTuple):
    """One step of some samples, as a callback of `m2s.sample` receives it.

    Args:
        number: The number of the step, from 0.
        steps: The number of steps of these samples.
        samples: The numbers of the samples, [B].
        t: Time at the start of the step, [B].
        s: Time at its end, [B].
        x_t: Tokens at the start, [B, L], or [B, W] where a window is being filled.
        x_s: Tokens at the end, of the same shape.
        prediction: The prediction at time t. In autoregressive generation with a cache it is NaN at sites that have not been
            drawn.
        window: Which sites of the sequence x_t and x_s hold.
        length: The length of the sequence.
    """

    number: int
    steps: int
    samples: Tensor
    t: Tensor
    s: Tensor
    x_t: Tensor
    x_s: Tensor
    prediction: Prediction
    window: slice
    length: int


class Trajectory:
    """A callback that records every state.

    Example:
        >>> trajectory = m2s.Trajectory()
        >>> x = m2s.sample(model, head, (4, 64), steps=8, callback=trajectory)
        >>> trajectory.states.shape
        torch.Size([9, 4, 64])
    """

    def __init__(self) -> None:
        self._states: dict[int, list[Tensor]] = {}  # of each sample, [L] each

    def __call__(self, step: StepEvent) -> None:
        """Record the state after a step, and before it for the first step of a window.

        Args:
            step: The step, as `m2s.sample` passes it to a callback.
        """
        for row, sample in enumerate(step.samples.tolist()):
            states = self._states.setdefault(sample, [torch.full((step.length,), -1)])
            if step.number == 0:
                states[-1][step.window] = step.x_t[row].cpu()
            states.append(states[-1].clone())
            states[-1][step.window] = step.x_s[row].cpu()

    def _repr_html_(self) -> str:
        """The tokens of the first samples at evenly spaced steps, as a notebook shows them."""
        if not self._states:
            return "<p>Trajectory: nothing was recorded</p>"
        states = self.states
        last, (_, count, length) = len(states) - 1, states.shape
        shown = sorted({round(last * i / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)})
        title = f"<p>Trajectory: {last} steps of {count} samples of {length} tokens</p>"
        samples = range(min(count, SHOWN_SAMPLES))
        head = "<th>step</th>" + "".join(f"<th>sample {i}</th>" for i in samples)
        rows = []
        for number in shown:
            cells = [" ".join(map(str, states[number, i, :SHOWN_TOKENS].tolist())) for i in samples]
            more = " ..." if length > SHOWN_TOKENS else ""
            rows.append(f"<tr><td>{number}</td>" + "".join(f"<td>{cell}{more}</td>" for cell in cells) + "</tr>")
        return f"{title}<table><tr>{head}</tr>{''.join(rows)}</table>"

    @property
    def states(self) -> Int[Tensor, "M n L"]:
        """All states, [steps + 1, n, L].

        Sites of a window that has not been started are -1. A sample with fewer steps repeats its last state. Masks that are
        drawn after the last step are still masks here.
        """
        most = max(map(len, self._states.values()))
        rows = [torch.stack(states + states[-1:] * (most - len(states))) for _, states in sorted(self._states.items())]
        return torch.stack(rows, 1)
