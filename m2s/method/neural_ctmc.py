"""Neural CTMC: when to leave and where to go, predicted apart."""

from m2s.method.base import Method

NEURAL_CTMC = Method(
    "neural-ctmc",
    "Neural CTMC, exit rate and jump law",
    {"head.kind": "factorized-rate", "head.loss": "score-entropy", "process.kind": "uniform", "process.schedule": "linear"},
    r"""The network gives the logarithm of the total rate $\lambda$ at which the reverse process leaves $k$, in units of the
forward rates into $k$, and the logits of the law $\pi$ by which it jumps. With $\lambda^*$, $\pi^*$ those of the
process that ends in $x_0$, the divergence of the two paths is

$$\lambda - \lambda^* + \lambda^*\log\frac{\lambda^*}{\lambda} + \lambda^*\,\mathrm{KL}(\pi^*\,\|\,\pi),$$

which is score entropy in other coordinates (`--head.loss path-kl` computes it as written). No code of the authors is
public: the coordinates, and the entry of the output that holds $\log\lambda$ (that of the current token), are ours.""",
    r"""@misc{li2026neuralctmc,
  title = {Neural {CTMC}},
  note  = {As cited in Mean-to-Score Discrete Diffusion; no public code},
}""",
    "tau_leaping",
)
