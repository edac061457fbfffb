"""MD4 and MDLM: masks, a posterior, and the cross entropy that score entropy becomes there."""

from dataclasses import replace

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

MD4 = Method(
    name="md4",
    title="MD4, masked diffusion",
    process=ProcessConfig(kind="absorbing", schedule="linear"),
    head=HeadConfig(kind="posterior", offset="none", loss="masked"),
    sampler="ancestral",
    text=r"""At a masked position the network gives the logits of $\mu$, with none for the mask. An unmasked token does not
change. The loss is $\frac{-\alpha_t'}{1-\alpha_t}\,(-\log\mu_{x_0})$ at masked positions, which is score entropy through the
bridge (Theorem 4.6).

The linear schedule is $\tilde\alpha = 1-t$. `--process.schedule cosine`, $\tilde\alpha = 1 - \cos(\frac\pi2(1-t))$, is another
of MD4's. The authors' released code trains with $\alpha = \epsilon + (1-2\epsilon)\,\tilde\alpha$, $\epsilon = 10^{-4}$:
`--process.rescale 1e-4`. By default $\alpha = \tilde\alpha$, as in the paper.

Their U-Net (`--network.kind unet --network.multipliers 1`, at any width) has `--network.groups 32 --network.sinusoids
sin-first`. With these two options ours computes the same function of the same weights. Class labels are the exception: theirs
are appended to the features of the time.""",
    bibtex=r"""@inproceedings{shi2024simplified,
  title     = {Simplified and Generalized Masked Diffusion for Discrete Data},
  author    = {Shi, Jiaxin and Han, Kehang and Wang, Zhe and Doucet, Arnaud and Titsias, Michalis K.},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}""",
)
MDLM = replace(
    MD4,
    name="mdlm",
    title="MDLM, masked diffusion language models",
    process=ProcessConfig(kind="absorbing", schedule="log-linear"),
    text=r"""The same loss as `md4`, derived by two substitution rules: the mask has no logit, and unmasked tokens are copied.
Its schedule is log-linear, $\alpha_t = 1 - (1-\epsilon)\,t$. The authors' released network does not see the time (their
`time_conditioning` is off). `--network.time no` does the same, and is `radd`. By default the network is that of the other
methods.""",
    bibtex=r"""@inproceedings{sahoo2024simple,
  title     = {Simple and Effective Masked Diffusion Language Models},
  author    = {Sahoo, Subham Sekhar and Arriola, Marianne and Schiff, Yair and Gokaslan, Aaron and Marroquin, Edgar
               and Chiu, Justin T. and Rush, Alexander and Kuleshov, Volodymyr},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}""",
)
