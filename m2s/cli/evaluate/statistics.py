"""Statistics of Inception features for FID: computed, and cached for the splits of data sets."""

import hashlib
import sys
from typing import TYPE_CHECKING

from m2s.cli.evaluate.images import ImageTokens, is_split
from m2s.errors import UserError, print_escaped
from m2s.io import output_folder
from m2s.progress import Progress

if TYPE_CHECKING:
    from m2s.evaluation.fid import Statistics
    from m2s.evaluation.inception import Network


def statistics(images: ImageTokens, network: "Network", batch_size: int | None = None) -> "Statistics":
    """Return the statistics of the features of images. Those of a data set are cached in $M2S_DATA/statistics.

    Args:
        images: The images.
        network: The network that computes the features.
        batch_size: Images in each call of the network; by default 16 on a CPU and 256 elsewhere.

    Returns:
        Mean, covariance and some of the features.

    Raises:
        UserError: The network fails on the images.
    """
    from m2s.data import BadData, root
    from m2s.evaluation.fid import Statistics
    from m2s.evaluation.inception import PREPROCESSING

    if not is_split(images.name):
        return _compute(images, network, batch_size)
    key = hashlib.sha256("\n".join([images.sha256, network.sha256, PREPROCESSING]).encode()).hexdigest()
    name = f"{images.name.replace(':', '-')}-{len(images.tokens)}-{key[:16]}.npz"
    cached = root() / "statistics" / name
    if cached.is_file():
        try:
            return Statistics.load(cached, key)
        except BadData as error:
            print_escaped(f"computing again: {error}", file=sys.stderr)
    found = _compute(images, network, batch_size)
    try:
        output_folder(cached.parent)
        found.save(cached, key)
    except (UserError, OSError) as error:
        print_escaped(f"the statistics of {images.name} are not kept: {error}", file=sys.stderr)
    return found


def _compute(images: ImageTokens, network: "Network", batch_size: int | None) -> "Statistics":
    """The statistics, computed batch by batch."""
    from m2s.evaluation.fid import Statistics, stored_features
    from m2s.evaluation.inception import features

    size = batch_size or (16 if network.device.type == "cpu" else 256)
    found, rows = Statistics.empty(network.width), stored_features(len(images.tokens))
    with Progress(len(images.tokens), images.name, "image") as progress:
        for batch in features(network, images.tokens, images.shape, images.levels, size):
            first = found.count
            try:
                found.update(batch, rows[(rows >= first) & (rows < first + len(batch))] - first)
            except ValueError as error:
                raise UserError(
                    f"{network.path} fails in the batch that starts at image {first} of {images.name}: {error}"
                ) from error
            progress.update(len(batch))
    return found
