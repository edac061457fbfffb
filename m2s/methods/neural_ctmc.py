"""Neural CTMC: when to leave and where to go, predicted apart."""

from m2s.methods.base import Method

NEURAL_CTMC = Method(
    "neural-ctmc",
    "Neural CTMC, exit rate and jump law",
    {"head.kind": "factorized-rate", "head.loss": "score-entropy", "process.kind": "uniform", "process.schedule": "linear"},
    r"""The network gives the logarithm of the total rate $\lambda$ at which the reverse process leaves $k$, in units of the
forward rates into $k$, and the logits of the law $\pi$ by which it jumps. With $\lambda^*$, $\pi^*$ those of the
process that ends in $x_0$, the divergence of the two paths is

$$\lambda - \lambda^* + \lambda^*\log\frac{\lambda^*}{\lambda} + \lambda^*\,\mathrm{KL}(\pi^*\,\|\,\pi),$$

a Poisson divergence of when and a categorical one of where. It is score entropy in other coordinates (`--head.loss path-kl`
computes it as written). We know the authors' abstract and objective, not their code: that $\log\lambda$ stands in the current
token's entry of one output, where they have two layers, is ours, and so is the sampler. `euler` leaves with probability
$\lambda\,(t-s)$ and jumps by $\pi$. Under uniform noise with $\alpha_t = 1-t$ a token that is certainly wrong has $\lambda =
\frac1t + \frac{1-1/K}{1-t}$, nearly $1/t$ at the end, so that the last step sets right what is left; `--sampler tau_leaping`
moves a site on exactly one jump, with probability $E e^{-E}$, and leaves nearly two thirds of it.""",
    r"""@misc{li2026neuralctmc,
  title         = {Neural Continuous-Time {M}arkov Chain: Discrete Diffusion via Decoupled Jump Timing and Direction},
  author        = {Li, Jingyuan and Jiang, Xiaoyi and Wen, Fukang and Liu, Wei and Luo, Renqian and Zhu, Yi and Shi, Zuoqiang
                   and Hu, Pipi},
  year          = {2026},
  eprint        = {2604.15694},
  archivePrefix = {arXiv},
}""",
    "euler",
)
