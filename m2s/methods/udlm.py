"""UDLM: uniform noise, by the law that has not seen the token. DUO: the same after a curriculum."""

from m2s.methods.base import Method

SETTINGS = {
    "head.kind": "posterior",
    "head.offset": "exact",
    "head.loss": "score-entropy",
    "process.kind": "uniform",
    "process.schedule": "log-linear",
}

UDLM = Method(
    "udlm",
    "UDLM, uniform diffusion language models",
    SETTINGS,
    r"""The network's law $\nu$ is put where $x_0$ stands: $\bar x_j = K\alpha_t\,[j=x_0] + 1-\alpha_t$, $\bar\nu_j =
K\alpha_t\,\nu_j + 1-\alpha_t$, and the loss is

$$\frac{\alpha_t'}{K\alpha_t}\Big[\frac{K}{\bar x_k} - \frac{K}{\bar\nu_k} - \sum_j \frac{\bar x_j}{\bar x_k}
\log\frac{\bar\nu_k\,\bar x_j}{\bar\nu_j\,\bar x_k}\Big].$$

It is the score entropy of `m2s-offset` (`tests/losses/test_equivalences.py`), which is what is computed; `--head.loss udlm`
computes it as written. Where there are class labels, the authors' network is conditioned on $\operatorname{silu}(\text{time}) +
\operatorname{silu}(\text{label})$: `--network.label-after-silu`. By default it is $\operatorname{silu}(\text{time} +
\text{label})$.""",
    r"""@inproceedings{schiff2025simple,
  title     = {Simple Guidance Mechanisms for Discrete Diffusion Models},
  author    = {Schiff, Yair and Sahoo, Subham Sekhar and Phung, Hao and Wang, Guanghan and Boshar, Sam and Dalla-torre, Hugo
               and de Almeida, Bernardo P. and Rush, Alexander and Pierrot, Thomas and Kuleshov, Volodymyr},
  booktitle = {International Conference on Learning Representations},
  year      = {2025},
}""",
)

DUO = Method(
    "duo",
    "DUO, the diffusion duality: UDLM's bound after a curriculum",
    {**SETTINGS, "head.curriculum": "duo"},
    r"""Uniform noise is the argmax of Gaussian noise: with $w = a\,e_{x_0} + \sqrt{1-a^2}\,\epsilon$,
$\Pr(\operatorname{argmax} w = y) = P_t(y\mid x_0)$ where

$$\alpha_t = T(a) = \frac{K}{K-1}\Big(\int\varphi(v)\,\Phi(v+r)^{K-1}dv - \frac1K\Big), \qquad r =
\frac{a}{\sqrt{1-a^2}}.$$

In the first half of the run the network is shown the mean of its embedding under $\operatorname{softmax}(w/\tau)$ in place of
that of $x_t = \operatorname{argmax} w$, and $\tau$ falls from 0.1 to 0.01, evenly in $\log\tau$ (the defaults of the authors'
code; the scripts of their runs keep it at 0.001); the second half is `udlm`. The loss is `udlm`'s at $x_t$ all along: while
$\tau > 0$ the training loss is not a bound; validation always uses the bound, on plain tokens. Here $a$ follows from the
schedule of the run; while the curriculum lasts the authors' $\log\frac{1-a^2}{a^2}$ rises evenly with $t$, from -3.5 to
-1.75. It takes a normal number for each token of the vocabulary at each site: with GPT-2's 50,257 tokens give a small
`--micro-batch`. For a training loop of one's own it is `m2s.losses.Relaxed(model, head)`.

The authors' nucleus sampling keeps the likeliest tokens of $\nu$, not of the posterior: `--top-p P --on leave_one_out`.""",
    r"""@inproceedings{sahoo2025duality,
  title     = {The Diffusion Duality},
  author    = {Sahoo, Subham Sekhar and Deschenaux, Justin and Gokaslan, Aaron and Wang, Guanghan and Chiu, Justin
               and Kuleshov, Volodymyr},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
}""",
)
