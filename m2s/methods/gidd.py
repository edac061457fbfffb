"""GIDD: masks and other tokens in one process."""

from dataclasses import replace

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

BIBTEX = r"""@inproceedings{vonrutte2025gidd,
  title     = {Generalized Interpolating Discrete Diffusion},
  author    = {von R{\"u}tte, Dimitri and Fluri, Janis and Ding, Yuhui and Orvieto, Antonio and Sch{\"o}lkopf, Bernhard
               and Hofmann, Thomas},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
}"""
PROCESS = ProcessConfig(kind="hybrid", schedule="linear")

GIDD = Method(
    name="gidd",
    title="GIDD, its NELBO",
    process=PROCESS,
    head=HeadConfig(kind="posterior", offset="exact", loss="score-entropy"),
    text=r"""$P_t(y\mid z) = \alpha_t\,[y=z] + m_t(y)$ with $m_t = (t\,e_{\text{mask}} + c\,u)/(1+c)$, $c = B\sqrt{t(1-t)}$, $B
= 2p/(1-p)$. `--process.p-uniform` is $p$, below 1. For noise without masks take `--process.kind uniform`. The network gives the
leave-one-out distribution $\nu$, which replaces $x_0$ in $q_t(y) = \alpha_t\nu_y + m_t(y)$. With $q = P_t(\cdot\mid x_0)$ and
the weight $w_t(k) = n_t(k)/P_t(k\mid x_0)$ the NELBO is

$$\int E\big[w_t(k)\,\big(\mathrm{KL}(q\,\|\,q_t) + D(q(k), q_t(k))\big)\big]\,dt, \qquad D(a, b) = a/b - \log(a/b) - 1.$$

It equals the score entropy of $\nu$ (`tests/losses/test_equivalences.py`), which is what is computed. `--head.loss gidd`
computes it as written.

There are two samplers besides `bayes`, the authors' ancestral step. Neither samples the distribution of the reverse process.

- `--sampler adaptive` redraws, at each step, the positions with the largest $(\max_z\nu_z - \nu_k)\,\pi_t(k)$ from $\nu$, with
  $\pi_t = m_t/(1-\alpha_t)$. These are masks as well as tokens that look wrong. It is from the authors' later code, which takes
  the most likely token (`--top-k 1 --on leave_one_out`).
- `--sampler self_correcting` samples and then makes 128 more calls at $t = 0.01$. Each draws $z\sim\nu^{1/0.1}$ at every
  position and replaces one token: where $z\neq k$ is most certain. Our addition: only where $\nu_z > \nu_k$. So no step lowers
  the fraction of tokens that are the network's first choice. The authors watch that fraction, and stop when it has not risen
  for 32 steps.""",
    bibtex=BIBTEX,
)
CLIPPED = replace(
    GIDD,
    name="gidd-clipped",
    title="GIDD, clipped weights",
    head=HeadConfig(kind="posterior", offset="exact", loss="gidd-clipped"),
    text=r"""`gidd` with the weight $w_t(k)$ clipped at `--head.max-weight`, 1 by default. The loss is not an upper bound on the
NLL, but training is more stable. The weight depends on $x_0$, so clipping moves the minimum away from the posterior: little
where the vocabulary is large, much where it has three tokens. The validation loss is the NELBO.

It is one of the two weights of the authors, `loss.loss_weighting: clip` in their code, and the option is their
`loss.max_loss_weight`. The paper has 1 there. Their configuration has 2, for their other weight, `dynamic`. That one depends on
the kind of the token alone and is not implemented here.""",
)
