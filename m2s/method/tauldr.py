"""tauLDR (Campbell et al.): rates between levels that lie near each other, and the ELBO in continuous time."""

from m2s.method.base import Method
from m2s.method.m2s import BIBTEX as M2S_BIBTEX
from m2s.method.m2s import SETTINGS as M2S_SETTINGS

BIBTEX = r"""@inproceedings{campbell2022ctmc,
  title     = {A Continuous Time Framework for Discrete Denoising Models},
  author    = {Campbell, Andrew and Benton, Joe and De Bortoli, Valentin and Rainforth, Tom and Deligiannidis, George
               and Doucet, Arnaud},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022},
}"""
SETTINGS = {"head.kind": "posterior", "head.offset": "none", "head.loss": "ct-elbo"}

GAUSSIAN = Method(
    "tauldr",
    "tauLDR, Gaussian rates",
    {**SETTINGS, "process.kind": "gaussian", "process.schedule": "geometric"},
    r"""For levels that have an order. A level $i$ becomes $j$ at the rate $Q(i\to j) = e^{-(|i-j|-1)^2/w^2}\,\min(1,
\pi_j/\pi_i)$, $\pi$ a Gaussian about the middle, and $P_t = e^{\sigma_t Q}$ is tabulated. `--process.jump-width` is $w$
(by default 6 of 256 levels, and in proportion of others) and `--process.stationary-width` the width of $\pi$ (512 of 256).
$Q$ is divided by its slowest rate of relaxation, so that $\sigma_t$ means what it does for uniform noise: $e^{-\sigma_t}$
is what is left of the memory that fades last. The authors' $\sigma_t = a\,(b^t - 1)$ is, in these units and at their $a =
3$, $b = 100$, from 0 to 6.2; `geometric` is the nearest of our schedules.

The network gives $p_\theta(x_0\mid x_t) = \mu$, and with it the rate of the reverse process,

$$R_\theta(k\to y) = Q_t(y\to k)\sum_z \mu_z\,\frac{P_t(y\mid z)}{P_t(k\mid z)}, \qquad k = x_t.$$

The bound of the authors is $\int E\big[\sum_y R_\theta(x\to y) - \sum_y Q_t(x\to y)\log R_\theta(y\to x)\big]\,dt$ over $x\sim
P_t(\cdot\mid x_0)$, and a constant. Its second sum runs over forward jumps out of $x$, and needs the network at every $y$.
The same number is $E\big[\sum_y R^*(x\to y)\log R_\theta(x\to y)\big]$, $R^*(k\to y) = Q_t(y\to k)\,P_t(y\mid x_0)/P_t(k\mid
x_0)$, which needs it at $x$ alone. With the constant $\sum_y R^*\log R^* - R^*$ the loss is

$$\sum_{y\neq k} R_\theta - R^* + R^*\log\frac{R^*}{R_\theta},$$

which is score entropy (`tests/test_tauldr.py`).

Samples are drawn by tau-leaping: a Poisson number of jumps, of mean $E = (t-s)\sum_y R_\theta(k\to y)$. As the authors have
it for images the displacements of several jumps add up (`--sampler ordinal_tau_leaping`). Tokens without an order cannot,
and `--sampler tau_leaping` moves a site only where there is exactly one jump, with probability $E e^{-E}$: with these
rates, high between levels that are near, that is next to nothing until the steps are so many that $E$ is below one. Both
are of order one in the step (`tests/test_tauldr_leaps.py`). `--sampler forward_backward` adds the authors' corrector: after
each step to $s \le 0.1$ ten leaps, each of 0.003 units of time, at the rates $Q_s(k\to y) + R_\theta(k\to y)$, which leave
$p_s$ as it is; its last step is a draw from $\mu$, where theirs is its likeliest token.
`m2s.sampler.PredictorCorrector(predictor=m2s.sampler.TauLeaping())` draws sites anew given all others instead. The authors'
logistic output layer is not part of this.""",
    BIBTEX,
    "ordinal_tau_leaping",
)
ABSORBING = Method(
    "tauldr-absorb",
    "tauLDR on masks",
    {**SETTINGS, "process.kind": "absorbing", "process.schedule": "log-linear"},
    r"""`tauldr` with a mask for noise: $Q(y\to\text{mask}) = 1$. At a masked site the sum of $R_\theta$ does not depend on the
network, and the loss is $\frac{-\alpha_t'}{1-\alpha_t}(-\log\mu_{x_0})$, that of `md4`.""",
    BIBTEX,
    "tau_leaping",
)
M2S = Method(
    "m2s-gaussian",
    "M2S on Gaussian rates",
    {**M2S_SETTINGS, "process.kind": "gaussian", "head.offset": "exact"},
    r"""M2S where levels become levels near them: the process of `tauldr`, and the bridge of any known chain, $s_y = \sum_z
\mu_z\,P_t(y\mid z)/P_t(k\mid z)$. The loss is that of `tauldr` in other words; what differs is the
network's part, and the schedule, which is linear ($e^{-\sigma_t} = 1-t$). Here the network gives the law $\nu$ that has not
seen the site's own token, and $\log\mu_z = \log\nu_z + \log P_t(k\mid z) + \text{const}$ adds what the token says: of every
level near it, not of itself alone.""",
    M2S_BIBTEX,
)
