"""GIDD: masks and other tokens in one process."""

from m2s.methods.base import Method

BIBTEX = r"""@inproceedings{vonrutte2025gidd,
  title     = {Generalized Interpolating Discrete Diffusion},
  author    = {von R{\"u}tte, Dimitri and Fluri, Janis and Ding, Yuhui and Orvieto, Antonio and Sch{\"o}lkopf, Bernhard
               and Hofmann, Thomas},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
}"""
SETTINGS = {"head.kind": "posterior", "head.offset": "exact", "process.kind": "hybrid", "process.schedule": "linear"}

GIDD = Method(
    "gidd",
    "GIDD, its bound",
    {**SETTINGS, "head.loss": "score-entropy"},
    r"""$P_t(y\mid z) = \alpha_t\,[y=z] + m_t(y)$ with $m_t = (t\,e_{\text{mask}} + c\,u)/(1+c)$, $c = B\sqrt{t(1-t)}$, $B =
2p/(1-p)$; `--process.p-uniform` is $p$, below 1 (without masks it is `--process.kind uniform`). The network's law $\nu$ has
not seen the token, and stands for $x_0$ in $q_t(y) = \alpha_t\nu_y + m_t(y)$. With $q = P_t(\cdot\mid x_0)$ and the weight
$w_t(k) = n_t(k)/P_t(k\mid x_0)$ the bound is $\int E\big[w_t(k)\,\big(\mathrm{KL}(q\,\|\,q_t) + D(q(k),
q_t(k))\big)\big]\,dt$, $D(a, b) = a/b - \log(a/b) - 1$. It is the score entropy of $\nu$ (`tests/losses/test_equivalences.py`),
which is what is computed; `--head.loss gidd` computes it as written.

Samplers, besides `bayes` (the authors' ancestral step): `--sampler adaptive` draws, at each step, the sites where
$(\max_z\nu_z - \nu_k)\,\pi_t(k)$ is greatest, $\pi_t = m_t/(1-\alpha_t)$, anew from $\nu$: masks and tokens that look wrong
alike (from the authors' later code; they take the likeliest token, `--top-k 1 --on leave_one_out`). `--sampler
self_correcting` samples and then makes 128 more calls at $t = 0.01$: each draws $z\sim\nu^{1/0.1}$ at every site and
replaces the token of that site where $z\neq k$ is surest. Ours besides: only where $\nu_z > \nu_k$, so that no step lowers
the share of tokens that are the network's first choice; the authors watch that share, and stop when it has not risen for 32
steps. Neither has the law of the reverse process.""",
    BIBTEX,
)
CLIPPED = Method(
    "gidd-clipped",
    "GIDD, clipped weights",
    {**SETTINGS, "head.loss": "gidd-clipped"},
    r"""`gidd` with the weight $w_t(k)$ clipped at `--head.max-weight`, 1 by default: no bound, but steadier to train with. The
weight knows $x_0$, so that clipping it moves the minimum away from the posterior: little where tokens are many, much where they
are three. Validation is by the bound. It is one of the two weights that the authors train with, `loss.loss_weighting: clip` in
their code, and the option is their `loss.max_loss_weight`. The paper has 1 there. Their configuration says 2, for their other
weight, `dynamic`, which depends on the kind of the token alone and is not here.""",
    BIBTEX,
)
