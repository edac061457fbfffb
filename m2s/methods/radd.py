"""RADD: masks, and a network without time."""

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

RADD = Method(
    name="radd",
    title="RADD, masks without time",
    process=ProcessConfig(kind="absorbing", schedule="log-linear"),
    head=HeadConfig(kind="posterior", offset="none", loss="masked"),
    network_time=False,
    sampler="ancestral",
    text=r"""For masks the score is a distribution that does not depend on the time, times a factor that does: $s_y =
\frac{\alpha_t}{1-\alpha_t}\,\Pr(X_0^i = y \mid \text{unmasked tokens})$. So the network gets no time. The authors' network also
has a bias in every norm: `--network.norm-bias`.

The loss is that of `md4` with the masked fraction $\lambda = 1-\alpha_t$ as the clock, $\frac{1}{\lambda}(-\log\mu_{x_0})\,
\frac{d\lambda}{dt}$ ($\lambda$-DCE). `--head.loss score-entropy` is the other of its equivalent losses ($t$-DSE). `--head.loss
any-order` uses the number $n$ of masked positions among $L$: the weight is $\frac{L+1}{n}$ in place of $\frac1\lambda$. If
$\lambda$ is uniform on $[0, 1]$, this is the mean of $\frac1\lambda$ given $n$. The expected gradient is the same, with less
noise.

Over times from $s$ to $T$ the two integrals differ by $\alpha_T E_T[m] - \alpha_s E_s[m]$, where $m$ is the mean of
$-\log\mu_{x_0}$ over the masked positions. Relative to the loss this is about $(\alpha_T + 1-\alpha_s)/L$. As a sum over $n$ it
is the likelihood of a network that fills the positions one by one, in a random order,

$$\sum_{n=1}^{L}\frac1n\,E\Big[\sum_{i\text{ masked}} -\log\mu_{x_0^i}\Big] = E_{\text{order}}\Big[\sum_j -\log
p\big(x_0^{o_j}\mid x_0^{o_1},\ldots,x_0^{o_{j-1}}\big)\Big]$$

($k$-DCE; the authors draw $n$ itself from $1..L$). It holds only for a network without time. The validation loss is the
NELBO.""",
    bibtex=r"""@inproceedings{ou2025radd,
  title     = {Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean Data},
  author    = {Ou, Jingyang and Nie, Shen and Xue, Kaiwen and Zhu, Fengqi and Sun, Jiacheng and Li, Zhenguo and Li, Chongxuan},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
}""",
)
