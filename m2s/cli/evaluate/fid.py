"""`m2s evaluate fid SAMPLES`: the Fréchet and kernel distances between samples and data."""

import hashlib
import json
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m2s.devices import resolve_device
from m2s.errors import UserError
from m2s.io import output_file, output_folder, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from m2s.evaluation.fid import Kid, Statistics
    from m2s.evaluation.inception import Network

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Protocol:
    """The first `samples` images against the first `count` of a split; None is all."""

    samples: int | None
    against: str
    count: int | None


PROTOCOLS = {
    "mnist-5k": Protocol(5_000, "mnist:test", 5_000),
    "cifar10-50k": Protocol(50_000, "cifar10:train", None),
}


@dataclass(frozen=True)
class Images:
    """Rows of levels (uint8) with what they are."""

    name: str
    tokens: "Tensor"
    shape: tuple[int, ...]
    levels: int

    def first(self, count: int | None) -> "Images":
        return Images(self.name, self.tokens[:count], self.shape, self.levels)

    @property
    def sha256(self) -> str:
        """Of the levels, one byte each, and what they mean."""
        about = json.dumps([list(self.tokens.shape), list(self.shape), self.levels])
        return hashlib.sha256(about.encode() + self.tokens.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Fid:
    """Compare samples with data by the features that Inception's pool3 finds in them: FID, and KID with its error.

    Protocols: mnist-5k (5,000 samples against the first 5,000 test images), cifar10-50k (50,000 samples against all training
    images). Images are resized as pytorch-fid does. What was computed of a data set is kept in $M2S_DATA/statistics.

    Example: m2s evaluate fid samples.npz --protocol mnist-5k --out fid.json

    Example: m2s evaluate fid cifar10:test --against cifar10:train
    """

    samples: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SAMPLES")]
    """An .npz that m2s sample wrote, or a part of a data set, such as mnist:train, for a figure to compare with."""
    protocol: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Which data, and how many images of either side; see above."""
    against: Annotated[str, tyro.conf.arg(metavar="NAME:SPLIT")] = ""
    """The data, where there is no protocol: mnist:test, cifar10:train, ..."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Take the first so many images of either side, where there is no protocol."""
    inception: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Inception's weights: pytorch-fid's .pth, or the TorchScript inception-2015-12-05.pt; by default what is found in
    $M2S_DATA/inception or in torch's hub cache. Or any TorchScript from (N, 3, 299, 299) in (-1, 1) to (N, features)."""
    kid: bool = True
    """Compute KID too."""
    seed: int = 0
    """Of the subsets that KID draws."""
    few: bool = False
    """Go on with too few images for a covariance of full rank. The FID is then far too large: good for a rehearsal only."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Images of each call of the network: by default 16 on a CPU, 256 elsewhere."""
    device: str = ""
    """cpu, cuda, mps; by default the best there is."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the result as .json, with all that it depends on."""

    def run(self) -> None:
        from m2s.evaluation import inception
        from m2s.evaluation.fid import frechet

        started = time.monotonic()
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"--batch-size is {self.batch_size}, but it must be at least 1")
        protocol = find_protocol(self.protocol, self.against, self.limit)
        device = resolve_device(self.device)
        reference = split(protocol.against).first(protocol.count)
        samples = read(self.samples, reference)
        if self.protocol and len(samples.tokens) < (protocol.samples or 0):
            raise UserError(
                f"{self.samples} holds {len(samples.tokens):,} samples, but {self.protocol} is of {protocol.samples:,}: "
                f"draw more (m2s sample --n {protocol.samples})"
            )
        samples = samples.first(protocol.samples)
        network = inception.load(self.inception, device)
        for images in (samples, reference):
            refuse_few(images, network, self.few)
            if self.kid and len(images.tokens) < 4:
                raise UserError(f"{images.name} has {len(images.tokens)} images, too few for KID, which needs 4: give --no-kid")
        out = None if self.out is None else output_file(self.out, (".json",))
        ours, theirs = (statistics(images, network, self.batch_size) for images in (samples, reference))
        distance = frechet(ours, theirs)
        kernel = self._kid(ours, theirs, network) if self.kid else None
        seconds = time.monotonic() - started
        print("\n".join(said(samples, reference, network, distance, kernel)))
        if out is not None:
            write_json(out, self._result(samples, reference, network, distance, kernel, seconds))
            print(f"written to {out}")

    def _kid(self, ours: "Statistics", theirs: "Statistics", network: "Network") -> "Kid":
        from tqdm import tqdm

        from m2s.evaluation.fid import kid

        place = "cpu" if network.device.type == "mps" else network.device  # which has no float64
        size = min(1000, len(ours.rows) // 2, len(theirs.rows) // 2)

        def progress(subsets: range) -> Any:
            return tqdm(subsets, desc="KID", unit="subset")

        return kid(ours.rows.to(place), theirs.rows.to(place), size=size, seed=self.seed, progress=progress)

    def _result(
        self, samples: Images, reference: Images, network: "Network", distance: float, kernel: "Kid | None", seconds: float
    ) -> dict[str, Any]:
        from m2s.evaluation.inception import PREPROCESSING
        from m2s.provenance import provenance

        return {
            "fid": distance,
            "kid": None if kernel is None else asdict(kernel),
            "protocol": self.protocol or None,
            "samples": {**about(samples), "settings": settings(self.samples)},
            "reference": about(reference),
            "network": about(network),
            "preprocessing": PREPROCESSING,
            "seconds": round(seconds, 1),
            "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()},
            **provenance(network.device),
        }


def find_protocol(name: str, against: str, limit: int | None = None) -> Protocol:
    """The protocol of that name, or one made of what to compare with and how much."""
    if limit is not None and limit < 2:
        raise UserError(f"--limit is {limit}, but a covariance needs at least 2 images")
    if name:
        if name not in PROTOCOLS:
            raise UserError(f"there is no protocol {name!r}: choose from {', '.join(PROTOCOLS)}")
        if against or limit is not None:
            raise UserError(f"--protocol {name} says what to compare with, and how much: drop --against and --limit")
        return PROTOCOLS[name]
    if not against:
        raise UserError(f"say what to compare with: --protocol {' or '.join(PROTOCOLS)}, or --against such as mnist:test")
    return Protocol(limit, against, limit)


def refuse_few(images: Images, network: "Network", few: bool) -> None:
    """A covariance of D features has full rank from D + 1 images on."""
    count, least = len(images.tokens), 2 if few else network.width + 1
    if count < least:
        hint = "" if few else " (--few goes on all the same, for a rehearsal)"
        raise UserError(
            f"{images.name} has {count:,} images, too few for a covariance of {network.width:,} features: "
            f"at least {least:,} are needed{hint}"
        )


def statistics(images: Images, network: "Network", batch_size: int | None = None) -> "Statistics":
    """Of a file's images computed, of a data set's found in the cache or put there."""
    from m2s.data import BadData, root
    from m2s.evaluation.fid import Statistics
    from m2s.evaluation.inception import PREPROCESSING

    if not is_split(images.name):
        return _computed(images, network, batch_size)
    key = hashlib.sha256("\n".join([images.sha256, network.sha256, PREPROCESSING]).encode()).hexdigest()
    name = f"{images.name.replace(':', '-')}-{len(images.tokens)}-{key[:16]}.npz"
    cached = root() / "statistics" / name
    if cached.is_file():
        try:
            return Statistics.load(cached, key)
        except BadData as error:
            print(f"computing again: {error}", file=sys.stderr)
    found = _computed(images, network, batch_size)
    try:
        output_folder(cached.parent)
        found.save(cached, key)
    except (UserError, OSError) as error:
        print(f"the statistics of {images.name} are not kept: {error}", file=sys.stderr)
    return found


def _computed(images: Images, network: "Network", batch_size: int | None) -> "Statistics":
    from tqdm import tqdm

    from m2s.evaluation.fid import Statistics, kept
    from m2s.evaluation.inception import features

    size = batch_size or (16 if network.device.type == "cpu" else 256)
    found, keep = Statistics.empty(network.width), kept(len(images.tokens))
    with tqdm(total=len(images.tokens), desc=images.name, unit="image") as bar:
        for batch in features(network, images.tokens, images.shape, images.levels, size):
            first = found.count
            try:
                found.update(batch, keep[(keep >= first) & (keep < first + len(batch))] - first)
            except ValueError as error:
                raise UserError(f"{network.path} fails on images {first} and on of {images.name}: {error}") from error
            bar.update(len(batch))
    return found


def about(part: "Images | Network") -> dict[str, Any]:
    """What a result says of its images, and of its network."""
    if isinstance(part, Images):
        return {"name": part.name, "count": len(part.tokens), "sha256": part.sha256}
    return {"name": part.name, "file": part.path.name, "sha256": part.sha256, "features": part.width}


def is_split(name: str) -> bool:
    """Whether `name` is like mnist:train, and no file of that name is there."""
    from m2s.data import image_sets

    data, colon, part = name.partition(":")
    return bool(colon) and data in image_sets() and part in SPLITS and not Path(name).exists()


def split(name: str) -> Images:
    """The images of a part of a data set."""
    from m2s.data import image_sets, load

    if not is_split(name):
        known = ", ".join(f"{data}:{part}" for data in image_sets() for part in SPLITS)
        raise UserError(f"{name!r} is no part of a data set: choose from {known}")
    data, _, part = name.partition(":")
    images = load(data)
    return Images(name, getattr(images, part), images.shape, images.vocab)


def read(name: str, reference: Images) -> Images:
    """The samples, which must be images like those of the reference."""
    if is_split(name):
        images = split(name)
        if (images.shape, images.levels) != (reference.shape, reference.levels):
            raise UserError(
                f"{name} has images of {list(images.shape)} in {images.levels} levels, but {reference.name} has "
                f"{list(reference.shape)} in {reference.levels}: compare like with like"
            )
        return images
    tokens = tokens_of(Path(name), reference)
    data = (settings(name) or {}).get("data")
    if data and (data.get("shape"), data.get("levels")) != (list(reference.shape), reference.levels):
        raise UserError(
            f"{name} says that it holds {data}, but {reference.name} has images of {list(reference.shape)} in "
            f"{reference.levels} levels: compare like with like"
        )
    return Images(name, tokens, reference.shape, reference.levels)


def tokens_of(path: Path, reference: Images) -> "Tensor":
    import numpy as np
    import torch

    from m2s.data import image_sets

    if not path.is_file():
        parts = ", ".join(f"{name}:train" for name in image_sets())
        raise UserError(f"there is no file {path}: give an .npz that m2s sample wrote, or a part of a data set such as {parts}")
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens = file["tokens"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no .npz with an array `tokens`, as m2s sample writes it ({error})") from error
    sites = reference.tokens.shape[1]
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or tokens.shape[1] != sites:
        raise UserError(
            f"{path} holds {tokens.dtype} tokens of shape {list(tokens.shape)}, but an image of {reference.name} is "
            f"{' x '.join(map(str, reference.shape))}: expected whole numbers [N, {sites}]"
        )
    outside = (tokens < 0) | (tokens >= reference.levels)
    if outside.any():
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        raise UserError(
            f"{path}: tokens{list(at)} is {tokens[at]}, but the levels of {reference.name} are 0..{reference.levels - 1}: "
            "these samples have another vocabulary"
        )
    return torch.from_numpy(tokens.astype(np.uint8))


def settings(name: str) -> dict[str, Any] | None:
    """What m2s sample wrote beside the tokens: how they were drawn."""
    import numpy as np

    if is_split(name):
        return None
    with np.load(name, allow_pickle=False) as file:
        try:
            found = json.loads(str(file["settings"]))
        except (KeyError, ValueError):
            return None
    return found if isinstance(found, dict) else None


def said(samples: Images, reference: Images, network: "Network", distance: float, kernel: "Kid | None") -> list[str]:
    """The result, for people."""
    lines = [f"{samples.name} ({len(samples.tokens):,} images) against {reference.name} ({len(reference.tokens):,})"]
    if network.name != "inception-2015-12-05":
        lines.append(f"features of {network.path}, which is not FID's Inception: compare with no published figure")
    least = network.width + 1
    if min(len(samples.tokens), len(reference.tokens)) < least:
        lines.append(f"fewer than {least:,} images: the covariance is singular and the FID means nothing")
    lines.append(f"FID  {distance:z.4f}")
    if kernel is not None:
        lines.append(
            f"KID  {kernel.mean:.6f} ± {kernel.error:.6f} (standard error; {kernel.subsets} subsets of {kernel.size}, spread "
            f"{kernel.spread:.6f})"
        )
    return lines
