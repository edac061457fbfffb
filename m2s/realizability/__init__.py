"""Which scores a posterior can stand behind, and the nearest one that it can."""

from m2s.conversions.inverse import box
from m2s.realizability.classes import CLASSES, Diagnosis, classify, diagnose
from m2s.realizability.head import Projected
from m2s.realizability.inverse import affine_inverse
from m2s.realizability.projection import project

__all__ = ["CLASSES", "Diagnosis", "Projected", "affine_inverse", "box", "classify", "diagnose", "project"]
