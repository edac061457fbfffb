"""Neural CTMC: the exit rate and the jump distribution, predicted separately."""

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

NEURAL_CTMC = Method(
    name="neural-ctmc",
    title="Neural CTMC, exit rate and jump distribution",
    process=ProcessConfig(kind="uniform", schedule="linear"),
    head=HeadConfig(kind="factorized-rate", loss="score-entropy"),
    sampler="euler",
    text=r"""The network gives two things: the logarithm of the total rate $\lambda$ at which the reverse process leaves $k$,
and the logits of the jump distribution $\pi$. The unit of $\lambda$ is the forward rate into $k$. With $\lambda^*$, $\pi^*$
those of the process that ends in $x_0$, the divergence of the two paths is

$$\lambda - \lambda^* + \lambda^*\log\frac{\lambda^*}{\lambda} + \lambda^*\,\mathrm{KL}(\pi^*\,\|\,\pi).$$

It is a Poisson divergence of the jump time plus a categorical divergence of the target. It is score entropy in other
coordinates (`--head.loss path-kl` computes it as written).

We know the authors' abstract and objective, not their code. Two choices are ours: $\log\lambda$ is the entry of the current
token in one output, where they have two layers, and the sampler. `euler` leaves with probability $\lambda\,(t-s)$ and jumps by
$\pi$. Under uniform noise with $\alpha_t = 1-t$ a token that is certainly wrong has $\lambda = \frac1t + \frac{1-1/K}{1-t}$.
This is nearly $1/t$ at the end, so the last step corrects what is left. `--sampler tau_leaping` changes a position on exactly
one jump, with probability $E e^{-E}$, and misses nearly two thirds of these tokens.""",
    bibtex=r"""@misc{li2026neuralctmc,
  title         = {Neural Continuous-Time {M}arkov Chain: Discrete Diffusion via Decoupled Jump Timing and Direction},
  author        = {Li, Jingyuan and Jiang, Xiaoyi and Wen, Fukang and Liu, Wei and Luo, Renqian and Zhu, Yi and Shi, Zuoqiang
                   and Hu, Pipi},
  year          = {2026},
  eprint        = {2604.15694},
  archivePrefix = {arXiv},
}""",
)
