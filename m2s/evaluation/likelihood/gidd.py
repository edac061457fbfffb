"""GIDD (von Rutte et al. 2025): its ELBO, averaged over t in [1e-4, 1 - 1e-4)."""

from m2s.evaluation.likelihood.base import Estimator, Options, Term, lacks_ends
from m2s.evaluation.likelihood.levels import Times
from m2s.heads import Head
from m2s.losses.gidd import gidd

LOW = 1e-4  # t_eps


def _terms(head: Head, options: Options) -> list[Term]:
    """The mean over times in place of the integral, and no other term."""
    return [Term("integral", Times(LOW, 1 - LOW, factor=1.0), gidd)]


def _unsupported(head: Head) -> str:
    """It needs a rank-one process and a posterior."""
    if head.process.rank_one is None:
        return "it needs uniform, masking or hybrid noise"
    return "" if head.has_posterior else "it needs a head with a posterior"


GIDD = Estimator(
    title="mean of GIDD's ELBO over t in [1e-4, 1 - 1e-4)",
    source="von Rutte et al. 2025",
    build=_terms,
    missing=lacks_ends(LOW, 1 - LOW),
    unsupported=_unsupported,
)
