"""What a method is: a system of the literature as a choice of our parts."""

from dataclasses import dataclass, field, replace
from typing import Any

from m2s.errors import UserError
from m2s.heads import Head
from m2s.heads.registry import HEADS
from m2s.losses.registry import Loss
from m2s.methods.build import (
    check_loss,
    check_unread,
    explain,
    fill,
    make_head,
    make_loss,
    make_process,
    nelbo_loss,
    takes_schedule,
)
from m2s.methods.config import AUTO, HeadConfig, ProcessConfig
from m2s.process.registry import PROCESSES
from m2s.registry import Registry, option_types


@dataclass(frozen=True)
class MethodDefaults:
    """What a method fixes besides the head and the loss.

    Args:
        process: The process, with nothing left "auto".
        head: The head and the loss, with nothing left "auto".
        network_time: Whether the network sees the time.
        sampler: The sampler of the method's authors, as `m2s sample --sampler` names it.
    """

    process: ProcessConfig
    head: HeadConfig
    network_time: bool
    sampler: str


@dataclass(frozen=True)
class MethodParts:
    """A method for one vocabulary: everything that a training loop needs but the network.

    Args:
        head: The head, with its process.
        loss: The training loss, loss(head, output, x_0, x_t, t) in nats per position.
        nelbo_loss: The loss whose integral over t is the NELBO. It differs from `loss` where that is clipped or reweighted.
        defaults: The choices from which the parts were built.
    """

    head: Head
    loss: Loss
    nelbo_loss: Loss
    defaults: MethodDefaults


@dataclass(frozen=True)
class Method:
    """A system of the literature as a choice of process, head, loss and network.

    Raises:
        ValueError: The BibTeX does not close its braces.

    Example:
        >>> parts = m2s.methods.METHODS["md4"].build(vocab=27)
        >>> objective = m2s.Objective(model, parts.head, parts.loss)

    Args:
        name: The name that `m2s train --method` takes.
        title: Its authors' name for it, in a line.
        process: The process. "auto": the schedule is linear, where the process reads one.
        head: The head and the loss. "auto": the option is "none".
        text: What it computes, with equations, in Markdown: its section of docs/methods.md.
        bibtex: Its references.
        sampler: The sampler of its authors, as `m2s sample --sampler` names it.
        network_time: Whether the network sees the time.
    """

    name: str
    title: str
    process: ProcessConfig
    head: HeadConfig
    text: str
    bibtex: str = field(repr=False)
    sampler: str = "bayes"
    network_time: bool = True

    def __post_init__(self) -> None:
        if self.bibtex.count("{") != self.bibtex.count("}"):
            raise ValueError(f"the BibTeX of {self.name} does not close its braces")

    @property
    def entries(self) -> list[str]:
        """The BibTeX entries of its references."""
        return self.bibtex.split("\n\n")

    def resolve(self, process: ProcessConfig | None = None, head: HeadConfig | None = None) -> tuple[ProcessConfig, HeadConfig]:
        """Fill in what a configuration leaves open.

        Args:
            process: Values that win over the method's; "auto": the method's.
            head: Values that win over the method's; "auto": the method's.

        Returns:
            The process and the head with nothing left "auto" that a choice reads.

        Raises:
            UserError: There is no process, schedule, head or loss of a given name.
        """
        process, head = process or ProcessConfig(), head or HeadConfig()
        given = head
        process, head = replace(process, **fill(process, self.process)), replace(head, **fill(head, self.head))
        PROCESSES.find(process.kind, "process.kind")
        reads = option_types(HEADS.find(head.kind, "head.kind"))
        unset: dict[str, Any] = {}
        for name in ("offset", "scale", "curriculum"):
            # an option that the method sets for its own head is not for another head
            foreign = name != "curriculum" and name not in reads and getattr(given, name) == AUTO
            if getattr(head, name) == AUTO or foreign:
                unset[name] = "none"
        head = replace(head, **unset)
        if takes_schedule(process.kind) and process.schedule == AUTO:
            process = replace(process, schedule="linear")
        return process, head

    def build(self, vocab: int, process: ProcessConfig | None = None, head: HeadConfig | None = None) -> MethodParts:
        """Build the head and the losses of the method.

        Args:
            vocab: The number of clean tokens.
            process: Values that win over the method's; "auto": the method's.
            head: Values that win over the method's; "auto": the method's.

        Returns:
            The parts.

        Raises:
            UserError: An option is unknown or out of range, or the parts do not fit together.
        """
        process, head = self.resolve(process, head)
        check_unread(head, HeadConfig(offset="none", scale="none"))
        section = "process"
        try:
            built_process = make_process(process, vocab)
            section = "head"
            built_head = make_head(head, built_process)
        except UserError as error:
            raise error.within(section) from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{section}: {explain(error)}") from error
        loss = make_loss(head)
        check_loss(head.loss, built_head, loss)
        defaults = MethodDefaults(process, head, self.network_time, self.sampler)
        return MethodParts(built_head, loss, nelbo_loss(head), defaults)


METHODS: Registry[Method] = Registry("method")
"""Every method by its name."""
