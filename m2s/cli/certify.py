"""`m2s certify [CHECKPOINT]`: which estimators of the likelihood are upper bounds, and what they drop on data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.evaluate.bpd import finite, load_described
from m2s.cli.help_text import help_from_source
from m2s.errors import UserError, counted, print_escaped
from m2s.io import output_file, require_absent, write_json
from m2s.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.cli.evaluate.held_out import HeldOut
    from m2s.evaluation.likelihood import Certificate, Options
    from m2s.hub import Checkpoint

MAX_EXAMPLES, MAX_LOGITS = 64, 2**28


@dataclass(frozen=True)
@help_from_source
class Certify:
    """Test by enumeration which estimators of the likelihood are upper bounds, and measure on data what the others drop.

    Published likelihoods are estimates of different quantities: some leave out the reconstruction, the prior or the ends of the
    integral over time, and are then no upper bound on the negative log-likelihood.

    Without CHECKPOINT every named estimator is tested in small worlds where all sequences are enumerated: the exact expectation
    b(x) must satisfy sum exp(-b(x)) <= 1 and b(x) >= -log p(x), p the exact distribution of the reverse process.

    With CHECKPOINT every estimator that supports it is measured on held-out data: its terms, what it lacks, its difference to
    the NELBO, a one-sided 95 % limit, network calls and variance per call. The model itself is tested by enumeration where its
    vocabulary and length allow it.

    Example: m2s certify --out certificates.json

    Example: m2s certify runs/digits --limit 64 --out runs/digits/certificate.json

    Example: m2s certify runs/owt --data lm1b --estimators nelbo mdlm llada --passes 8
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[CHECKPOINT]")] = ""
    """The model: a folder or a repository of the Hugging Face hub. Without it, the estimators are tested alone."""
    data: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """The data, as in m2s evaluate bpd; by default what the run was trained on."""
    split: Annotated[str, tyro.conf.arg(metavar="test|validation|train")] = ""
    """The split of the data; by default test or, where a text has none, validation."""
    estimators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Which estimators: nelbo, integral, discrete-time, discrete-kl, sedd, mdlm, md4, radd, radd-any-order, llada, dream, gidd,
    udlm, duo, or those of a plugin; by default all that support the head. nelbo is always measured."""
    passes: int = 4
    """Draws of noise for each sequence. The variance needs at least 2."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Use only so many sequences, spread evenly over all; by default all."""
    seed: int = 0
    """Seed of the noise."""
    t_min: float = 1e-3
    """The smallest time that the network sees, and the start of the integral of the NELBO."""
    steps: int = 128
    """Steps T of the estimators in discrete time; 8 in the built-in worlds, whatever is given. A finite chain has its own."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Sequences in each call of the network; by default at most 64, and fewer where the vocabulary is large."""
    device: str = ""
    """cpu or cuda; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json. The state of an interrupted measurement is saved beside it, and the same command continues."""
    overwrite: bool = False
    """Replace a finished result."""

    def run(self) -> None:
        """Test and measure the estimators, print the tables and write --out.

        Raises:
            UserError: An option is invalid, or the data does not fit the model.
        """
        from m2s.devices import resolve_device
        from m2s.provenance import is_rerun, provenance

        self._check()
        if self.out is not None:
            require_absent([self.out], self.overwrite or is_rerun(self.out))
            output_file(self.out, (".json",))
        result = self._measure() if self.checkpoint else {"certificates": self._built_in()}
        if self.out is not None:
            options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
            write_json(
                self.out,
                finite({**result, "options": options, **provenance(resolve_device(self.device) if self.checkpoint else "cpu")}),
            )
            self.partial(self.out).unlink(missing_ok=True)
            print_escaped(f"written to {self.out}")

    @staticmethod
    def partial(out: Path) -> Path:
        """Return where the state of an interrupted measurement is saved.

        Args:
            out: The file of the result.
        """
        return out.with_suffix(".partial.json")

    def _check(self) -> None:
        """Raise UserError for options that are out of range, or that need a checkpoint."""
        from m2s.evaluation.likelihood import ESTIMATORS

        for name, least in {"passes": 2, "limit": 2, "batch_size": 1, "seed": 0, "steps": 2}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(option=name, value=value, expected=f"at least {least}")
        if not 0 < self.t_min < 0.5:
            raise UserError(option="t_min", value=self.t_min, expected="in (0, 0.5)")
        for name in self.estimators:
            ESTIMATORS.find(name, "estimators")
        if not self.checkpoint:
            for name in ("data", "split", "limit"):
                if getattr(self, name):
                    raise UserError(option=name, reason="there is no CHECKPOINT", hint="name the model that is measured")

    def _built_in(self) -> "list[dict[str, Any]]":
        """Test the estimators in the built-in worlds, and print the table."""
        from m2s.evaluation.likelihood import Options, certify, supported, worlds
        from m2s.evaluation.likelihood.table import format_certificates

        found: list[Certificate] = []
        every = list(worlds())
        with Progress(len(every), "enumerating", "world") as progress:
            for model, head, length, name in every:
                chosen = [key for key in supported(head) if not self.estimators or key in self.estimators]
                found += certify(model, head, length, chosen, Options(self.t_min, 8), name) if chosen else []
                progress.update(1)
        print_escaped("\n".join(format_certificates(found)))
        return [each.summary() for each in found]

    def _measure(self) -> dict[str, Any]:
        """Measure the estimators on data, print the table, and return the numbers."""
        from m2s.cli.evaluate.held_out import HeldOutSource
        from m2s.devices import resolve_device
        from m2s.evaluation.likelihood import Options, supported
        from m2s.provenance import fingerprint

        device = resolve_device(self.device)
        checkpoint = load_described(self.checkpoint, device)
        options = Options(self.t_min, self.steps)
        chosen = list(supported(checkpoint.head, self.estimators or None))
        if not chosen:
            raise UserError(f"{self.checkpoint} has an exact likelihood: m2s evaluate bpd prints it")
        names = ["nelbo", *(name for name in chosen if name != "nelbo")]
        try:
            held_out = HeldOutSource(self.checkpoint, checkpoint, self.data, self.split).load().evenly_spaced(self.limit)
        except UserError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise UserError(str(error)) from error
        weights = fingerprint(checkpoint.model)
        measured = self._measured(checkpoint, held_out, names, options, {"weights": weights})
        certificates = self._enumerated(checkpoint, names, options)
        source = {"name": held_out.name, "split": held_out.split, "sequences": len(held_out.rows)}
        return {"head": repr(checkpoint.head), "weights": weights, "data": source, **measured, "certificates": certificates}

    def _measured(
        self, checkpoint: "Checkpoint", held_out: "HeldOut", names: Sequence[str], options: "Options", settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Estimate on data by every estimator."""
        from m2s.evaluation.likelihood import ESTIMATORS
        from m2s.evaluation.likelihood.resumable import measure_all
        from m2s.evaluation.likelihood.table import format_measurements

        head, device = checkpoint.head, next(checkpoint.model.parameters()).device
        units = self._units(checkpoint, held_out)
        largest = max(1, min(MAX_EXAMPLES, MAX_LOGITS // (held_out.sites * head.process.states)))
        what = f"{self.checkpoint} on {held_out}: {counted(len(held_out.rows), 'sequence')}, {counted(self.passes, 'pass')}"
        print_escaped(what)
        settings |= {"seed": self.seed, "t_min": self.t_min, "steps": self.steps, "passes": self.passes}
        settings |= {"data": [held_out.name, held_out.split, len(held_out.rows)]}
        partial = None if self.out is None else self.partial(self.out)
        draws = measure_all(
            *(checkpoint.model, head, held_out.rows, names, settings, partial, self.passes, self.seed),
            *(self.batch_size or largest, options, held_out.labels, device),
        )
        rows = {name: each.summary(units) for name, each in draws.items()}
        for name, each in draws.items():
            rows[name]["drop"], rows[name]["drop_error"] = each.drop(draws["nelbo"])
        missing = {name: ESTIMATORS[name].missing(head, options) for name in names}
        print_escaped("\n".join(format_measurements(rows, missing, list(units))))
        chosen = {name: ESTIMATORS[name] for name in names}
        for name, entry in chosen.items():
            if entry.note:
                print_escaped(f"{name}: {entry.note}")
        described = {name: {"title": entry.title, "source": entry.source, "note": entry.note} for name, entry in chosen.items()}
        return {"measured": {name: {**described[name], "missing": missing[name], **rows[name]} for name in names}}

    def _units(self, checkpoint: "Checkpoint", held_out: "HeldOut") -> Mapping[str, float]:
        """The mean number of units of a sequence."""
        from m2s.evaluation.bpd import example_sizes

        if (checkpoint.data or {})["kind"] == "image":
            return {"dimension": float(held_out.sites)}
        sizes: dict[str, Tensor] = {}
        if checkpoint.tokenizer is not None:
            sizes = example_sizes(held_out.rows, checkpoint.tokenizer)
        means = {unit: float(values.mean()) for unit, values in sizes.items()}
        return {"token": float(held_out.sites), **{unit: mean for unit, mean in means.items() if mean > 0}}

    def _enumerated(self, checkpoint: "Checkpoint", names: Sequence[str], options: "Options") -> list[dict[str, Any]]:
        """Test the model itself where all sequences can be enumerated."""
        from m2s.cli.sampling_args import trained_length
        from m2s.evaluation.likelihood import certify
        from m2s.evaluation.likelihood.table import format_certificates
        from m2s.evaluation.likelihood.world import is_enumerable

        length = trained_length(checkpoint)
        if length is None or not is_enumerable(checkpoint.head.process, length):
            return []
        found = certify(checkpoint.model.cpu(), checkpoint.head, length, names, options, self.checkpoint)
        print_escaped("\n".join(format_certificates(found)))
        return [each.summary() for each in found]
