"""Which devices can be used here."""

import torch


def unusable(device: str) -> str:
    """Why nothing can be computed on `device` here; empty where it can."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        return "it must be cpu, cuda, or one of several as in cuda:1"
    if kind.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU"
    if kind.type == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    try:
        torch.zeros(1, device=kind)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).strip().split("\n")[0].rstrip(".")
    return ""
