"""tauLDR (Campbell et al.): rates between levels that lie near each other, and the ELBO in continuous time."""

from m2s.methods.base import Method
from m2s.methods.m2s import BIBTEX as M2S_BIBTEX
from m2s.methods.m2s import SETTINGS as M2S_SETTINGS

BIBTEX = r"""@inproceedings{campbell2022ctmc,
  title     = {A Continuous Time Framework for Discrete Denoising Models},
  author    = {Campbell, Andrew and Benton, Joe and De Bortoli, Valentin and Rainforth, Tom and Deligiannidis, George
               and Doucet, Arnaud},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022},
}"""
SETTINGS = {"head.kind": "posterior", "head.offset": "exact", "head.loss": "ct-elbo"}

GAUSSIAN = Method(
    "tauldr",
    "tauLDR, Gaussian rates",
    {**SETTINGS, "process.kind": "gaussian", "process.schedule": "geometric-rate"},
    r"""For levels that have an order. A level $i$ becomes $j$ at the rate $Q(i\to j) = e^{-(|i-j|-1)^2/w^2}\,\min(1,
\pi_j/\pi_i)$, $\pi$ a Gaussian about the middle, and $P_t = e^{\sigma_t Q}$ is tabulated. `--process.jump-width` is $w$
(by default 6 of 256 levels, and in proportion of others) and `--process.stationary-width` the width of $\pi$ (512 of 256).
$Q$ is divided by its slowest rate of relaxation, so that $\sigma_t$ means what it does for uniform noise: $e^{-\sigma_t}$
is what is left of the memory that fades last. The schedule is the authors', $\sigma_t = a\,(b^t - 1)$ with $b = 100$
(`--process.schedule geometric-rate`, `--process.base`). It ends at $\sigma_1 = 7$; their $a = 3$ is, in these units,
`--process.sigma-max 6.2`.

The network gives $p_\theta(x_0\mid x_t) = \mu$, and with it the rate of the reverse process,

$$R_\theta(k\to y) = Q_t(y\to k)\sum_z \mu_z\,\frac{P_t(y\mid z)}{P_t(k\mid z)}, \qquad k = x_t.$$

The bound of the authors is $\int E\big[\sum_y R_\theta(x\to y) - \sum_y Q_t(x\to y)\log R_\theta(y\to x)\big]\,dt$ over $x\sim
P_t(\cdot\mid x_0)$, and a constant. Its second sum runs over forward jumps out of $x$, and needs the network at every $y$.
The same number is $E\big[\sum_y R^*(x\to y)\log R_\theta(x\to y)\big]$, $R^*(k\to y) = Q_t(y\to k)\,P_t(y\mid x_0)/P_t(k\mid
x_0)$, which needs it at $x$ alone. With the constant $\sum_y R^*\log R^* - R^*$ the loss is

$$\sum_{y\neq k} R_\theta - R^* + R^*\log\frac{R^*}{R_\theta},$$

which is score entropy (`tests/losses/test_tauldr.py`).

A level far from $k$ has next to no chance of having become $k$, down to $10^{-300}$, and where the network gives it any
probability the ratio above is as large. The authors divide by $P_t(k\mid z) + 10^{-9}$ and let the network give a logistic law
about $x_t$. Here it gives the law $\nu$ that has not seen the token, and $\mu_z \propto \nu_z\,P_t(k\mid z)$
(`--head.offset exact`): every $\mu$ is some $\nu$'s, and no ratio can run away. With `--head.offset none` the 256 levels of
MNIST did not train: 13.9 bits a pixel after 750 updates, then infinity (`experiments/results/mnist-tauldr-no-offset.json`).

Samples are drawn by tau-leaping: a Poisson number of jumps, of mean $E = (t-s)\sum_y R_\theta(k\to y)$. As the authors have
it for images the displacements of several jumps add up (`--sampler ordinal_tau_leaping`). Tokens without an order cannot,
and `--sampler tau_leaping` moves a site only where there is exactly one jump, with probability $E e^{-E}$: with these
rates, high between levels that are near, that is next to nothing until the steps are so many that $E$ is below one. Both
are of order one in the step (`tests/samplers/test_tau_leaping.py`). `--sampler forward_backward` adds the authors' corrector: after
each step to $s \le 0.1$ (`--entry`) ten leaps (`--corrections`), each of 0.003 units of time (`--leap`), at the rates
$Q_s(k\to y) + R_\theta(k\to y)$, which leave $p_s$ as it is. The last step of each sampler is a draw from $\mu$; the authors
take the most likely token there. `m2s.samplers.PredictorCorrector(predictor=m2s.samplers.TauLeaping())` draws sites anew given
all others instead. Not part of this are the authors' logistic output layer, which `--head.kind ordinal` comes near, and 0.001
times the cross entropy of $\mu$ that they add in training.""",
    BIBTEX,
    "ordinal_tau_leaping",
)
ABSORBING = Method(
    "tauldr-absorb",
    "tauLDR on masks",
    {**SETTINGS, "process.kind": "absorbing", "process.schedule": "log-linear"},
    r"""`tauldr` with a mask for noise: $Q(y\to\text{mask}) = 1$. At a masked site the sum of $R_\theta$ does not depend on the
network, and the loss is $\frac{-\alpha_t'}{1-\alpha_t}(-\log\mu_{x_0})$, that of `md4`. The corrector is
`--sampler forward_backward` here too; jumps do not add up.""",
    BIBTEX,
    "tau_leaping",
)
M2S = Method(
    "m2s-gaussian",
    "M2S on Gaussian rates",
    {**M2S_SETTINGS, "process.kind": "gaussian", "process.schedule": "geometric", "head.offset": "exact"},
    r"""M2S where levels become levels near them: the process of `tauldr`, and the bridge of any known chain, $s_y = \sum_z
\mu_z\,P_t(y\mid z)/P_t(k\mid z)$. The loss is that of `tauldr` in other words, and the network's
part is the same: the law $\nu$ that has not seen the site's own token, to which $\log\mu_z = \log\nu_z + \log P_t(k\mid z) +
\text{const}$ adds what the token says, of every level near it. What differs is the sampler, the exact finite step (`bayes`) in
place of leaps at frozen rates.""",
    f"{M2S_BIBTEX}\n\n{BIBTEX}",
)
