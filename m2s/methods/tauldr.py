"""tauLDR (Campbell et al.): rates between nearby levels, and the ELBO in continuous time."""

from dataclasses import replace

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig
from m2s.methods.m2s import BIBTEX as M2S_BIBTEX
from m2s.methods.m2s import EXACT as M2S_HEAD

BIBTEX = r"""@inproceedings{campbell2022ctmc,
  title     = {A Continuous Time Framework for Discrete Denoising Models},
  author    = {Campbell, Andrew and Benton, Joe and De Bortoli, Valentin and Rainforth, Tom and Deligiannidis, George
               and Doucet, Arnaud},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022},
}"""
HEAD = HeadConfig(kind="posterior", offset="exact", loss="ct-elbo")

GAUSSIAN = Method(
    name="tauldr",
    title="tauLDR, Gaussian rates",
    process=ProcessConfig(kind="gaussian", schedule="geometric-rate"),
    head=HEAD,
    sampler="ordinal_tau_leaping",
    text=r"""For ordered levels. A level $i$ becomes $j$ at the rate $Q(i\to j) = e^{-(|i-j|-1)^2/w^2}\,\min(1, \pi_j/\pi_i)$,
where $\pi$ is a Gaussian about the middle. $P_t = e^{\sigma_t Q}$ is tabulated. `--process.jump-width` is $w$: by default 6 of
256 levels, in proportion. `--process.stationary-width` is the width of $\pi$: 512 of 256. $Q$ is divided by its spectral gap,
so that $\sigma_t$ means what it does for uniform noise: $e^{-\sigma_t}$ is the weight of the slowest mode. The schedule is the
authors', $\sigma_t = a\,(b^t - 1)$ with $b = 100$ (`--process.schedule geometric-rate`, `--process.base`). It ends at $\sigma_1
= 7$; their $a = 3$ is, in these units, `--process.sigma-max 6.2`.

The network gives $p_\theta(x_0\mid x_t) = \mu$, and with it the rate of the reverse process,

$$R_\theta(k\to y) = Q_t(y\to k)\sum_z \mu_z\,\frac{P_t(y\mid z)}{P_t(k\mid z)}, \qquad k = x_t.$$

The authors' bound is $\int E\big[\sum_y R_\theta(x\to y) - \sum_y Q_t(x\to y)\log R_\theta(y\to x)\big]\,dt$ over $x\sim
P_t(\cdot\mid x_0)$, plus a constant. Its second sum runs over forward jumps out of $x$, and needs the network at every $y$. The
same number is $E\big[\sum_y R^*(x\to y)\log R_\theta(x\to y)\big]$ with $R^*(k\to y) = Q_t(y\to k)\,P_t(y\mid x_0)/P_t(k\mid
x_0)$. This needs the network at $x$ alone. With the constant $\sum_y R^*\log R^* - R^*$ the loss is

$$\sum_{y\neq k} R_\theta - R^* + R^*\log\frac{R^*}{R_\theta},$$

which is score entropy (`tests/losses/test_tauldr.py`).

A level far from $k$ has almost no probability of having become $k$, down to $10^{-300}$. Where the network gives it any
probability, the ratio above is as large. The authors divide by $P_t(k\mid z) + 10^{-9}$ and let the network give a logistic
distribution about $x_t$. Here it gives the leave-one-out distribution $\nu$, and $\mu_z \propto \nu_z\,P_t(k\mid z)$
(`--head.offset exact`). Every $\mu$ belongs to some $\nu$, and no ratio diverges. With `--head.offset none` the 256 levels of
MNIST did not train: 13.9 bits a pixel after 750 training steps, then infinity
(`experiments/results/mnist-tauldr-no-offset.json`).

Samples are drawn by tau-leaping: a Poisson number of jumps, of mean $E = (t-s)\sum_y R_\theta(k\to y)$. For images the authors
add the displacements of several jumps (`--sampler ordinal_tau_leaping`). Tokens without an order cannot be added.
`--sampler tau_leaping` changes a position only on exactly one jump, with probability $E e^{-E}$. The rates between nearby
levels are high, so this is almost never until there are so many steps that $E$ is below one. Both are of order one in the step
(`tests/samplers/test_tau_leaping.py`).

`--sampler forward_backward` adds the authors' corrector. After each step to $s \le 0.1$ (`--entry`) it makes ten leaps
(`--corrections`) of 0.003 units of time each (`--leap`). Their rates are $Q_s(k\to y) + R_\theta(k\to y)$, under which $p_s$ is
stationary. The last step of each sampler is a draw from $\mu$; the authors take the most likely token there.
`m2s.samplers.PredictorCorrector(predictor=m2s.samplers.TauLeaping())` redraws positions given all others instead. Two things of
the authors are not part of this: the logistic output layer, to which `--head.kind ordinal` is close, and 0.001 times the cross
entropy of $\mu$, which they add in training.""",
    bibtex=BIBTEX,
)
ABSORBING = replace(
    GAUSSIAN,
    name="tauldr-absorb",
    title="tauLDR on masks",
    process=ProcessConfig(kind="absorbing", schedule="log-linear"),
    sampler="tau_leaping",
    text=r"""`tauldr` with masking noise: $Q(y\to\text{mask}) = 1$. At a masked position the sum of $R_\theta$ does not depend
on the network, and the loss is that of `md4`, $\frac{-\alpha_t'}{1-\alpha_t}(-\log\mu_{x_0})$. The corrector is `--sampler
forward_backward` here too. Jumps do not add up.""",
)
M2S = replace(
    GAUSSIAN,
    name="m2s-gaussian",
    title="M2S on Gaussian rates",
    process=ProcessConfig(kind="gaussian", schedule="geometric"),
    head=M2S_HEAD,
    sampler="bayes",
    text=r"""M2S where levels become nearby levels. The process is that of `tauldr`, and the bridge is that of any known
process, $s_y = \sum_z \mu_z\,P_t(y\mid z)/P_t(k\mid z)$. The loss equals that of `tauldr`. The network gives the leave-one-out
distribution $\nu$, and $\log\mu_z = \log\nu_z + \log P_t(k\mid z) + \text{const}$ adds the evidence of the token for every
nearby level. The sampler differs: the exact finite step (`bayes`) in place of leaps at frozen rates.""",
    bibtex=f"{M2S_BIBTEX}\n\n{BIBTEX}",
)
