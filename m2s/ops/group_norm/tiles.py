"""Which features the kernels of the group norm can hold, and in which tiles."""

from typing import NamedTuple

from torch import Tensor

# Elements of an image that a program holds in registers: all positions of some groups. The backward pass holds x and dy.
FORWARD, BACKWARD, LARGEST = 1 << 14, 1 << 13, 1 << 15
ELEMENTS_PER_WARP = 512  # 16 elements in the registers of a thread
CHANNELS = 32  # of a program, at most: 64 bytes of bf16, two sectors of memory


class Tile(NamedTuple):
    """The part of an image on which a program works.

    Args:
        groups: Groups of channels, a power of two.
        width: Channels of a group, rounded up to a power of two.
        rows: Positions, rounded up to a power of two.
    """

    groups: int
    width: int
    rows: int


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`.

    Args:
        number: A positive integer.
    """
    return 1 << (number - 1).bit_length()


def tile_of(x: Tensor, groups: int, elements: int) -> Tile:
    """Return the tile for some features.

    Args:
        x: Features [B, C, H, W].
        groups: Groups of channels.
        elements: Elements that a program should hold: `FORWARD` or `BACKWARD`.

    Returns:
        The tile: one group, or as many as fit into the elements and into `CHANNELS` channels.
    """
    rows, width = power_of_2(x.shape[2] * x.shape[3]), power_of_2(x.shape[1] // groups)
    fitting = max(1, min(elements // rows, CHANNELS) // width)
    return Tile(min(fitting, power_of_2(groups)), width, rows)


def fits(x: Tensor, groups: int) -> bool:
    """Return whether a program can hold all positions of one group.

    Args:
        x: Features [B, C, H, W].
        groups: Groups of channels.
    """
    rows, width = power_of_2(max(1, x.shape[2] * x.shape[3])), power_of_2(x.shape[1] // groups)
    return x.numel() > 0 and rows * width <= LARGEST


def warps_of(elements: int) -> int:
    """Return the warps of a program that holds a tile.

    Args:
        elements: Elements of the tile.
    """
    return min(16, max(1, elements // ELEMENTS_PER_WARP))
