"""Named estimators of the likelihood.

ESTIMATORS.add("mine", Estimator(title="...", source="...", build=..., missing=..., unsupported=...))
"""

from m2s.evaluation.likelihood.any_order import DREAM, LLADA, RADD, RADD_ORDER
from m2s.evaluation.likelihood.base import Estimator
from m2s.evaluation.likelihood.discrete_time import DISCRETE_KL, DISCRETE_TIME
from m2s.evaluation.likelihood.duo import DUO
from m2s.evaluation.likelihood.gidd import GIDD
from m2s.evaluation.likelihood.md4 import MD4
from m2s.evaluation.likelihood.mdlm import MDLM
from m2s.evaluation.likelihood.nelbo import INTEGRAL, NELBO
from m2s.evaluation.likelihood.sedd import SEDD
from m2s.evaluation.likelihood.udlm import UDLM
from m2s.registry import Registry

ESTIMATORS: Registry[Estimator] = Registry("estimator")
"""Every named estimator. A plugin adds its own."""

ESTIMATORS.add("nelbo", NELBO)
ESTIMATORS.add("integral", INTEGRAL)
ESTIMATORS.add("discrete-time", DISCRETE_TIME)
ESTIMATORS.add("discrete-kl", DISCRETE_KL)
ESTIMATORS.add("sedd", SEDD)
ESTIMATORS.add("mdlm", MDLM)
ESTIMATORS.add("md4", MD4)
ESTIMATORS.add("radd", RADD)
ESTIMATORS.add("radd-any-order", RADD_ORDER)
ESTIMATORS.add("llada", LLADA)
ESTIMATORS.add("dream", DREAM)
ESTIMATORS.add("gidd", GIDD)
ESTIMATORS.add("udlm", UDLM)
ESTIMATORS.add("duo", DUO)
