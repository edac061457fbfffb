"""D3PM: a finite number of steps, and the bound that belongs to them."""

from m2s.methods.base import Method

BIBTEX = r"""@inproceedings{austin2021structured,
  title     = {Structured Denoising Diffusion Models in Discrete State-Spaces},
  author    = {Austin, Jacob and Johnson, Daniel D. and Ho, Jonathan and Tarlow, Daniel and van den Berg, Rianne},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021},
}"""
SETTINGS = {"head.kind": "posterior", "head.offset": "exact", "head.loss": "d3pm"}

UNIFORM = Method(
    "d3pm-uniform",
    "D3PM on uniform noise",
    {**SETTINGS, "process.kind": "chain-uniform"},
    r"""A chain of $T$ steps (`--process.chain-steps`; the paper has 1000), $x_n \sim Q_n(\cdot\mid x_{n-1})$, $P_n =
Q_1\cdots Q_n$. With $q(x_{n-1}\mid x_n, z) = P_{n-1}(x_{n-1}\mid z)\,Q_n(x_n\mid x_{n-1})/P_n(x_n\mid z)$ one step
back is $p(x_{n-1}\mid x_n) = \sum_z q(x_{n-1}\mid x_n, z)\,\mu_z$, and the bound

$$-\log p(x_0) \le \mathrm{KL}\big(P_T(\cdot\mid x_0)\,\|\,p_T\big) + \sum_{n=2}^{T} E\,\mathrm{KL}\big(q(x_{n-1}\mid x_n,
x_0)\,\|\,p(x_{n-1}\mid x_n)\big) + E\big[-\log p(x_0\mid x_1)\big].$$

The paper weighs its network's law by $q(x_{n-1}, x_n\mid z)$: it is the law $\nu \propto \mu/P_n(x_n\mid\cdot)$ that has not
seen the token, hence the exact offset. Training draws $n$ and adds $\lambda\,(-\log\nu_{x_0})$ to its term, $\lambda = 0.001$;
`--head.loss chain` is the bound alone, which is what validation is by. At $n = 1$ the formula has $\mu$ for $p(x_0\mid
x_1)$, where the authors' code has $\nu$. In `m2s` a time $t$ in $((n-1)/T, n/T]$ stands for step $n$; `m2s sample --steps T
--grid linear` visits every step, fewer steps jump by products of the $Q_n$. Here $Q_n = (1-\beta_n)\,I + \beta_n/K$ with
$\beta_n = 1 - a_n/a_{n-1}$, at most 0.999, $a_n = \cos\big(\tfrac{\pi}{2}\,\tfrac{n/T+0.008}{1.008}\big)$.""",
    BIBTEX,
)
ABSORBING = Method(
    "d3pm-absorbing",
    "D3PM on masks",
    {**SETTINGS, "process.kind": "chain-absorbing"},
    r"""`d3pm-uniform` where step $n$ masks a token with probability $\beta_n = 1/(T-n+1)$, so that a share $n/T$ is masked
after it. As $T$ grows the bound becomes that of `md4`.""",
    BIBTEX,
)
GAUSSIAN = Method(
    "d3pm-gaussian",
    "D3PM on ordered levels, the discretised Gaussian",
    {**SETTINGS, "process.kind": "chain-gaussian"},
    r"""`d3pm-uniform` where a step goes to a level nearby, $Q_n(j\mid i) = g(i-j)\big/\sum_{d=1-K}^{K-1} g(d)$ for $j \neq
i$, $g(d) = e^{-4d^2/((K-1)^2\beta_n)}$, and the rest stays; $\beta_n$ rises evenly from 0.0001 to 0.02 at $T = 1000$, times
$1000/T$ for another $T$. With
`--head.kind ordinal` (the paper's Gauss + logistic) the network gives two numbers for a site in place of logits, the
mean $m$ and the scale $s$ of a logistic law on $[-1, 1]$, whose mass in the bin of level $z$ is its probability,

$$\nu_z = F\Big(\frac{e_{z+1}-m}{s}\Big) - F\Big(\frac{e_z-m}{s}\Big), \qquad F(u) = \frac{1}{1+e^{-u}}, \quad e_z =
\frac{2z-1}{K-1} - 1;$$

the first and the last bin take the tails (the paper's code leaves them out and normalises; its mean is $\tanh(m + x_t)$, ours
$m$). That head serves every other method with a posterior too, such as `m2s-offset`.""",
    BIBTEX,
)
