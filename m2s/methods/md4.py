"""MD4 and MDLM: masks, a posterior, and the cross entropy that score entropy becomes there."""

from m2s.methods.base import Method

SETTINGS = {"head.kind": "posterior", "head.offset": "none", "head.loss": "masked", "process.kind": "absorbing"}

MD4 = Method(
    "md4",
    "MD4, masked diffusion",
    {**SETTINGS, "process.schedule": "linear"},
    r"""At a masked site the network gives the logits of $\mu$, with none for the mask; a token that is not masked stays. The
loss is $\frac{-\alpha_t'}{1-\alpha_t}\,(-\log\mu_{x_0})$ at masked sites, which is score entropy through the bridge
(Theorem 4.6). The linear schedule is $\tilde\alpha = 1-t$; `--process.schedule cosine`, $\tilde\alpha = 1 -
\cos(\frac\pi2(1-t))$, is another of MD4's. The authors' released code trains with $\alpha = \epsilon +
(1-2\epsilon)\,\tilde\alpha$, $\epsilon = 10^{-4}$: `--process.rescale 1e-4`. By default $\alpha = \tilde\alpha$, as in the
paper. Their U-Net (`--network.kind unet --network.multipliers 1`, at any width) has `--network.groups 32 --network.sinusoids
sin-first`: with these two options ours computes the same function of the same weights, but for class labels, which theirs
appends to the time's features.""",
    r"""@inproceedings{shi2024simplified,
  title     = {Simplified and Generalized Masked Diffusion for Discrete Data},
  author    = {Shi, Jiaxin and Han, Kehang and Wang, Zhe and Doucet, Arnaud and Titsias, Michalis K.},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}""",
    "ancestral",
)
MDLM = Method(
    "mdlm",
    "MDLM, masked diffusion language models",
    {**SETTINGS, "process.schedule": "log-linear"},
    r"""The same loss as `md4`, reached by two rules of substitution: the mask has no logit, and what is not masked is carried
over. Its schedule is the log-linear one, $\alpha_t = 1 - (1-\epsilon)\,t$. The authors' released network does not see the time
(their `time_conditioning` is off): `--network.time no` does as they do, and is `radd`; by default the network is that of all
other methods.""",
    r"""@inproceedings{sahoo2024simple,
  title     = {Simple and Effective Masked Diffusion Language Models},
  author    = {Sahoo, Subham Sekhar and Arriola, Marianne and Schiff, Yair and Gokaslan, Aaron and Marroquin, Edgar
               and Chiu, Justin T. and Rush, Alexander and Kuleshov, Volodymyr},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}""",
    "ancestral",
)
