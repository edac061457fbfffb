"""D3PM: a finite number of steps, and the NELBO that belongs to them."""

from dataclasses import replace

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

BIBTEX = r"""@inproceedings{austin2021structured,
  title     = {Structured Denoising Diffusion Models in Discrete State-Spaces},
  author    = {Austin, Jacob and Johnson, Daniel D. and Ho, Jonathan and Tarlow, Daniel and van den Berg, Rianne},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021},
}"""
HEAD = HeadConfig(kind="posterior", offset="exact", loss="d3pm")

UNIFORM = Method(
    name="d3pm-uniform",
    title="D3PM on uniform noise",
    process=ProcessConfig(kind="chain-uniform"),
    head=HEAD,
    text=r"""A chain of $T$ steps (`--process.chain-steps`; the paper has 1000), $x_n \sim Q_n(\cdot\mid x_{n-1})$, $P_n =
Q_1\cdots Q_n$. The posterior of a step is $q(x_{n-1}\mid x_n, z) = P_{n-1}(x_{n-1}\mid z)\,Q_n(x_n\mid x_{n-1})/P_n(x_n\mid
z)$. One reverse step is $p(x_{n-1}\mid x_n) = \sum_z q(x_{n-1}\mid x_n, z)\,\mu_z$, and the NELBO is

$$-\log p(x_0) \le \mathrm{KL}\big(P_T(\cdot\mid x_0)\,\|\,p_T\big) + \sum_{n=2}^{T} E\,\mathrm{KL}\big(q(x_{n-1}\mid x_n,
x_0)\,\|\,p(x_{n-1}\mid x_n)\big) + E\big[-\log p(x_0\mid x_1)\big].$$

The paper weights the network's distribution by $q(x_{n-1}, x_n\mid z)$. So it is the leave-one-out distribution $\nu \propto
\mu/P_n(x_n\mid\cdot)$, hence the exact offset. Training draws $n$ and adds $\lambda\,(-\log\nu_{x_0})$ to its term, with
$\lambda = 0.001$. `--head.loss chain` is the NELBO alone, which is also the validation loss. At $n = 1$ the formula has $\mu$
for $p(x_0\mid x_1)$; the authors' code has $\nu$.

In `m2s` a time $t$ in $((n-1)/T, n/T]$ stands for step $n$. `m2s sample --steps T --grid linear` visits every step; fewer steps
jump by products of the $Q_n$. Here $Q_n = (1-\beta_n)\,I + \beta_n/K$ with $\beta_n = 1 - a_n/a_{n-1}$, at most 0.999, and $a_n
= \cos\big(\tfrac{\pi}{2}\,\tfrac{n/T+0.008}{1.008}\big)$.""",
    bibtex=BIBTEX,
)
ABSORBING = replace(
    UNIFORM,
    name="d3pm-absorbing",
    title="D3PM on masks",
    process=ProcessConfig(kind="chain-absorbing"),
    text=r"""`d3pm-uniform` where step $n$ masks a token with probability $\beta_n = 1/(T-n+1)$. A fraction $n/T$ is masked
after step $n$. As $T$ grows the NELBO becomes that of `md4`.""",
)
GAUSSIAN = replace(
    UNIFORM,
    name="d3pm-gaussian",
    title="D3PM on ordered levels, the discretized Gaussian",
    process=ProcessConfig(kind="chain-gaussian"),
    text=r"""`d3pm-uniform` where a step leads to a nearby level: $Q_n(j\mid i) = g(i-j)\big/\sum_{d=1-K}^{K-1} g(d)$ for $j
\neq i$, $g(d) = e^{-4d^2/((K-1)^2\beta_n)}$. The remaining probability stays at $i$. $\beta_n$ rises evenly from 0.0001 to 0.02
at $T = 1000$, and is multiplied by $1000/T$ for another $T$.

With `--head.kind ordinal` (the paper's Gauss + logistic) the network gives two numbers per position in place of logits: the
mean $m$ and the scale $s$ of a logistic distribution on $[-1, 1]$. The probability of level $z$ is the mass in its bin,

$$\nu_z = F\Big(\frac{e_{z+1}-m}{s}\Big) - F\Big(\frac{e_z-m}{s}\Big), \qquad F(u) = \frac{1}{1+e^{-u}}, \quad e_z =
\frac{2z-1}{K-1} - 1.$$

The first and the last bin contain the tails. The paper's code leaves the tails out and normalizes. Its mean is $\tanh(m +
x_t)$; ours is $m$. That head works with every other method that has a posterior, such as `m2s-offset`.""",
)
