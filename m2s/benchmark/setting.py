"""What is measured, on what, and what this machine lacks."""

import importlib.util
import os
import shutil
from dataclasses import dataclass

import torch

ROWS, VOCAB, WIDTH = 16_384, 50_257, 768  # of the bars: 32 x 512 sites, GPT-2's tokens, DiT-small
LENGTH, METHOD = 512, "m2s"
COMPILERS = ("g++", "c++", "clang++")
PEERS = {"liger": ("liger_kernel", "liger-kernel"), "cce": ("cut_cross_entropy", "cut-cross-entropy")}


@dataclass(frozen=True)
class Setting:
    """The sizes of a run. `against` and `against_step` are another implementation's tokens a second of training and
    milliseconds of a sampler's step, measured elsewhere; `method` is what is trained."""

    device: torch.device
    rows: int
    vocab: int
    width: int
    repeats: int
    depth: int
    against: float | None = None
    against_step: float | None = None
    method: str = METHOD
    seed: int = 0

    @classmethod
    def of(cls, device: torch.device, quick: bool, **given: int | float | str | None) -> "Setting":
        """What is given, and for what is None a size that fits the device: on a GPU those of the bars."""
        sizes: dict[str, int]
        if device.type == "cuda":
            sizes = {"rows": 2048, "repeats": 5, "depth": 2} if quick else {"rows": ROWS, "repeats": 50, "depth": 12}
            sizes |= {"vocab": VOCAB, "width": WIDTH}
        elif quick:
            sizes = {"rows": 64, "vocab": 1024, "width": 32, "repeats": 3, "depth": 1}
        else:
            sizes = {"rows": 512, "vocab": 8192, "width": 128, "repeats": 9, "depth": 2}
        return cls(device, **{**sizes, **{name: value for name, value in given.items() if value is not None}})  # type: ignore[arg-type]

    @property
    def columns(self) -> int:
        """Rows of the last layer: tokens and a mask, padded to a multiple of 64 (50,257 -> 50,304)."""
        return -(-(self.vocab + 1) // 64) * 64

    @property
    def length(self) -> int:
        """Sites of a sequence: 512, or an eighth of fewer rows."""
        return min(LENGTH, self.rows // 8)

    @property
    def batch(self) -> int:
        return self.rows // self.length

    @property
    def heads(self) -> int:
        return max(1, self.width // 64)

    @property
    def operands(self) -> torch.dtype:
        """Of matrix products: bf16 on a GPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def arithmetic(self) -> str:
        """The same in words."""
        return f"operands in {str(self.operands).removeprefix('torch.')}"

    @property
    def full(self) -> bool:
        """Whether the bars can be judged here: a GPU, and their sizes."""
        sizes = (self.rows, self.vocab, self.width, self.depth, self.method)
        return self.device.type == "cuda" and sizes == (ROWS, VOCAB, WIDTH, 12, METHOD)

    def lacks(self, what: str) -> str | None:
        """Why this machine cannot run "fused" or "compiled" forms, "liger" or "cce"; None where it can."""
        gpu = self.device.type == "cuda"
        triton = importlib.util.find_spec("triton") is not None
        if what == "fused":
            if not triton:
                return "triton is not installed"
            return None if gpu or os.environ.get("TRITON_INTERPRET") == "1" else f"needs a GPU, and this is {self.device}"
        if what == "compiled":
            if gpu:
                return None if triton else "triton is not installed"
            found = os.environ.get("CXX") or any(map(shutil.which, COMPILERS))
            return None if found else "there is no C++ compiler"
        module, package = PEERS[what]
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
        return None if gpu else f"needs a GPU, and this is {self.device}"
