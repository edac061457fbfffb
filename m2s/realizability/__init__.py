"""Realizability: which scores are the bridge of a posterior, and the posterior whose bridge is nearest to a score."""

from m2s.conversions.inverse import affine_inverse, box
from m2s.realizability.classes import SCORE_CLASSES, Diagnosis, classify, diagnose
from m2s.realizability.head import Projected
from m2s.realizability.projection import project

__all__ = ["SCORE_CLASSES", "Diagnosis", "Projected", "affine_inverse", "box", "classify", "diagnose", "project"]
