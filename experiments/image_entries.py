"""Entries of experiments/image_job.py: CIFAR-10 with two networks, and samplers and schedules on MNIST.

All rows of an entry train on the same batches, times and noise as far as their processes allow. Samples of the same number have
the same noise in all rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m2s.methods import METHODS


@dataclass(frozen=True)
class SampleSet:
    """A set of samples, of which the FID is measured.

    Args:
        steps: Sampling steps.
        sampler: The sampler; "auto": that of the method.
        grid: The time grid.
        options: Further options of `m2s sample`.
        name: What the options are, for the name of the file.
    """

    steps: int
    sampler: str = "auto"
    grid: str = "cosine"
    options: tuple[str, ...] = ()
    name: str = ""

    def label(self, method: str) -> str:
        """Return the name of the file, without its ending.

        Args:
            method: The method of the row.
        """
        sampler = METHODS[method].sampler if self.sampler == "auto" else self.sampler
        return "-".join(filter(None, (sampler, self.grid, self.name, str(self.steps))))


@dataclass(frozen=True)
class Row:
    """A network and what is measured with it.

    Args:
        options: Options of `m2s train` beside those of the entry. "method" is one of them.
        sets: The sets of samples, the most important ones first.
    """

    options: Mapping[str, Any]
    sets: tuple[SampleSet, ...]

    @property
    def method(self) -> str:
        """The method."""
        return str(self.options["method"])


@dataclass(frozen=True)
class Entry:
    """A table of image experiments.

    Args:
        preset: The preset of `m2s train`.
        settings: Options that all rows have in common.
        rows: The rows by name.
        n: Samples of a set.
        fid: Options of `m2s evaluate fid` that name the data.
        micro_batch: Samples of one call of the network.
        passes: Times per test image of the NELBO.
        run: Name of the folder of a run; "{row}" is the row. The rows of mnist.py have their seed in it.
        trained: Whether another script trains the networks.
        points: Whether every state of a run is measured: bits and FID against images seen.
        shards: Sets of this many samples make the 50,000 of the final FID; 0: there is none.
    """

    preset: str
    settings: Mapping[str, Any]
    rows: Mapping[str, Row]
    n: int
    fid: tuple[str, ...]
    micro_batch: int = 250
    passes: int = 4
    run: str = "{row}"
    trained: bool = False
    points: bool = False
    shards: int = 0


CIFAR10_FID = ("--against", "cifar10:train")
MULTI = {"network.size": "mnist", "network.width": 96, "network.multipliers": (1, 2, 3), "network.layers": 3}
NETWORKS = {"md4": {}, "multi": {**MULTI, "network.dropout": 0.1}}  # 28.4 and 27.7 million parameters
METHOD_ROWS: dict[str, dict[str, Any]] = {
    "m2s": {"method": "m2s"},
    "m2s-offset": {"method": "m2s-offset"},
    "m2s-gaussian": {"method": "m2s-gaussian"},
    # A third of the bits of m2s-gaussian were its reconstruction term: less noise at t = 0, and times closer to it.
    "m2s-gaussian-low": {"method": "m2s-gaussian", "process.sigma_min": 1e-5, "t_min": 1e-4},
    "sedd": {"method": "sedd"},
    "md4": {"method": "md4"},
    "tauldr": {"method": "tauldr"},
}
SHORT = {  # 7,813 steps of 128: 1,000,064 images
    "steps": 7813,
    "batch": 128,
    "seed": 1,
    "importance": 0.1,
    "optimizer.warmup": 500,
    "optimizer.ema": 0.999,
    "validate_every": 1563,
    "validation_samples": 512,
    "log_every": 50,
    "save_every": 1563,
    "keep": 1,
}
# The number of images is open: a constant learning rate makes all states of one run comparable.
LONG = {**SHORT, "steps": 132_813, "optimizer.decay": "constant", "optimizer.ema": 0.9999, "save_every": 7813, "keep": 4}
LABELS = {**SHORT, "network.labels": True}
CLASSES = ("--labels", *map(str, range(10)))
GUIDANCE = (1.0, 1.5, 2.0, 3.0)
AT_100 = (SampleSet(100),)

CIFAR10_1M = Entry(
    preset="cifar10",
    settings=SHORT,
    rows={
        f"{name}-{network}": Row({**options, **NETWORKS[network]}, AT_100)
        for network in NETWORKS
        for name, options in METHOD_ROWS.items()
    },
    n=10_000,
    fid=CIFAR10_FID,
)
CIFAR10_LONG = Entry(
    preset="cifar10",
    settings=LONG,
    rows={
        f"{name}-{network}": Row({**METHOD_ROWS[name], **NETWORKS[network]}, AT_100)
        for network in NETWORKS
        for name in ("m2s-gaussian", "m2s-gaussian-low", "sedd", "m2s-offset", "m2s")
    },
    n=10_000,
    fid=CIFAR10_FID,
    points=True,
    shards=5_000,
)
CIFAR10_LABELS = Entry(
    preset="cifar10",
    settings=LABELS,
    rows={
        f"{name}-{network}": Row(
            {"method": name, **NETWORKS[network]},
            tuple(SampleSet(100, options=(*CLASSES, "--guidance", str(g)), name=f"guidance-{g}") for g in GUIDANCE),
        )
        for network in NETWORKS
        for name in ("m2s-offset", "m2s-gaussian")
    },
    n=10_000,
    fid=CIFAR10_FID,
)

MNIST_STEPS, MORE_STEPS = (25, 50, 100), (10, 200, 500)
GRIDS = ("cosine", "linear")
SAMPLERS = {  # of the rows on seed 1
    "m2s": ("bayes", "euler", "analytic"),
    "m2s-offset": ("bayes", "euler", "analytic"),
    "m2s-gaussian": ("bayes", "euler", "tau_leaping", "ordinal_tau_leaping"),
    "sedd": ("analytic", "euler"),
}
MNIST_SETTINGS = {"steps": 11_700, "seed": 1, "validate_every": 585, "save_every": 11_700, "keep": 1}


def mnist_sets(method: str) -> tuple[SampleSet, ...]:
    """Return the sets of a row: its sampler at 10 to 500 steps, then all samplers and grids, for SEDD also projected.

    Args:
        method: The method.
    """
    default = METHODS[method].sampler
    chosen = [SampleSet(steps, default) for steps in (*MNIST_STEPS, *MORE_STEPS)]
    if method == "sedd":
        projected = ("--project",)
        chosen += [SampleSet(n, default, grid, projected, "projected") for grid in GRIDS for n in MNIST_STEPS]
    others = [(sampler, grid) for sampler in SAMPLERS[method] for grid in GRIDS if (sampler, grid) != (default, "cosine")]
    return (*chosen, *(SampleSet(steps, sampler, grid) for sampler, grid in others for steps in MNIST_STEPS))


MNIST_SAMPLERS = Entry(
    preset="mnist",
    settings=MNIST_SETTINGS,
    rows={method: Row({"method": method}, mnist_sets(method)) for method in SAMPLERS},
    n=5_000,
    fid=("--protocol", "mnist-5k"),
    micro_batch=500,
    passes=2,
    run="{row}-seed1",
    trained=True,
)
MNIST_SCHEDULE = Entry(
    preset="mnist",
    settings=MNIST_SETTINGS,
    rows={
        f"{method}-horizon-{horizon}": Row(
            {"method": method, "process.schedule": "exponential", "process.horizon": float(horizon)},
            tuple(SampleSet(steps) for steps in MNIST_STEPS),
        )
        for horizon in (1, 5)
        for method in ("m2s", "sedd")
    },
    n=5_000,
    fid=("--protocol", "mnist-5k"),
    micro_batch=500,
    passes=2,
)

ENTRIES = {
    "cifar10-1m": CIFAR10_1M,
    "cifar10-long": CIFAR10_LONG,
    "cifar10-labels": CIFAR10_LABELS,
    "mnist-samplers": MNIST_SAMPLERS,
    "mnist-schedule": MNIST_SCHEDULE,
}
