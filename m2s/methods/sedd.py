"""SEDD: the score itself, with nothing said of a posterior."""

from m2s.methods.base import Method

BIBTEX = r"""@inproceedings{lou2024discrete,
  title     = {Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution},
  author    = {Lou, Aaron and Meng, Chenlin and Ermon, Stefano},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
}"""

UNIFORM = Method(
    "sedd",
    "SEDD on uniform noise",
    {"head.kind": "log-score", "head.loss": "score-entropy", "process.kind": "uniform", "process.schedule": "linear"},
    r"""The network gives $\log s_y$, one free number for each token; $s_k = 1$. Loss: score entropy, $\sum_{y\neq k} Q_t(y\to
k)\,(s_y - r_y\log s_y + r_y\log r_y - r_y)$. Nothing makes the numbers ratios of one law: `m2s audit` counts how
often they are not, and `m2s repair` replaces them by the nearest that are.""",
    BIBTEX,
    "analytic",
)
ABSORBING = Method(
    "sedd-absorb",
    "SEDD on masks",
    {
        "head.kind": "log-score",
        "head.scale": "sigma",
        "head.loss": "score-entropy",
        "process.kind": "absorbing",
        "process.schedule": "log-linear",
    },
    r"""`sedd` with a mask for noise and $1 - \alpha_t = (1-\epsilon)\,t$. Only masked sites have a loss. As in the release,
$\log(e^{\sigma}-1) + \log K$ is taken from the output: the true score of a masked site is $\mu_y/(e^{\sigma}-1)$, so that the
network itself says $\log(K\mu_y)$, at every time (`--head.scale none` leaves that out).""",
    BIBTEX,
    "analytic",
)
