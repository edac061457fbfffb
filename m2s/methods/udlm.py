"""UDLM: uniform noise with the leave-one-out distribution. DUO: the same after a curriculum."""

from dataclasses import replace

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

UDLM = Method(
    name="udlm",
    title="UDLM, uniform diffusion language models",
    process=ProcessConfig(kind="uniform", schedule="log-linear"),
    head=HeadConfig(kind="posterior", offset="exact", loss="score-entropy"),
    text=r"""The network's leave-one-out distribution $\nu$ replaces $x_0$: $\bar x_j = K\alpha_t\,[j=x_0] + 1-\alpha_t$,
$\bar\nu_j = K\alpha_t\,\nu_j + 1-\alpha_t$, and the loss is

$$\frac{\alpha_t'}{K\alpha_t}\Big[\frac{K}{\bar x_k} - \frac{K}{\bar\nu_k} - \sum_j \frac{\bar x_j}{\bar x_k}
\log\frac{\bar\nu_k\,\bar x_j}{\bar\nu_j\,\bar x_k}\Big].$$

It is the score entropy of `m2s-offset` (`tests/losses/test_equivalences.py`), which is what is computed. `--head.loss udlm`
computes it as written. Where there are class labels, the authors' network is conditioned on $\operatorname{silu}(\text{time}) +
\operatorname{silu}(\text{label})$: `--network.label-after-silu`. By default it is $\operatorname{silu}(\text{time} +
\text{label})$.""",
    bibtex=r"""@inproceedings{schiff2025simple,
  title     = {Simple Guidance Mechanisms for Discrete Diffusion Models},
  author    = {Schiff, Yair and Sahoo, Subham Sekhar and Phung, Hao and Wang, Guanghan and Boshar, Sam and Dalla-torre, Hugo
               and de Almeida, Bernardo P. and Rush, Alexander and Pierrot, Thomas and Kuleshov, Volodymyr},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
}""",
)

DUO = replace(
    UDLM,
    name="duo",
    title="DUO, the diffusion duality: UDLM after a curriculum",
    head=HeadConfig(kind="posterior", offset="exact", loss="score-entropy", curriculum="duo"),
    text=r"""Uniform noise is the argmax of Gaussian noise: with $w = a\,e_{x_0} + \sqrt{1-a^2}\,\epsilon$,
$\Pr(\operatorname{argmax} w = y) = P_t(y\mid x_0)$ where

$$\alpha_t = T(a) = \frac{K}{K-1}\Big(\int\varphi(v)\,\Phi(v+r)^{K-1}dv - \frac1K\Big), \qquad r =
\frac{a}{\sqrt{1-a^2}}.$$

In the first half of the run the network reads the mean of its embedding under $\operatorname{softmax}(w/\tau)$, in place of the
embedding of $x_t = \operatorname{argmax} w$. $\tau$ falls from 0.1 to 0.01, evenly in $\log\tau$. These are the defaults of the
authors' code; the scripts of their runs keep it at 0.001. The second half is `udlm`.

The loss is that of `udlm` at $x_t$ throughout. While $\tau > 0$ the training loss is not an upper bound on the NLL. The
validation loss is always the NELBO, on plain tokens. Here $a$ follows from the schedule of the run. In the authors' curriculum
$\log\frac{1-a^2}{a^2}$ rises evenly with $t$, from -3.5 to -1.75. The curriculum draws a normal number for each token of the
vocabulary at each position. With GPT-2's 50,257 tokens give a small `--micro-batch`. In your own training loop it is
`m2s.losses.Relaxed(model, head)`.

The authors' nucleus sampling takes the most likely tokens of $\nu$, not of the posterior: `--top-p P --on leave_one_out`.""",
    bibtex=r"""@inproceedings{sahoo2025duality,
  title     = {The Diffusion Duality},
  author    = {Sahoo, Subham Sekhar and Deschenaux, Justin and Gokaslan, Aaron and Wang, Guanghan and Chiu, Justin
               and Kuleshov, Volodymyr},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
}""",
)
