"""MDLM (Sahoo et al. 2024) as its released code evaluates in continuous time: masked cross entropy, t in [1e-3, 1)."""

from m2s.evaluation.likelihood.base import Estimator, Options, Term, lacks_ends, needs_masks
from m2s.evaluation.likelihood.levels import Times
from m2s.heads import Head
from m2s.losses.masked_cross_entropy import masked_cross_entropy

LOW = 1e-3  # sampling_eps


def _terms(head: Head, options: Options) -> list[Term]:
    """The mean over times in place of the integral, and no other term."""
    return [Term("integral", Times(LOW, 1.0, factor=1.0), masked_cross_entropy)]


MDLM = Estimator(
    title="mean masked cross entropy over t in [1e-3, 1)",
    source="Sahoo et al. 2024, released code, T = 0",
    build=_terms,
    missing=lacks_ends(LOW, 1.0),
    unsupported=needs_masks,
)
