"""DUO (Sahoo et al. 2025): the estimator of UDLM, without a reconstruction term."""

from m2s.evaluation.likelihood.base import Estimator, lacks_ends
from m2s.evaluation.likelihood.udlm import LOW, needs_uniform, uniform_mean

DUO = Estimator(
    title="mean of UDLM's diffusion loss over t in [1e-3, 1)",
    source="Sahoo et al. 2025, released code",
    build=uniform_mean,
    missing=lacks_ends(LOW, 1.0),
    unsupported=needs_uniform,
)
