"""Named configurations for `m2s train PRESET`. A preset is one file here and one line in each table below."""

from m2s.presets.cifar10 import CIFAR10
from m2s.presets.digits import DIGITS
from m2s.presets.mnist import MNIST
from m2s.presets.mnist_small import MNIST_SMALL
from m2s.presets.owt import OWT
from m2s.presets.owt_fast import OWT_FAST
from m2s.presets.text8 import TEXT8
from m2s.training.config import Config

PRESETS: dict[str, Config] = {
    "digits": DIGITS,
    "mnist": MNIST,
    "mnist-small": MNIST_SMALL,
    "cifar10": CIFAR10,
    "text8": TEXT8,
    "owt": OWT,
    "owt-fast": OWT_FAST,
}
SUMMARIES: dict[str, str] = {
    "digits": "8 x 8 digits, shipped with the package: under two minutes on two cores",
    "mnist": "the paper's MNIST run except for head (--method m2s) and schedule (linear): width-64 U-Net, 50 epochs",
    "mnist-small": "MNIST with a U-Net of 0.8 million parameters: minutes on a GPU",
    "cifar10": "the paper's CIFAR-10 run (its head: --method m2s): MD4's U-Net, 125,000 steps of 4096",
    "text8": "characters of text8: DiT-small, length 256",
    "owt": "the paper's OpenWebText run (its head: --method m2s): DiT-small, GPT-2's tokens, length 512",
    "owt-fast": "the network and data of owt with Muon: learns from context after a few million tokens, 16,000 steps of 64",
}

__all__ = ["PRESETS", "SUMMARIES"]
