"""Operations with Triton kernels: large-vocabulary losses, sampling steps, and the layers of a training step.

Each folder is one operation. Its files are

- `naive.py`: the readable definition in plain torch;
- `cpu.py`, where it exists: a tuned version in torch for any device, used where Triton does not run;
- `triton.py`: the fused GPU kernels. Triton is imported only where a kernel is launched.

`m2s.ops.backend` chooses between them. The losses over the vocabulary (`posterior_entropy`, `score_entropy`,
`factorized_entropy`, `cross_entropy`) work on rows of logits. `linear_loss.py` computes these rows from hidden states in
chunks, so that the logits of all positions never exist at once.
"""

from m2s.ops.backend import probe_triton, use_backend, uses_triton, why_unavailable

__all__ = ["probe_triton", "use_backend", "uses_triton", "why_unavailable"]
