"""Operations over a large vocabulary, those of training a transformer (`embedding`, `norm`, `rotary`, `gelu`, `adamw`) and
random numbers (`philox`), each in two forms: `reference.py`, readable and for any device, and `triton.py`, fused.

Every other folder is one operation on rows of logits, but for `columns`, which is part of the products. `linear.py` makes the
rows out of hidden states and the last layer some at a time, so that the logits of all sites never exist at once; `dense.py` is
a layer inside the network. Triton is imported where it is used and not before.
"""

from m2s.ops.backend import probe_triton, use_backend, uses_triton, why_unavailable

__all__ = ["probe_triton", "use_backend", "uses_triton", "why_unavailable"]
