"""UDLM (Schiff et al. 2025) as its released code evaluates: the mean over t in [1e-3, 1), reconstruction set to 0."""

from m2s.evaluation.likelihood.base import Estimator, Options, Term, lacks_ends
from m2s.evaluation.likelihood.levels import Times
from m2s.heads import Head
from m2s.losses.udlm import udlm
from m2s.process import Uniform

LOW = 1e-3  # sampling_eps


def uniform_mean(head: Head, options: Options) -> list[Term]:
    """Return the mean over times in place of the integral, and no other term.

    Args:
        head: The head.
        options: The options.
    """
    return [Term("integral", Times(LOW, 1.0, factor=1.0), udlm)]


def needs_uniform(head: Head) -> str:
    """Return why an estimator for uniform noise does not support a head.

    Args:
        head: The head.
    """
    if not isinstance(head.process, Uniform):
        return "it needs uniform noise"
    return "" if head.has_posterior else "it needs a head with a posterior"


UDLM = Estimator(
    title="mean of UDLM's diffusion loss over t in [1e-3, 1)",
    source="Schiff et al. 2025, released code, zero_recon_loss",
    build=uniform_mean,
    missing=lacks_ends(LOW, 1.0),
    unsupported=needs_uniform,
    note="released code has alpha = 1 - t in the loss and 1 - 0.999 t in the noise; both are those of the process here",
)
