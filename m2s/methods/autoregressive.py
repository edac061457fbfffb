"""Autoregressive models: token by token, each given the tokens before it."""

from m2s.methods.base import Method
from m2s.methods.config import HeadConfig, ProcessConfig

AUTOREGRESSIVE = Method(
    name="ar",
    title="Autoregressive, exact likelihood",
    process=ProcessConfig(kind="none", schedule="linear"),
    head=HeadConfig(kind="next-token", loss="likelihood"),
    network_time=False,
    sampler="autoregressive",
    text=r"""$p(x) = \prod_i p(x^i\mid x^{<i})$. There is no noise. The network reads the sequence shifted by one position,
behind a start token. A causal transformer without time gives the logits of every $x^i$ in one call. The loss is $-\log
p(x^i\mid x^{<i})$. `m2s evaluate bpd` prints the same number in bits: it is exact, and its only error is that over examples.

Samples are drawn from left to right (`--sampler autoregressive`), with one call of the network per token. The keys and values
of earlier tokens are cached. A prompt is the beginning of a sample. Pixels and their colors are in row-major order.

It represents the autoregressive rows of the image tables (PixelCNN++, Sparse Transformer). It is a plain transformer with
rotary positions in the same trainer. It has neither the convolutions and logistic mixture of the former nor the sparse
attention of the latter. On text its checkpoint can judge other models: `m2s evaluate bpd RUN --data FILE` gives the perplexity
of any text.

A U-Net reads later positions too. Presets with a U-Net therefore use a transformer here: `tiny` for `tiny` and `mnist`, `small`
for `md4`.""",
    bibtex=r"""@inproceedings{salimans2017pixelcnn,
  title     = {{PixelCNN++}: Improving the {PixelCNN} with Discretized Logistic Mixture Likelihood and Other Modifications},
  author    = {Salimans, Tim and Karpathy, Andrej and Chen, Xi and Kingma, Diederik P.},
  booktitle = {International Conference on Learning Representations},
  year      = {2017},
}

@misc{child2019generating,
  title         = {Generating Long Sequences with Sparse Transformers},
  author        = {Child, Rewon and Gray, Scott and Radford, Alec and Sutskever, Ilya},
  year          = {2019},
  eprint        = {1904.10509},
  archivePrefix = {arXiv},
}""",
)
