"""`m2s demo`: the story of the paper on three tokens, in a dozen lines, a figure and a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m2s.report import Refused, folder, target

if TYPE_CHECKING:
    from m2s.report.classes import Row
    from m2s.report.toy import ToyData


@dataclass(frozen=True)
class Demo:
    """Tell the story of the paper on three tokens: a figure, a table and a dozen lines. Under a minute.

    Example: m2s demo --out out/demo
    """

    out: Path = Path("out/demo")
    """The folder for toy.png, toy.json and classes.json."""
    seed: int = 0
    """Of the random scores in the table."""

    def run(self) -> None:
        if not 0 <= self.seed < 2**31:
            raise Refused(f"the seed is {self.seed}, but it must lie in 0..{2**31 - 1}")
        folder(self.out)
        picture, counts = self.out / "toy.png", self.out / "classes.json"
        for path in (picture, picture.with_suffix(".json"), counts):
            target(path, (path.suffix,))

        from tqdm import tqdm

        from m2s.report import classes, toy

        rows = []
        with tqdm(total=len(classes.settings()) + 2, disable=None, leave=False) as bar:
            bar.set_description("reverse process")
            data = toy.toy_data()
            bar.update()
            bar.set_description("figure")
            toy.save(data, picture)
            bar.update()
            bar.set_description("random scores")
            for row in classes.random_classes(self.seed):
                rows.append(row)
                bar.update()
        classes.save(rows, counts, self.seed)
        print("\n".join(story(data, rows)))
        print(f"\n{classes.table(rows)}\n")
        print(f"The figure is {picture}, its numbers {picture.with_suffix('.json')}; the table is {counts}.")


def story(data: ToyData, rows: list[Row]) -> list[str]:
    """What the figure and the table show, with their numbers."""
    law = ", ".join(f"{p:g}" for p in data.law)
    (s1, s2), (a1, a2), (b1, b2) = data.score, data.a, data.b
    worst = data.a_signed.index(min(data.a_signed))
    token = {data.current: "k", data.first: "y1", data.second: "y2"}[worst]
    slopes = [data.at(data.gradient, c) for c in data.band]
    raw, projected = ([data.at(values, c) for c in data.box] for values in (data.tv, data.tv_projected))
    free = [row for row in rows if row.source.startswith("free")]
    headed = [row for row in rows if row not in free]
    without = sum(row.before.outside + row.before.material for row in free)
    left = sum(row.after.outside + row.after.material for row in free)
    headed_without = sum(row.before.outside + row.before.material for row in headed)
    total, headed_total = (sum(row.vectors for row in part) for part in (free, headed))
    return [
        f"Three tokens of law ({law}) are corrupted uniformly; at t = {data.time:g} the rarest, k, is seen.",
        f"The exact scores of the two others, y1 and y2, are s* = ({s1:.3f}, {s2:.3f}).",
        f"The scores of any posterior lie in the box [{data.rho:g}, {1 / data.rho:g}]^2, but they fill only a triangle in it.",
        f"Multiply the score of y1 by c: it stays in the box for c in [{data.box[0]:.3f}, {data.box[1]:.3f}],",
        f"but has a posterior only for c in [{data.band[0]:.3f}, {data.band[1]:.3f}]. Checks of single scores miss that.",
        f"Point A = ({a1:.3f}, {a2:.3f}) passes them all, yet its only 'posterior' gives {token} {data.a_signed[worst]:.3f}.",
        f"The nearest score with a posterior is B = ({b1:.3f}, {b2:.3f}), on the edge of what M2S can say.",
        f"Score entropy sees no edge: its log-score gradient there is {slopes[0]:.3f} and {slopes[1]:.3f}, and runs on.",
        f"With c = {data.box[0]:.3f} at every time the reverse process misses the data law by {raw[0]:.3f} (total variation),",
        f"projected by {projected[0]:.3f}; with c = {data.box[1]:.3f} by {raw[1]:.3f}, projected by {projected[1]:.3f}.",
        "Here projection helps (not for every law and c). But a wrong score can have a posterior: no projection mends that.",
        f"Of {total} random free scores, {without / total:.1%} have no posterior; of the projected ones, {left}.",
        f"Of {headed_total} scores of a posterior head with random logits, {headed_without}: there it is built in.",
    ]
