"""The 2015-12-05 Inception network whose pool3 features define FID, and the features of images.

Two files hold its weights: `pt_inception-2015-12-05-6726825d.pth`, pytorch-fid's state dict, and `inception-2015-12-05.pt`, a
TorchScript. Both are read into the network below. A TorchScript is a program, which can write files when it is loaded or
called. So only those of a known SHA-256 are loaded. A state dict is read with `weights_only=True`, which runs nothing.

Images are preprocessed as in pytorch-fid: levels are scaled to [0, 1], resized to 299 x 299 by
`F.interpolate(mode="bilinear", align_corners=False)` without antialiasing, and mapped to 2x - 1. (Others differ: the original
FID resizes as TensorFlow 1 did, clean-fid antialiases, StyleGAN scales by (x - 128) / 128.)
"""

import itertools
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor, nn

from m2s.data.files import BadData, root, sha256

SIZE = 299
PREPROCESSING = "levels / (K - 1); bilinear to 299 x 299, align_corners=False, no antialiasing; 2x - 1; grey repeated"
SCRIPT, STATE = "inception-2015-12-05.pt", "pt_inception-2015-12-05-6726825d.pth"
KNOWN_SCRIPTS = {"7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"}
"""The SHA-256 of every TorchScript that is loaded."""
ADDRESS = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{STATE}"


