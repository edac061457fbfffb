"""`m2s compare CHECKPOINT ...`: samples of several models on the same noise, and their distance to the data."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.help_text import help_from_source
from m2s.cli.sampling_args import load_checkpoint
from m2s.devices import resolve_device
from m2s.errors import UserError
from m2s.io import atomic_write, output_file, output_folder, require_absent, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.cli.evaluate.images import ImageTokens
    from m2s.hub import Checkpoint

RESULT, REFERENCE = "compare.json", "data.npz"
PICTURES = {"compare.svg": False, "compare-dark.svg": True}  # whether each is for a dark page
REPAIRED = "repaired"
DIAGNOSED = 128  # samples that are drawn once more to measure dropped mass, and noisy images whose scores are averaged
SHOWN = 64  # images of the data that are stored, for the report


@dataclass(frozen=True)
class _Arm:
    """One model in one form: as it is, or with projected scores."""

    name: str
    place: str
    checkpoint: "Checkpoint"
    project: bool


@dataclass(frozen=True)
@help_from_source
class Compare:
    """Draw images from several models on the same noise with few and many steps, and measure their distance to the data.

    A model that predicts an unconstrained score (SEDD) is sampled twice: as it is, and repaired, with projected scores. The
    distance is the Fréchet distance of pixels (m2s evaluate pixels), which needs no network and suits small images. Standard
    errors are those of a jackknife over 32 groups of samples. Differences are over pairs of samples on the same noise.

    For uniform noise the result also says what the projection changes: the mass of negative weights that the sampler drops
    without it, and the mean of the scores on noisy data, which is 1 for exact scores.

    Writes compare.json, compare.svg, compare-dark.svg and the samples, as NAME-STEPS.npz. The same command, given again, keeps
    samples that are complete and computes the rest. m2s report shows a comparison in the folder of a run or one folder below.

    Example: m2s compare runs/sedd runs/m2s --against digits:train --out runs/m2s/compare
    """

    checkpoints: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="CHECKPOINT")]
    """The models: folders of runs, built-in weights (builtin:NAME), or repositories of the Hugging Face hub."""
    out: Path
    """The folder for all files."""
    against: Annotated[str, tyro.conf.arg(metavar="NAME:SPLIT")]
    """The data to compare with: a split of a data set of images, such as digits:train."""
    steps: tuple[int, ...] = (4, 8, 16, 32)
    """Numbers of sampling steps."""
    n: int = 512
    """Number of samples of each model at each number of steps."""
    sampler: str = "analytic"
    """The rule for one step, the same for all models, as in m2s sample."""
    grid: str = "linear"
    """Spacing of the times: linear (as in SEDD's release) or cosine."""
    seed: int = 0
    """Seed of all randomness."""
    micro_batch: int = 128
    """Samples in each call of the network."""
    device: str = ""
    """cpu, cuda, cuda:1 or mps; by default cuda where there is a GPU, otherwise cpu."""
    overwrite: bool = False
    """Draw all samples again, and replace a finished result."""

    def run(self) -> None:
        """Draw the samples that are missing, measure them, and write the result.

        Raises:
            UserError: An option cannot be used.
        """
        from m2s.cli.evaluate.images import load_split
        from m2s.provenance import provenance
        from m2s.report.blocks import conjunction
        from m2s.report.comparison import format_table, write_figure

        numbers = self.out / RESULT
        require_absent([numbers], self.overwrite)
        if not self.steps or min(self.steps) < 1 or len(set(self.steps)) < len(self.steps):
            raise UserError(option="steps", value=" ".join(map(str, self.steps)), expected="different numbers of at least 1")
        if self.n < 4:
            raise UserError(option="n", value=self.n, expected="at least 4, for a standard error")
        reference = load_split(self.against)
        arms = self._arms(reference)
        output_folder(self.out)
        for name in (RESULT, *PICTURES):
            output_file(self.out / name, (".json", ".svg"))
        samples = {steps: {arm.name: self._draw(arm, steps) for arm in arms} for steps in sorted(self.steps)}
        self._write_reference(reference)
        result = {
            "reference": {
                "name": reference.name,
                "count": len(reference.tokens),
                "shape": list(reference.shape),
                "file": REFERENCE,
                "real": self._real_distance(reference),
            },
            "levels": reference.levels,
            "settings": {name: getattr(self, name) for name in ("n", "sampler", "grid", "seed", "micro_batch")},
            "arms": [self._describe(arm) for arm in arms],
            "steps": [{"steps": steps, **self._measure(found, reference)} for steps, found in samples.items()],
            "projection": self._projection(arms, reference, samples[max(self.steps)]),
            **provenance(resolve_device(self.device)),
        }
        for name, dark in PICTURES.items():
            write_figure(result, self.out / name, dark)
        write_json(numbers, result)
        print("\n".join([*format_table(result), f"{numbers} and {conjunction(PICTURES)} written"]))

    def _arms(self, reference: "ImageTokens") -> list[_Arm]:
        """The models, each unconstrained score in two forms."""
        from m2s.hub.builtin import short_name

        names = [short_name(place) for place in self.checkpoints]
        if len(set(names)) < len(names):
            raise UserError(f"two checkpoints are called {', '.join(names)}: their folders must have different names")
        arms = []
        for name, place in zip(names, self.checkpoints, strict=True):
            checkpoint = load_checkpoint(place, resolve_device(self.device))
            data = checkpoint.data or {}
            if (data.get("kind"), data.get("shape"), data.get("levels")) != (
                "image",
                list(reference.shape),
                reference.levels,
            ):
                raise UserError(
                    f"{place} is no model of images of {list(reference.shape)} in {reference.levels} levels, as "
                    f"{reference.name} has them: leave it out, or give the data of its images"
                )
            arms.append(_Arm(name, place, checkpoint, False))
            if not checkpoint.head.has_posterior:
                arms.append(_Arm(f"{name}-{REPAIRED}", place, checkpoint, True))
        if not arms:
            raise UserError("no checkpoint was given: name the folders that m2s train made, such as runs/m2s runs/sedd")
        return arms

    def _write_reference(self, reference: "ImageTokens") -> None:
        """Write some images of the data, which m2s report shows beside the samples."""
        import numpy as np

        with atomic_write(self.out / REFERENCE) as temporary:
            np.savez_compressed(temporary, tokens=reference.tokens[:SHOWN].numpy().astype(np.int32))

    def _words(self, arm: _Arm, steps: int) -> list[str]:
        """The command that draws the samples of one arm."""
        options = {"n": self.n, "steps": steps, "sampler": self.sampler, "grid": self.grid, "seed": self.seed}
        words = ["sample", arm.place, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        words += ["--micro-batch", str(self.micro_batch), "--batch-size", str(self.n)]
        words += ["--device", self.device] if self.device else []
        return [*words, *(["--project"] if arm.project else []), "--out", str(self.out / f"{arm.name}-{steps}.npz")]

    def _draw(self, arm: _Arm, steps: int) -> "Tensor":
        """Draw the samples of one arm, or read them where they are complete."""
        from m2s.cli.parsing import parse
        from m2s.provenance import recorded_command

        words = self._words(arm, steps)
        print(f"$ m2s {shlex.join(words)}", flush=True)
        with recorded_command(["m2s", *words]):
            return parse([*words, *(["--overwrite"] if self.overwrite else [])]).read_or_draw()

    def _describe(self, arm: _Arm) -> dict[str, Any]:
        """What a result records of an arm."""
        from m2s.provenance import fingerprint

        return {
            "name": arm.name,
            "checkpoint": arm.place,
            "head": str(arm.checkpoint.head),
            "project": arm.project,
            "weights": fingerprint(arm.checkpoint.model),
            "files": {str(steps): f"{arm.name}-{steps}.npz" for steps in sorted(self.steps)},
        }

    def _measure(self, samples: "dict[str, Tensor]", reference: "ImageTokens") -> dict[str, Any]:
        """The distances of all arms at one number of steps."""
        import torch

        from m2s.evaluation.comparison import with_errors
        from m2s.evaluation.pixels import GROUPS, pixel_distances

        stacked = torch.stack(list(samples.values()))
        distances = pixel_distances(stacked, reference.tokens.long(), reference.levels, min(GROUPS, self.n // 2))
        return with_errors(distances, list(samples))

    def _real_distance(self, reference: "ImageTokens") -> dict[str, Any] | None:
        """The distance between n images of the data and its other images: about that of perfect samples.

        None where the data has fewer than 2 n images.
        """
        import torch

        from m2s.evaluation.comparison import with_errors
        from m2s.evaluation.pixels import GROUPS, pixel_distances

        tokens = reference.tokens.long()
        if len(tokens) < 2 * self.n:
            return None
        tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(self.seed))]
        chosen, others = tokens[: self.n], tokens[self.n :]
        distances = pixel_distances(chosen[None], others, reference.levels, min(GROUPS, self.n // 2))
        return {
            "images": len(chosen),
            "against": len(others),
            "distance": with_errors(distances, ["real"])["distances"]["real"],
        }

    def _projection(self, arms: list[_Arm], reference: "ImageTokens", samples: "dict[str, Tensor]") -> dict[str, Any] | None:
        """What the projection of the first unconstrained score under uniform noise changes; None where there is none.

        `samples` are those with the most steps.
        """
        import m2s
        from m2s.evaluation.comparison import HalfProjected, mean_scores
        from m2s.hub.builtin import short_name

        arm = next((arm for arm in arms if arm.project), None)
        process = None if arm is None else arm.checkpoint.head.process.rank_one
        if arm is None or process is None or process.mask is not None or self.sampler != "analytic":
            return None  # exact scores have the mean 1 where every token can become every other, which masks exclude
        name, model, head = short_name(arm.place), arm.checkpoint.model, arm.checkpoint.head
        clean = reference.tokens[:DIAGNOSED].long().to(resolve_device(self.device))
        means = mean_scores(model, {"as it is": head, "projected": m2s.Projected(head)}, clean, self.seed)
        for other in (arm for arm in arms if not arm.project and arm.checkpoint.head.has_posterior):
            found = mean_scores(other.checkpoint.model, {other.name: other.checkpoint.head}, clean, self.seed)
            means = [{**mean, **row} for mean, row in zip(means, found, strict=True)]
        halves = {"raised": HalfProjected(head, raises=True), "lowered": HalfProjected(head, raises=False)}
        most, options = max(self.steps), self._options()
        parts = {"as it is": samples[name], "projected": samples[arm.name]}
        for half, half_head in halves.items():
            parts[half] = m2s.sample(model, half_head, (self.n, clean.shape[1]), steps=most, **options).cpu()
        return {
            "arm": arm.name,
            "of": name,
            "examples": len(clean),
            "mean_scores": means,
            "dropped_samples": min(self.n, DIAGNOSED),
            "dropped": [self._dropped(arm, steps, clean.shape[1]) for steps in sorted(self.steps)],
            "parts": {"steps": most, **self._measure(parts, reference)},
        }

    def _options(self) -> dict[str, Any]:
        """The options of `m2s.sample` that all models share."""
        return {"sampler": self.sampler, "grid": self.grid, "seed": self.seed, "micro_batch": self.micro_batch}

    def _dropped(self, arm: _Arm, steps: int, length: int) -> dict[str, Any]:
        """The negative weights that the analytic step drops without projection: their mean mass, and where they occur."""
        import m2s

        shape, (model, head) = (min(self.n, DIAGNOSED), length), (arm.checkpoint.model, arm.checkpoint.head)
        _, counts = m2s.sample(model, head, shape, steps=steps, diagnostics=True, **self._options())
        sites = sum(step.sites for step in counts.steps)
        mass, positions = (sum(getattr(step, key) for step in counts.steps) for key in ("negative_mass", "negative_sites"))
        return {"steps": steps, "mass": mass / sites, "positions": positions / sites}
