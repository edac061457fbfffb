"""Sizes and device of a benchmark, and what the machine cannot run."""

import importlib.util
import os
import shutil
from dataclasses import dataclass

import torch

ROWS, VOCAB, WIDTH, DEPTH = 16_384, 50_257, 768, 12  # sizes of the bars: 32 x 512 sites, GPT-2's tokens, DiT-small
LENGTH, METHOD = 512, "m2s"
COMPILERS = ("g++", "c++", "clang++")
PEERS = {"liger": ("liger_kernel", "liger-kernel"), "cce": ("cut_cross_entropy", "cut-cross-entropy")}


@dataclass(frozen=True)
class Setting:
    """Sizes and device of a benchmark.

    Args:
        device: The device.
        rows: Sites: batch times length.
        vocab: Number of tokens.
        width: Width of hidden states.
        repeats: Timed calls of each contender.
        depth: Layers of the network.
        against: Tokens per second of another implementation's training step, measured elsewhere.
        against_step: Milliseconds of another implementation's sampler step, measured elsewhere.
        method: The method that is trained.
        seed: Seed of the inputs.
        quick: A rehearsal: on a CPU nothing is compiled, since that takes minutes.
    """

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
    quick: bool = False

    @classmethod
    def of(cls, device: torch.device, quick: bool, **given: int | float | str | None) -> "Setting":
        """Return a setting with default sizes for a device.

        Args:
            device: The device. On a GPU the default sizes are those of the bars.
            quick: Use small sizes and few repeats.
            **given: Fields to set; None takes the default.
        """
        sizes: dict[str, int]
        if device.type == "cuda":
            sizes = {"rows": 2048, "repeats": 5, "depth": 2} if quick else {"rows": ROWS, "repeats": 50, "depth": DEPTH}
            sizes |= {"vocab": VOCAB, "width": WIDTH}
        elif quick:
            sizes = {"rows": 64, "vocab": 1024, "width": 32, "repeats": 3, "depth": 1}
        else:
            sizes = {"rows": 512, "vocab": 8192, "width": 128, "repeats": 9, "depth": 2}
        return cls(device, quick=quick, **{**sizes, **{name: value for name, value in given.items() if value is not None}})  # type: ignore[arg-type]

    @property
    def columns(self) -> int:
        """Rows of the last layer's weight: tokens and a mask, padded to a multiple of 64 (50,257 -> 50,304)."""
        return -(-(self.vocab + 1) // 64) * 64

    @property
    def length(self) -> int:
        """Sites of a sequence: 512, or an eighth of the rows where these are fewer than 4,096."""
        return min(LENGTH, self.rows // 8)

    @property
    def batch(self) -> int:
        """Sequences of a batch."""
        return self.rows // self.length

    @property
    def heads(self) -> int:
        """Attention heads of the network, of width 64."""
        return max(1, self.width // 64)

    @property
    def operands(self) -> torch.dtype:
        """Dtype of the operands of matrix products: bf16 on a GPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def arithmetic(self) -> str:
        """The dtype of the operands in words."""
        return f"operands in {str(self.operands).removeprefix('torch.')}"

    @property
    def full(self) -> bool:
        """Whether the bars of a GPU can be judged: the device is a GPU, and the sizes are those of the bars."""
        sizes = (self.rows, self.vocab, self.width, self.depth, self.method)
        return self.device.type == "cuda" and sizes == (ROWS, VOCAB, WIDTH, DEPTH, METHOD)

    def is_cpu_of(self, rows: int, vocab: int) -> bool:
        """Return whether the device is a CPU and these are the sizes, so that a bar of a CPU can be judged.

        Args:
            rows: Sites of the bar.
            vocab: Number of tokens of the bar.
        """
        return self.device.type == "cpu" and (self.rows, self.vocab) == (rows, vocab)

    def why_unavailable(self, needs: str) -> str | None:
        """Return why this machine cannot run something.

        Args:
            needs: "fused" or "compiled" (forms of an operation), "liger" or "cce" (other packages).

        Returns:
            The reason in words; None where it can run.
        """
        gpu = self.device.type == "cuda"
        triton = importlib.util.find_spec("triton") is not None
        if needs == "fused":
            if not triton:
                return "triton is not installed"
            return None if gpu or os.environ.get("TRITON_INTERPRET") == "1" else f"needs a GPU, and this is {self.device}"
        if needs == "compiled":
            if gpu:
                return None if triton else "triton is not installed"
            found = os.environ.get("CXX") or any(map(shutil.which, COMPILERS))
            if not found:
                return "there is no C++ compiler"
            return "compiling takes longer than a rehearsal: leave out --quick" if self.quick else None
        module, package = PEERS[needs]
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
        return None if gpu else f"needs a GPU, and this is {self.device}"
