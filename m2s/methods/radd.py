"""RADD: masks, and a network that is not told the time."""

from m2s.methods.base import Method

RADD = Method(
    "radd",
    "RADD, masks without time",
    {
        "head.kind": "posterior",
        "head.offset": "none",
        "head.loss": "masked",
        "process.kind": "absorbing",
        "process.schedule": "log-linear",
        "network.time": "no",
    },
    r"""For masks the score is a law that does not know the time, times a number that does: $s_y =
\frac{\alpha_t}{1-\alpha_t}\,\Pr(X_0^i = y \mid \text{unmasked tokens})$. So the network gets no time. That of the
authors' code has a bias in every norm, too: `--network.norm-bias`. The loss is
that of `md4` with the share of masks $\lambda = 1-\alpha_t$ for the clock,
$\frac{1}{\lambda}(-\log\mu_{x_0})\,\frac{d\lambda}{dt}$ ($\lambda$-DCE); `--head.loss score-entropy` is the other of
its equivalent losses ($t$-DSE). `--head.loss any-order` weighs a sample by the number $n$ of its $L$ sites that are masked,
$\frac{L+1}{n}$ in place of $\frac1\lambda$, of which it is the mean given $n$ if $\lambda$ is spread over all of $[0, 1]$: the
same gradient on average, with less noise. Over times from $s$ to $T$ the two integrals differ by $\alpha_T E_T[m] - \alpha_s
E_s[m]$, $m$ the mean of $-\log\mu_{x_0}$ over the masked sites, a share of about $(\alpha_T + 1-\alpha_s)/L$.
As a sum over $n$ it is the likelihood of a network that fills the sites one by one, in a random order,

$$\sum_{n=1}^{L}\frac1n\,E\Big[\sum_{i\text{ masked}} -\log\mu_{x_0^i}\Big] = E_{\text{order}}\Big[\sum_j -\log
p\big(x_0^{o_j}\mid x_0^{o_1},\ldots,x_0^{o_{j-1}}\big)\Big]$$

($k$-DCE; the authors draw $n$ itself from $1..L$). It holds for a network without time only; validation is by the bound.""",
    r"""@inproceedings{ou2025radd,
  title     = {Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean Data},
  author    = {Ou, Jingyang and Nie, Shen and Xue, Kaiwen and Zhu, Fengqi and Sun, Jiacheng and Li, Zhenguo and Li, Chongxuan},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
}""",
    "ancestral",
)
