"""M2S, the method of the paper, with the exact offset and on other processes."""

from dataclasses import replace

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig
from m2s.methods.gidd import BIBTEX as GIDD_BIBTEX
from m2s.methods.gidd import PROCESS as GIDD_PROCESS

BIBTEX = r"""@misc{li-m2s,
  title  = {Mean-to-Score Discrete Diffusion: Posterior-Mean Denoisers for Score Entropy},
  author = {Li, Jingyuan and Jiang, Xiaoyi and Jiang, Yixuan and Liu, Wei and Zhu, Yi and Shi, Zuoqiang and Hu, Pipi},
}"""
EXACT = HeadConfig(kind="posterior", offset="exact", loss="score-entropy")

M2S = Method(
    name="m2s",
    title="Mean-to-Score, the paper's head on uniform noise",
    process=ProcessConfig(kind="uniform", schedule="linear"),
    head=HeadConfig(kind="posterior", offset="none", loss="score-entropy"),
    text=r"""The network gives the logits of the posterior $\mu_z = \Pr(X_0^i = z \mid X_t)$, and the bridge converts it to a
score:

$$s_y = m(y)\Big[\frac{1-\mu_k}{m(k)} + \frac{\mu_k}{\alpha+m(k)}\Big] + \frac{\alpha\,\mu_y}{m(k)}, \qquad y \neq k = x_t.$$

It is trained by score entropy, $\sum_{y\neq k} Q_t(y\to k)\,(s_y - r_y\log s_y + r_y\log r_y - r_y)$ with $r_y = P_t(y\mid
x_0)/P_t(k\mid x_0)$. Its integral over $t$ is the NELBO up to its end terms.""",
    bibtex=BIBTEX,
)
OFFSET = replace(
    M2S,
    name="m2s-offset",
    title="M2S with the exact offset",
    head=EXACT,
    text=r"""The network gives the logits of the leave-one-out distribution $\nu$, which does not know the token of its
position. The contribution of that token is known exactly and is added: $\log\mu_z = \log\nu_z + [z=k]\,\log(1 + \alpha/m(k)) +
\text{const}$. The family of scores and the loss are those of `m2s`. The network need not learn how likely its input token is to
be clean.""",
)
HYBRID = replace(
    OFFSET,
    name="m2s-hybrid",
    title="M2S on GIDD's process",
    process=GIDD_PROCESS,
    text=r"""`m2s-offset` where tokens become masks or other tokens, $m_t = (t\,e_{\text{mask}} + c\,u)/(1+c)$, $c =
B\sqrt{t(1-t)}$. The bridge and the loss are those of any rank-one process. The settings are those of `gidd`, so the run is the
same.""",
    bibtex=f"{BIBTEX}\n\n{GIDD_BIBTEX}",
)
