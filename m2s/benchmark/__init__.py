"""What `m2s benchmark` measures: time, memory and accuracy, as ratios within one run.

A part is one file of this package and one registration in `PARTS`:

    @PARTS.register("my-part")
    def measure(setting: Setting) -> dict[str, Any]:
        comparison = Comparison(setting)
        comparison.add("fast", fast)
        comparison.add("slow", slow)
        comparison.run()
        return comparison.result("what is measured", {"slow / fast": comparison.ratio("slow", "fast")}, [])

`comparison.py` is the only harness: it measures times and memory, compares them, and judges bars. Only the command
`m2s benchmark` and the scripts in benchmarks/ import this package.
"""

from m2s.benchmark import (  # noqa: I001  (the order of the parts in the output)
    loss,
    projection,
    classify,
    audit,
    reverse_step,
    train,
    ablation,
    sample,
    direct_loss,
    plain_loop,
    bisection,
    dense_step,
    transition_matrices,
    row_kernel,
    images,
    image_ablation,
)
from m2s.benchmark.registry import PARTS
from m2s.benchmark.setting import Setting

__all__ = [
    "PARTS",
    "Setting",
    "ablation",
    "audit",
    "bisection",
    "classify",
    "dense_step",
    "direct_loss",
    "image_ablation",
    "images",
    "loss",
    "plain_loop",
    "projection",
    "reverse_step",
    "row_kernel",
    "sample",
    "train",
    "transition_matrices",
]
