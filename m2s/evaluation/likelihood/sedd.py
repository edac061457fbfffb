"""SEDD (Lou et al. 2024) as its released code evaluates: the mean score entropy over t in [1e-3, 1)."""

from m2s.evaluation.likelihood.base import Estimator, Options, Term, lacks_ends, needs_rates
from m2s.evaluation.likelihood.levels import Times
from m2s.heads import Head
from m2s.losses.score_entropy import score_entropy

LOW = 1e-3  # sampling_eps


def _terms(head: Head, options: Options) -> list[Term]:
    """The mean over times in place of the integral, and no other term."""
    return [Term("integral", Times(LOW, 1.0, factor=1.0), score_entropy)]


SEDD = Estimator(
    title="mean score entropy over t in [1e-3, 1)",
    source="Lou et al. 2024, released code",
    build=_terms,
    missing=lacks_ends(LOW, 1.0),
    unsupported=needs_rates,
    note="sigma at t = 1e-3 stands for a clean sequence",
)
