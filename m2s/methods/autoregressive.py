"""Autoregressive: token by token, each given those before."""

from m2s.methods.base import Method

AUTOREGRESSIVE = Method(
    "ar",
    "Autoregressive, exact likelihood",
    {
        "head.kind": "next-token",
        "head.loss": "likelihood",
        "process.kind": "none",
        "process.schedule": "linear",
        "network.time": "no",
    },
    r"""$p(x) = \prod_i p(x^i\mid x^{<i})$. No noise: the network is shown the sequence moved on by one site, behind a start
token, and a causal transformer, without time, gives the logits of every $x^i$ in one call. The loss is $-\log p(x^i\mid
x^{<i})$, and so are the bits that `m2s evaluate bpd` prints: exact, with no bound, no passes, and no error but that over rows.
Samples are drawn from left to right (`--sampler autoregressive`), one call of the network for each token, on its site alone:
the keys and values of those before it are kept. A prompt is what they begin with. Pixels and their colours come row by row. It
stands for the autoregressive rows of the image tables (PixelCNN++ ... Sparse Transformer), with neither the convolutions and
mixture of logistics of the one nor the sparse attention of the other: a plain transformer with rotary positions, in the same
trainer. On text its checkpoint is a judge that was trained here: `m2s evaluate bpd RUN --data FILE` gives the perplexity of
any text.

A U-Net sees what is to come, so that presets with one are trained with a transformer in its place: `tiny` for `tiny` and
`mnist`, `small` for `md4`.""",
    r"""@inproceedings{salimans2017pixelcnn,
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
    "autoregressive",
)
