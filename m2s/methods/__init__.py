"""The systems that the paper compares with, and ours, each as a choice of the same parts: process, head, loss, network.

A new one is one file, and one name in the list below.
"""

from m2s.methods import autoregressive, d3pm, gidd, m2s, md4, neural_ctmc, radd, sedd, tauldr, udlm
from m2s.methods.base import Method

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
        udlm.DUO,
        neural_ctmc.NEURAL_CTMC,
        d3pm.UNIFORM,
        d3pm.ABSORBING,
        d3pm.GAUSSIAN,
        tauldr.GAUSSIAN,
        tauldr.ABSORBING,
        tauldr.M2S,
        autoregressive.AUTOREGRESSIVE,
    )
}

__all__ = ["METHODS", "Method"]
