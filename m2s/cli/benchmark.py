"""`m2s benchmark`: speed, memory and accuracy on this machine."""

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.help_text import help_from_source
from m2s.cli.options import flag
from m2s.errors import UserError, print_escaped, suggest
from m2s.io import output_file, require_absent, write_json
from m2s.methods import METHODS
from m2s.training.config import Count, Number

if TYPE_CHECKING:
    from m2s.benchmark import Setting


@dataclass(frozen=True)
@help_from_source
class Benchmark:
    """Time the library against other implementations of the same operations, in one run: tables, ratios, and targets.

    loss: the last layer and the loss, forward and backward, against the matrix products alone and against cross-entropy
    (compiled, Liger, Apple's CCE), with errors against float64. projection: against fifty bisection passes and one read and
    write. classify: the classes of scores. audit: the audit of one network call. reverse-step: a sampler's step on hidden
    states. train: a complete training step, in tokens per second and MFU. ablation: the training step without one kernel at
    a time. sample: a complete step of m2s.sample. plain-loop: a training step against a plain eager loop. images: training
    and sampling steps of U-Nets, in images per second. image-ablation: the former without one change at a time.

    What a machine does not have is skipped, with a line that says so. Targets are checked on a GPU at the default sizes.

    Example: m2s benchmark loss projection --out benchmark.json

    Example: m2s benchmark --quick
    """

    parts: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[PART ...]")] = ()
    """What to measure: loss, projection, classify, audit, reverse-step, train, ablation, sample, and others; by default all."""
    rows: Count = None
    """Sites, that is batch times length: a multiple of 8, and of 512 from 4,096 on. By default 16,384 on a GPU and fewer
    elsewhere. projection and classify use a quarter of it."""
    vocab: Count = None
    """Size of the vocabulary; by default 50,257 on a GPU and smaller elsewhere."""
    width: Count = None
    """Width of the hidden states: 16, 32 or a multiple of 64; by default 768 on a GPU and smaller elsewhere."""
    repeats: Count = None
    """Timed calls of each implementation. Calls of different implementations alternate, and the median counts."""
    device: str = ""
    """cpu or cuda; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write all numbers as .json; by default they are only printed. Until all parts are measured they are in
    FILE.partial.json."""
    overwrite: bool = False
    """Replace a finished result."""
    quick: bool = False
    """Small sizes and few repeats: a quick trial, under a minute on two cores."""
    method: str = "m2s"
    """train and ablation: the method, as in m2s train --method. The targets are those of m2s."""
    against: Number = None
    """train: tokens per second of another implementation, for a ratio."""
    against_step: Number = None
    """sample: milliseconds per step of another implementation, for a ratio."""
    tune: bool = False
    """Instead, time the kernels of the parts for many block sizes and numbers of warps."""

    def run(self) -> None:
        """Measure the parts, print the tables and write the numbers to --out.

        Raises:
            UserError: There is no such part.
            SystemExit: A target is missed.
        """
        from m2s.benchmark import PARTS

        chosen = self.parts or tuple(PARTS)
        for name in chosen:
            if name not in PARTS:
                raise UserError(f"there is no part {name!r} to measure: {suggest(name, list(PARTS))}")
        setting = self._setting()
        if self.out is not None:
            require_absent([self.out], self.overwrite)
            output_file(self.out, (".json",))
        measured = self._measure(setting, chosen)
        failed = [name for name, part in measured["parts"].items() if "failed" in part]
        if self.out is not None:
            write_json(self.out, measured)
            self._partial(self.out).unlink(missing_ok=True)
            print_escaped(f"\n{self.out} written")
        if failed:
            raise SystemExit(1)

    @staticmethod
    def _partial(out: Path) -> Path:
        """Where the parts are that an interrupted run has measured. No other run reads them."""
        return out.with_name(f"{out.stem}.partial.json")

    def _setting(self) -> "Setting":
        """The sizes to measure. UserError where an option is invalid."""
        least = {"rows": 8, "vocab": 3, "width": 16, "repeats": 1, "against": 0, "against_step": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not (value >= low and value > 0):
                limit = f"at least {low}" if low else "positive"
                raise UserError(option=flag(name), value=value, expected=limit)
        if self.method not in METHODS:
            raise UserError(f"there is no method {self.method!r}: {suggest(self.method, METHODS)}")
        if self.rows is not None and self.rows % (512 if self.rows >= 4096 else 8):
            raise UserError(f"--rows is {self.rows}, but it must be a multiple of 8, and from 4096 on of 512")
        if self.width is not None and self.width not in (16, 32) and self.width % 64:
            raise UserError(f"--width is {self.width}, but it must be 16, 32 or a multiple of 64")

        from m2s.benchmark import Setting
        from m2s.distributed import World

        device = World.start(self.device).device
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"--device is {self.device!r}, but only cpu and cuda can be measured")
        names = ("rows", "vocab", "width", "repeats", "method", "against", "against_step")
        return Setting.of(device, self.quick, **{name: getattr(self, name) for name in names})

    def _measure(self, setting: "Setting", chosen: tuple[str, ...]) -> dict[str, Any]:
        """The results of all parts. Each is printed as soon as it is measured, and saved until all are; none stops another."""
        from m2s.benchmark import PARTS
        from m2s.benchmark.comparison import error_summary, release
        from m2s.benchmark.format import format_bar, format_part
        from m2s.benchmark.tune import tune

        calls = {"tune": lambda setting: tune(setting, chosen)} if self.tune else {name: PARTS[name] for name in chosen}
        results: dict[str, Any] = {**self._about(setting), "parts": {}, "bars": []}
        print(results["device"])
        for name, part in calls.items():
            try:
                found = part(setting)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                found = {
                    "what": name,
                    "contenders": {},
                    "ratios": {},
                    "bars": [],
                    "skipped": [],
                    "failed": error_summary(error),
                }
                print(f"\n{name} failed: {found['failed']}")
            else:
                print(f"\n{format_part(found)}", flush=True)
            results["parts"][name] = found
            results["bars"] += [{"part": name, **bar} for bar in found["bars"]]
            if self.out is not None:
                write_json(self._partial(self.out), results)
            release()
        if results["bars"] and setting.full:
            print("\nbars")
            for bar in results["bars"]:
                print(f"  {format_bar(bar)}")
        return results

    def _about(self, setting: "Setting") -> dict[str, Any]:
        """The machine, the versions and the sizes."""
        from importlib.metadata import distributions

        import torch

        from m2s.benchmark.setting import PEERS
        from m2s.provenance import provenance

        there = {distribution.name for distribution in distributions()}
        packages = [package for package in ("triton", *(package for _, package in PEERS.values())) if package in there]
        sizes = {name: value for name, value in vars(setting).items() if name != "device"}
        extra = {
            "length": setting.length,
            "batch": setting.batch,
            "columns": setting.columns,
            "threads": torch.get_num_threads(),
        }
        return {**provenance(setting.device, *packages), "setting": {**sizes, **extra}}
