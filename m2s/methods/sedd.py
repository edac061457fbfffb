"""SEDD: an unconstrained score, without a posterior."""

from dataclasses import replace

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

UNIFORM = Method(
    name="sedd",
    title="SEDD on uniform noise",
    process=ProcessConfig(kind="uniform", schedule="linear"),
    head=HeadConfig(kind="log-score", loss="score-entropy"),
    sampler="analytic",
    text=r"""The network gives $\log s_y$, one unconstrained number for each token; $s_k = 1$. The loss is score entropy,
$\sum_{y\neq k} Q_t(y\to k)\,(s_y - r_y\log s_y + r_y\log r_y - r_y)$. Nothing forces the numbers to be ratios of one
distribution. `m2s audit` counts how often they are not, and `m2s repair` replaces them by the nearest score that is.""",
    bibtex=r"""@inproceedings{lou2024discrete,
  title     = {Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution},
  author    = {Lou, Aaron and Meng, Chenlin and Ermon, Stefano},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
}""",
)
ABSORBING = replace(
    UNIFORM,
    name="sedd-absorb",
    title="SEDD on masks",
    process=ProcessConfig(kind="absorbing", schedule="log-linear"),
    head=HeadConfig(kind="log-score", scale="sigma", loss="score-entropy"),
    text=r"""`sedd` with masking noise and $1 - \alpha_t = (1-\epsilon)\,t$. Only masked positions have a loss. As in the
release, $\log(e^{\sigma}-1) + \log K$ is subtracted from the output. The true score of a masked position is
$\mu_y/(e^{\sigma}-1)$, so the network itself gives $\log(K\mu_y)$ at every time. `--head.scale none` leaves that out.""",
)
