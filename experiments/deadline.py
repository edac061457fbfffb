"""End the work of a call in time: a signal that a training run answers by saving its state, and that ends other work."""

import signal
from types import FrameType


class OutOfTime(BaseException):
    """The time of this call is used up. It passes through handlers of `Exception`, which record failed rows."""


class Deadline:
    """A context that ends the work of a call in time.

    After `seconds` it sends SIGTERM to this process. A training run then saves its state and exits. In other work the signal
    raises `OutOfTime`.

    Args:
        seconds: Seconds until then.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.previous = signal.signal(signal.SIGTERM, _raise_out_of_time)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
        if self.seconds < float("inf"):
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.seconds))

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self.previous)


def _raise_out_of_time(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM."""
    raise OutOfTime
