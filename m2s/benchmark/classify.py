"""Part "classify": classifying scores and measuring negative mass (`m2s.diagnose`), against reading the scores once."""

from typing import Any

import m2s
from m2s.benchmark.comparison import Comparison, with_backend
from m2s.benchmark.projection import scores
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting

FUSED, REFERENCE, READ = "m2s, fused", "m2s, reference", "one read (sum)"


@PARTS.register("classify")
def measure(setting: Setting) -> dict[str, Any]:
    """Compare the fused and the readable classification with one read of the scores.

    Args:
        setting: Sizes and device.

    Returns:
        Times, ratios, and the fraction of rows that both put into the same class.
    """
    score, x_t, t, process = scores(setting)
    comparison, s = Comparison(setting), 0.98 * t

    def diagnose() -> m2s.Diagnosis:
        return m2s.diagnose(score, x_t, t, process, s)

    comparison.add(READ, score.sum)
    comparison.add(FUSED, with_backend("fused", diagnose), "fused")
    comparison.add(REFERENCE, with_backend("reference", diagnose))
    comparison.run()
    fused, reference = comparison.output(FUSED), comparison.output(REFERENCE)
    same = None if fused is None or reference is None else float((fused.classes == reference.classes).double().mean())
    return comparison.result(
        f"classification of {len(score):,} scores over {setting.vocab:,} tokens, float32",
        {f"{name} / {READ}": comparison.ratio(name, READ) for name in comparison.results if name != READ}
        | {f"{REFERENCE} / {FUSED}": comparison.ratio(REFERENCE, FUSED)},
        [],
        rows_of_the_same_class=same,
    )
