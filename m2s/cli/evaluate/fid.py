"""`m2s evaluate fid SAMPLES`: the Fréchet and kernel distances between samples and data."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.cli.evaluate.images import ImageTokens, load_split, read, read_settings
from m2s.cli.evaluate.statistics import statistics
from m2s.cli.help_text import help_from_source
from m2s.devices import resolve_device
from m2s.errors import UserError, print_escaped
from m2s.io import output_file, write_json

if TYPE_CHECKING:
    from m2s.evaluation.fid import Kid, Statistics
    from m2s.evaluation.inception import Network

__all__ = ["PROTOCOLS", "Fid", "ImageTokens", "Protocol", "read", "statistics"]


@dataclass(frozen=True)
class Protocol:
    """How many samples are compared with which data.

    Args:
        samples: The first so many samples; None is all.
        against: The split of a data set, such as mnist:test.
        count: The first so many images of the split; None is all.
    """

    samples: int | None
    against: str
    count: int | None


PROTOCOLS = {
    "mnist-5k": Protocol(5_000, "mnist:test", 5_000),
    "cifar10-50k": Protocol(50_000, "cifar10:train", None),
}


@dataclass(frozen=True)
@help_from_source
class Fid:
    """Compare samples with data through the features of Inception's pool3 layer: FID, and KID with its standard error.

    Protocols: mnist-5k (5,000 samples against the first 5,000 test images), cifar10-50k (50,000 samples against all training
    images). Images are resized as in pytorch-fid. Statistics of a data set are cached in $M2S_DATA/statistics.

    Example: m2s evaluate fid samples.npz --protocol mnist-5k --out fid.json

    Example: m2s evaluate fid cifar10:test --against cifar10:train
    """

    samples: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SAMPLES")]
    """An .npz that m2s sample wrote, or a split of a data set, such as mnist:train, as a baseline."""
    protocol: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """The data, and the number of images on either side: mnist-5k or cifar10-50k."""
    against: Annotated[str, tyro.conf.arg(metavar="NAME:SPLIT")] = ""
    """The data, instead of a protocol: mnist:test, cifar10:train, ..."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Use the first so many images on either side, with --against; by default all."""
    inception: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Weights of Inception: pytorch-fid's .pth, or the TorchScript inception-2015-12-05.pt; by default those found in
    $M2S_DATA/inception or in torch's hub cache. No other TorchScript is loaded, because it would run its code."""
    kid: bool = True
    """Also compute KID."""
    seed: int = 0
    """Seed of the subsets of KID."""
    few: bool = False
    """Accept too few images for a covariance of full rank. The FID is then far too large: useful as a quick trial only."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Images in each call of the network; by default 16 on a CPU, 256 elsewhere."""
    device: str = ""
    """cpu, cuda, cuda:1 or mps; by default cuda where there is a GPU, otherwise cpu."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result and everything it depends on as .json; by default it is only printed."""

    def run(self) -> None:
        """Compute the distances, print them and write them to --out.

        Raises:
            UserError: An option is out of range, or there are too few images.
        """
        from m2s.evaluation import inception
        from m2s.evaluation.fid import frechet

        started = time.monotonic()
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(option="--batch-size", value=self.batch_size, expected="at least 1")
        protocol = find_protocol(self.protocol, self.against, self.limit)
        device = resolve_device(self.device)
        reference = load_split(protocol.against).first(protocol.count)
        samples = read(self.samples, reference)
        if self.protocol and len(samples.tokens) < (protocol.samples or 0):
            raise UserError(
                f"{self.samples} holds {len(samples.tokens):,} samples, but {self.protocol} is of {protocol.samples:,}: "
                f"draw more (m2s sample --n {protocol.samples})"
            )
        samples = samples.first(protocol.samples)
        network = inception.load(self.inception, device)
        for images in (samples, reference):
            check_count(images, network, self.few)
            if self.kid and len(images.tokens) < 4:
                raise UserError(f"{images.name} has {len(images.tokens)} images, too few for KID, which needs 4: give --no-kid")
        out = None if self.out is None else output_file(self.out, (".json",))
        ours, theirs = (statistics(images, network, self.batch_size) for images in (samples, reference))
        distance = frechet(ours, theirs)
        kernel_distance = self._kid(ours, theirs, network) if self.kid else None
        seconds = time.monotonic() - started
        print_escaped("\n".join(_lines(samples, reference, network, distance, kernel_distance)))
        if out is not None:
            write_json(out, self._result(samples, reference, network, distance, kernel_distance, seconds))
            print_escaped(f"written to {out}")

    def _kid(self, ours: "Statistics", theirs: "Statistics", network: "Network") -> "Kid":
        """The kernel distance, with a progress bar."""
        from tqdm.auto import tqdm

        from m2s.evaluation.fid import kid

        device = "cpu" if network.device.type == "mps" else network.device  # mps has no float64
        size = min(1000, len(ours.rows) // 2, len(theirs.rows) // 2)

        def progress(subsets: range) -> Any:
            return tqdm(subsets, desc="KID", unit="subset")

        return kid(ours.rows.to(device), theirs.rows.to(device), size=size, seed=self.seed, progress=progress)

    def _result(
        self,
        samples: ImageTokens,
        reference: ImageTokens,
        network: "Network",
        distance: float,
        kernel: "Kid | None",
        seconds: float,
    ) -> dict[str, Any]:
        """The content of the .json."""
        from m2s.evaluation.inception import PREPROCESSING
        from m2s.provenance import provenance

        return {
            "fid": distance,
            "kid": None if kernel is None else asdict(kernel),
            "protocol": self.protocol or None,
            "samples": {**describe(samples), "settings": read_settings(self.samples)},
            "reference": describe(reference),
            "network": describe(network),
            "preprocessing": PREPROCESSING,
            "seconds": round(seconds, 1),
            "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()},
            **provenance(network.device),
        }


def find_protocol(name: str, against: str, limit: int | None = None) -> Protocol:
    """Return the protocol of that name, or one made of what to compare with and how many images.

    Args:
        name: A name in `PROTOCOLS`, or empty.
        against: The split of a data set, where there is no name.
        limit: The number of images, where there is no name; None is all.

    Raises:
        UserError: There is no such protocol, or both a name and a split were given, or neither.
    """
    if limit is not None and limit < 2:
        raise UserError(f"--limit is {limit}, but a covariance needs at least 2 images")
    if name:
        if name not in PROTOCOLS:
            raise UserError(f"there is no protocol {name!r}: choose from {', '.join(PROTOCOLS)}")
        if against or limit is not None:
            raise UserError(f"--protocol {name} sets the data and the number of images: drop --against and --limit")
        return PROTOCOLS[name]
    if not against:
        raise UserError(
            f"the data to compare with is missing: give --protocol {' or '.join(PROTOCOLS)}, or --against mnist:test"
        )
    return Protocol(limit, against, limit)


def check_count(images: ImageTokens, network: "Network", few: bool) -> None:
    """Check that there are enough images: a covariance of D features has full rank from D + 1 images on.

    Args:
        images: The images.
        network: The network that computes the features.
        few: Whether too few are accepted.

    Raises:
        UserError: There are too few.
    """
    count, least = len(images.tokens), 2 if few else network.width + 1
    if count < least:
        hint = "" if few else " (--few accepts fewer, for a quick trial)"
        raise UserError(
            f"{images.name} has {count:,} images, too few for a covariance of {network.width:,} features: "
            f"at least {least:,} are needed{hint}"
        )


def describe(part: "ImageTokens | Network") -> dict[str, Any]:
    """Return what a result records of its images, or of its network.

    Args:
        part: The images or the network.
    """
    if isinstance(part, ImageTokens):
        return {"name": part.name, "count": len(part.tokens), "sha256": part.sha256}
    return {"name": part.name, "file": part.path.name, "sha256": part.sha256, "features": part.width}


def _lines(
    samples: ImageTokens, reference: ImageTokens, network: "Network", distance: float, kernel: "Kid | None"
) -> list[str]:
    """The result, for people."""
    lines = [f"{samples.name} ({len(samples.tokens):,} images) against {reference.name} ({len(reference.tokens):,})"]
    if network.name != "inception-2015-12-05":
        lines.append(f"features of {network.path}, which is not FID's Inception: not comparable with published figures")
    least = network.width + 1
    if min(len(samples.tokens), len(reference.tokens)) < least:
        lines.append(f"fewer than {least:,} images: the covariance is singular and the FID has no meaning")
    lines.append(f"FID  {distance:z.4f}")
    if kernel is not None:
        lines.append(
            f"KID  {kernel.mean:.6f} ± {kernel.error:.6f} (standard error; {kernel.subsets} subsets of {kernel.size}, spread "
            f"{kernel.spread:.6f})"
        )
    return lines
