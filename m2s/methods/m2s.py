"""M2S, the paper: a posterior behind every score. With the exact offset, and on other processes, ours."""

from m2s.methods.base import Method
from m2s.methods.gidd import BIBTEX as GIDD_BIBTEX

BIBTEX = r"""@misc{li-m2s,
  title  = {Mean-to-Score Discrete Diffusion: Posterior-Mean Denoisers for Score Entropy},
  author = {Li, Jingyuan and Jiang, Xiaoyi and Jiang, Yixuan and Liu, Wei and Zhu, Yi and Shi, Zuoqiang and Hu, Pipi},
}"""
SETTINGS = {"head.kind": "posterior", "head.offset": "none", "head.loss": "score-entropy", "process.schedule": "linear"}

M2S = Method(
    "m2s",
    "Mean-to-Score, the paper's head on uniform noise",
    {**SETTINGS, "process.kind": "uniform"},
    r"""The network gives the logits of the posterior $\mu_z = \Pr(X_0^i = z \mid X_t)$, and the bridge makes the score of it:

$$s_y = m(y)\Big[\frac{1-\mu_k}{m(k)} + \frac{\mu_k}{\alpha+m(k)}\Big] + \frac{\alpha\,\mu_y}{m(k)}, \qquad y \neq k = x_t.$$

It is trained by score entropy, $\sum_{y\neq k} Q_t(y\to k)\,(s_y - r_y\log s_y + r_y\log r_y - r_y)$ with $r_y = P_t(y\mid
x_0)/P_t(k\mid x_0)$, whose integral over $t$ is the bound on the likelihood.""",
    BIBTEX,
)
OFFSET = Method(
    "m2s-offset",
    "M2S with the exact offset",
    {**SETTINGS, "process.kind": "uniform", "head.offset": "exact"},
    r"""The network gives the logits of the law $\nu$ that has not seen the site's own token; what the token says is known and
is added: $\log\mu_z = \log\nu_z + [z=k]\,\log(1 + \alpha/m(k)) + \text{const}$. The same family of scores as `m2s`,
and the same loss; the network need not learn how likely the token it sees is to be clean.""",
    BIBTEX,
)
HYBRID = Method(
    "m2s-hybrid",
    "M2S on GIDD's process",
    {**SETTINGS, "process.kind": "hybrid", "head.offset": "exact"},
    r"""`m2s-offset` where tokens become masks or other tokens, $m_t = (t\,e_{\text{mask}} + c\,u)/(1+c)$, $c =
B\sqrt{t(1-t)}$: the bridge and the loss are those of any rank-one process. The same settings as `gidd`, so the same run.""",
    f"{BIBTEX}\n\n{GIDD_BIBTEX}",
)