class _Convolution(nn.Module):
    """Convolution, batch normalization and ReLU.

    Args:
        width: Input channels.
        out: Output channels.
        kernel: The size of the filter.
        stride: The stride.
        padding: The padding; None: the size is preserved at stride 1, and there is no padding otherwise.
    """

    def __init__(
        self, width: int, out: int, kernel: int | tuple[int, int] = 1, stride: int = 1, padding: int | None = None
    ) -> None:
        super().__init__()
        rows, columns = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        pads = (rows // 2 * (stride == 1), columns // 2 * (stride == 1)) if padding is None else (padding, padding)
        self.conv = nn.Conv2d(width, out, (rows, columns), stride, pads, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


Layer = tuple[Any, ...]
"""Output channels, filter size and stride of a convolution; or two such tuples, for two convolutions of the same input."""


class _Mixed(nn.Module):
    """Parallel branches whose outputs are concatenated.

    The convolutions of a branch are named name_1, name_2, ...; the two of a fork, which is always last, end in a and b.
    `branch_pool` reads the pooled input. Without such a branch the pooled input is an output itself.

    Args:
        width: Input channels.
        pool: How the input is pooled: halve, maximum or mean.
        **branches: The layers of each branch.
    """

    def __init__(self, width: int, pool: str, **branches: list[Layer]) -> None:
        super().__init__()
        self.pool, self.branches = pool, dict[str, list[list[str]]]()
        for branch, layers in branches.items():
            self.branches[branch], before = [], width
            for i, layer in enumerate(layers, 1):
                forks = layer if isinstance(layer[0], tuple) else (layer,)
                name = f"{branch}_{i}" if len(layers) > 1 else branch
                names = [name + end for end in ("ab" if len(forks) > 1 else [""])]
                for each, shape in zip(names, forks, strict=True):
                    self.add_module(each, _Convolution(before, *shape))
                self.branches[branch].append(names)
                before = forks[0][0]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the branches."""
        outputs = []
        for branch, layers in self.branches.items():
            y = [self._pooled(x) if branch == "branch_pool" else x]
            for names in layers:
                y = [self.get_submodule(name)(y[0]) for name in names]
            outputs += y
        return torch.cat(outputs if "branch_pool" in self.branches else [*outputs, self._pooled(x)], 1)

    def _pooled(self, x: Tensor) -> Tensor:
        """Pool the input."""
        if self.pool == "halve":
            return F.max_pool2d(x, 3, 2)
        if self.pool == "maximum":
            return F.max_pool2d(x, 3, 1, 1)
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _a(width: int, pool: int) -> _Mixed:
    """Make a block of type A."""
    double: list[Layer] = [(64, 1), (96, 3), (96, 3)]
    return _Mixed(
        width, "mean", branch1x1=[(64, 1)], branch5x5=[(48, 1), (64, 5)], branch3x3dbl=double, branch_pool=[(pool, 1)]
    )


def _c(middle: int) -> _Mixed:
    """Make a block of type C."""
    row, column, ends = (1, 7), (7, 1), 192
    return _Mixed(
        768,
        "mean",
        branch1x1=[(ends, 1)],
        branch7x7=[(middle, 1), (middle, row), (ends, column)],
        branch7x7dbl=[(middle, 1), (middle, column), (middle, row), (middle, column), (ends, row)],
        branch_pool=[(ends, 1)],
    )


def _e(width: int, pool: str) -> _Mixed:
    """Make a block of type E."""
    fork: Layer = ((384, (1, 3)), (384, (3, 1)))
    return _Mixed(
        width,
        pool,
        branch1x1=[(320, 1)],
        branch3x3=[(384, 1), fork],
        branch3x3dbl=[(448, 1), (384, 3), fork],
        branch_pool=[(192, 1)],
    )


class Inception(nn.Sequential):
    """FID's Inception v3 up to pool3: [N, 3, 299, 299] in (-1, 1) to [N, 2048]. The names are those of pytorch-fid's file.

    It differs from torchvision's Inception v3 in two ways: average pooling leaves the padding out, and the last block pools by
    a maximum.
    """

    def __init__(self) -> None:
        halved: list[Layer] = [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)]
        layers = {
            "Conv2d_1a_3x3": _Convolution(3, 32, 3, 2),
            "Conv2d_2a_3x3": _Convolution(32, 32, 3, padding=0),
            "Conv2d_2b_3x3": _Convolution(32, 64, 3),
            "maxpool1": nn.MaxPool2d(3, 2),
            "Conv2d_3b_1x1": _Convolution(64, 80),
            "Conv2d_4a_3x3": _Convolution(80, 192, 3, padding=0),
            "maxpool2": nn.MaxPool2d(3, 2),
            "Mixed_5b": _a(192, 32),
            "Mixed_5c": _a(256, 64),
            "Mixed_5d": _a(288, 64),
            "Mixed_6a": _Mixed(288, "halve", branch3x3=[(384, 3, 2)], branch3x3dbl=[(64, 1), (96, 3), (96, 3, 2)]),
            "Mixed_6b": _c(128),
            "Mixed_6c": _c(160),
            "Mixed_6d": _c(160),
            "Mixed_6e": _c(192),
            "Mixed_7a": _Mixed(768, "halve", branch3x3=[(192, 1), (320, 3, 2)], branch7x7x3=halved),
            "Mixed_7b": _e(1280, "mean"),
            "Mixed_7c": _e(2048, "maximum"),
            "avgpool": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
        }
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


@dataclass(frozen=True)
class Network:
    """A feature network: FID's Inception, or a TorchScript of `KNOWN_SCRIPTS` from [N, 3, 299, 299] in (-1, 1) to [N, width].

    Args:
        module: The network.
        path: The file of its weights.
        sha256: The SHA-256 of the file.
        width: The dimension of a feature.
        device: The device of the network.
    """

    module: nn.Module
    path: Path
    sha256: str
    width: int
    device: torch.device

    @property
    def name(self) -> str:
        """The name in results: only "inception-2015-12-05" compares with published FIDs."""
        return "inception-2015-12-05" if isinstance(self.module, Inception) else "TorchScript"


def locate(path: Path | None = None) -> Path:
    """Find the file of Inception's weights.

    Args:
        path: The file; None: the first that exists in $M2S_DATA/inception and in torch's hub cache.

    Returns:
        The file.

    Raises:
        BadData: There is no such file. The message says how to get it.
    """
    if path is not None:
        if not path.expanduser().is_file():
            raise BadData(f"{path} is no file: give Inception's weights, {STATE} or {SCRIPT}")
        return path.expanduser()
    folder, cache = root() / "inception", Path(torch.hub.get_dir()) / "checkpoints"
    for candidate in (folder / SCRIPT, folder / STATE, cache / STATE):
        if candidate.is_file():
            return candidate
    raise BadData(
        f"Inception's weights are neither in {folder} ({SCRIPT} or {STATE}) nor in {cache} ({STATE}). Online: curl -L "
        f"--create-dirs -o {folder / STATE} {ADDRESS} . Offline: copy either file there from another machine, or give its path "
        "with --inception"
    )


def load(path: Path | None = None, device: str | torch.device = "cpu") -> Network:
    """Load the feature network.

    Args:
        path: The file of weights, as in `locate`.
        device: The device.

    Returns:
        The network in eval mode.

    Raises:
        BadData: The file is missing, damaged, holds another network, or is a TorchScript of unknown origin.
    """
    place, file = torch.device(device), locate(path)
    digest = sha256(file)
    named = re.search(r"-([0-9a-f]{8,64})\.pth$", file.name)  # torch's hub writes the first digits of the SHA-256 into the name
    if named and not digest.startswith(named[1]):
        raise BadData(f"{file} has SHA-256 {digest}, but its name says {named[1]}...: get it again from {ADDRESS}")
    module = _read(file, digest).eval().to(place)
    if isinstance(module, Inception) and place.type == "cpu":
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 1.6 times as fast there
    try:
        with torch.inference_mode():
            given = module(torch.zeros(2, 3, SIZE, SIZE, device=place))
        if not isinstance(given, Tensor) or given.ndim != 2 or len(given) != 2 or not given.dtype.is_floating_point:
            raise TypeError(f"it gave {list(given.shape) if isinstance(given, Tensor) else type(given).__name__}")
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[-200:]
        raise BadData(f"{file} does not map images (2, 3, {SIZE}, {SIZE}) to features (2, width): {reason}") from error
    return Network(module, file, digest, given.shape[1], place)


def _read(file: Path, digest: str) -> nn.Module:
    """Read a state dict, or a TorchScript of a known SHA-256. Of a TorchScript of Inception only the weights are used."""
    if digest not in KNOWN_SCRIPTS:
        return _from_state(file, digest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.load(str(file), map_location="cpu")
    weights = {name.rpartition("layers.")[2]: value for name, value in script.state_dict().items() if "layers." in name}
    return script if "mixed_10.conv.weight" not in weights else _filled(file, _in_order(weights))


def _from_state(file: Path, digest: str) -> Inception:
    """Read a state dict."""
    if _is_script(file):
        raise BadData(
            f"{file} is a TorchScript, whose code would run, and its SHA-256 {digest} is not that of {SCRIPT}: get {ADDRESS}"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is no archive, a damaged one, one that holds code
        raise BadData(f"{file} is neither {SCRIPT} nor a state dict of tensors alone: get {ADDRESS}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        kind = "more than tensors" if isinstance(state, dict) else type(state).__name__
        raise BadData(f"{file} holds {kind}, expected a state dict: get {ADDRESS}")
    return _filled(file, {name: value for name, value in state.items() if not str(name).startswith("fc.")})


def _is_script(file: Path) -> bool:
    """Whether a file is an archive with TorchScript code."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any("/code/" in name or name.endswith("constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def _in_order(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the TorchScript's tensors. They are in the order of our convolutions; no batch normalization has a scale."""
    tensors, state = iter(weights.items()), {}
    for name in (name for name, module in _blank().named_modules() if isinstance(module, _Convolution)):
        found = {key.rpartition(".")[2]: value for key, value in itertools.islice(tensors, 4)}
        for ours, theirs in TENSOR_NAMES.items():
            if theirs in found:
                state[f"{name}.{ours}"] = found[theirs]
        state[f"{name}.bn.weight"] = torch.ones_like(found.get("beta", torch.empty(0)))
    return state


TENSOR_NAMES = {"conv.weight": "weight", "bn.bias": "beta", "bn.running_mean": "mean", "bn.running_var": "var"}


def _blank() -> Inception:
    """Make the network without memory for its weights."""
    with torch.device("meta"):
        return Inception()


def _filled(file: Path, state: dict[str, Tensor]) -> Inception:
    """Make the network with these weights, or raise BadData if they do not fit."""
    network = _blank()
    expected = {name: value for name, value in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    wrong = [name for name in expected if name not in state or state[name].shape != expected[name].shape]
    if wrong:
        raise BadData(
            f"{file} does not hold FID's Inception: {wrong[0]} is missing or of another shape, and so are {len(wrong) - 1} "
            f"more: get {ADDRESS}"
        )
    counts = {name: torch.tensor(0) for name in network.state_dict() if name not in expected}
    network.load_state_dict({name: state[name].float() for name in expected} | counts, assign=True)
    return network


def pictures(tokens: Integer[Tensor, "n L"], shape: tuple[int, ...], levels: int) -> Float[Tensor, "n 3 299 299"]:
    """Preprocess images for the network.

    Args:
        tokens: Levels in 0..levels-1, [n, L].
        shape: (height, width), or (height, width, channels) with one or three channels.
        levels: The number of levels.

    Returns:
        Images in [-1, 1], [n, 3, 299, 299]. Gray images are repeated.
    """
    height, width, channels = shape if len(shape) == 3 else (*shape, 1)
    planes = (tokens.float() / (levels - 1)).reshape(-1, height, width, channels).permute(0, 3, 1, 2)
    resized = F.interpolate(planes, (SIZE, SIZE), mode="bilinear", align_corners=False)
    return 2 * resized.expand(-1, 3, -1, -1) - 1


def features(
    network: Network, tokens: Integer[Tensor, "n L"], shape: tuple[int, ...], levels: int, batch_size: int
) -> Iterator[Tensor]:
    """Compute the features of images, batch by batch. Everything is float32: no TF32, no autocast.

    Args:
        network: The network.
        tokens: Levels in 0..levels-1, [n, L].
        shape: (height, width), or (height, width, channels).
        levels: The number of levels.
        batch_size: Images per call of the network.

    Yields:
        Features on the CPU, [batch, D].
    """
    for batch in tokens.split(batch_size):
        with (
            torch.inference_mode(),
            torch.autocast(network.device.type, enabled=False),
            torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False),
        ):
            yield network.module(pictures(batch.to(network.device), shape, levels)).float().cpu()
