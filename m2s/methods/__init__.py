"""The systems that the paper compares with, and ours, each as a choice of the same parts: process, head, loss, network.

    parts = METHODS["md4"].build(vocab=27)      # .head, .loss, .nelbo_loss, .defaults

A new method is one file and one line below; a plugin's is `METHODS.add(method.name, method)`.
"""

from m2s.methods import autoregressive, d3pm, gidd, m2s, md4, neural_ctmc, radd, sedd, tauldr, udlm
from m2s.methods.base import METHODS, Method, MethodDefaults, MethodParts
from m2s.methods.config import HeadConfig, ProcessConfig

for _method in (
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
):
    METHODS.add(_method.name, _method)

__all__ = ["METHODS", "HeadConfig", "Method", "MethodDefaults", "MethodParts", "ProcessConfig"]
