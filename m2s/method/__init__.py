"""The systems that the paper compares with, and ours, each as a choice of the same parts: process, head, loss, network.

A new one is one file, and one name in the list below.
"""

from m2s.method import gidd, m2s, md4, neural_ctmc, radd, sedd, udlm
from m2s.method.base import Method

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        m2s.M2S,
        m2s.OFFSET,
        m2s.HYBRID,
        sedd.UNIFORM,
        sedd.ABSORBING,
        md4.MD4,
        md4.MDLM,
        radd.RADD,
        gidd.GIDD,
        gidd.CLIPPED,
        udlm.UDLM,
        neural_ctmc.NEURAL_CTMC,
    )
}

__all__ = ["METHODS", "Method"]
