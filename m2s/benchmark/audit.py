"""The four classes of scores and the negative mass of a step, against reading the scores once."""

from typing import Any

import m2s
from m2s.benchmark.comparison import Comparison, under
from m2s.benchmark.projection import scores
from m2s.benchmark.setting import Setting

FUSED, REFERENCE, READ = "m2s, fused", "m2s, reference", "one read (sum)"


def measure(setting: Setting) -> dict[str, Any]:
    score, x_t, t, process = scores(setting)
    contest, s = Comparison(setting), 0.98 * t

    def diagnose() -> m2s.Diagnosis:
        return m2s.diagnose(score, x_t, t, process, s)

    contest.enter(READ, score.sum)
    contest.enter(FUSED, under("fused", diagnose), "fused")
    contest.enter(REFERENCE, under("reference", diagnose))
    contest.run()
    fused, reference = contest.once(FUSED), contest.once(REFERENCE)
    same = None if fused is None or reference is None else float((fused.classes == reference.classes).double().mean())
    return contest.result(
        f"audit of {len(score):,} scores over {setting.vocab:,} tokens, float32",
        {f"{name} / {READ}": contest.ratio(name, READ) for name in contest.found if name != READ}
        | {f"{REFERENCE} / {FUSED}": contest.ratio(REFERENCE, FUSED)},
        [],
        rows_of_the_same_class=same,
    )
