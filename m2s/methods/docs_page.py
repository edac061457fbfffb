"""docs/methods.md, out of what the methods say of themselves: python -m m2s.methods.docs_page > docs/methods.md."""

import re
import unicodedata
from collections.abc import Mapping

from m2s.methods import METHODS

INTRODUCTION = """# Methods

Every system here is a choice of the same parts: a process that corrupts, a head that says what the network's output means, a
loss, a network. So `m2s train mnist --method NAME` trains each on the same batches with the same network, but for two: `ar` has
a causal transformer, which sees only what stands before a site, whatever network the preset has, and `radd` has the preset's
network without its input for the time. Everything after training (`m2s sample`, `m2s evaluate`, `m2s audit`) is the same code.
`m2s sample` takes the exact step (`bayes`) wherever there is a posterior; the sampler that a section names, its authors' where
that is known, is given by `--sampler`.
Any part can be given by itself: `--method gidd --process.kind absorbing`. `m2s cite NAME` prints the BibTeX.
`tests/losses/test_equivalences.py` shows which of these losses are one and the same.

A new method is one file in `m2s/methods/` and one name in its list, if its parts exist. A loss, a head or a process that does
not is a file of its own and a few lines besides: [own.md](own.md#adding-a-method) says which.

In the equations $k = x_t$ is the token that the network sees at a site, $P_t(y\\mid z) = \\alpha_t\\,[y=z] + m_t(y)$ the law
of the noise (where it has this form), $Q_t$ its rates, $n_t(k)$ the rate into $k$, $\\mu$ the posterior of the clean token and
$\\nu$ the same without the site's own token.
"""


COLUMNS = ("process", "head", "network")


def page() -> str:
    """The whole page."""
    rows = [f"| [`{m.name}`](#{m.name}) | {m.title} | {' | '.join(_cells(m.settings))} |" for m in METHODS.values()]
    table = "\n".join([f"| name | what it is | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS), *rows])
    sections = [
        f"## {m.name}\n\n{m.title}. Sampler: `--sampler {m.sampler}`.\n\n{m.text}\n\n"
        f"Reference: {'; '.join(reference(entry) for entry in m.entries)}.\n"
        for m in METHODS.values()
    ]
    return "\n".join([INTRODUCTION, table + "\n", *sections])


def reference(entry: str) -> str:
    """A BibTeX entry in a line: who, what, where, when."""
    found = {name: _plain(value) for name, value in re.findall(r"(\w+)\s*=\s*\{((?:[^{}]|\{[^{}]*\})*)\}", entry)}
    names = [author.partition(",")[0] for author in found["author"].split(" and ")]
    who = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    paper = f"[arXiv:{found['eprint']}](https://arxiv.org/abs/{found['eprint']})" if "eprint" in found else ""
    return ", ".join(filter(None, [who, f"*{found['title']}*", found.get("booktitle", paper), found.get("year")]))


def _plain(value: str) -> str:
    """TeX's braces and umlauts as they are meant, in one line."""
    value = re.sub(r'\{\\"(\w)\}', lambda letter: unicodedata.normalize("NFC", f"{letter[1]}\u0308"), value)
    return " ".join(value.replace("{", "").replace("}", "").split())


def _cells(settings: Mapping[str, object]) -> list[str]:
    """The settings of each section of the configuration, kind first."""
    cells = []
    for section in COLUMNS:
        names = sorted((key.partition(".")[2] for key in settings if key.startswith(section)), key=lambda n: (n != "kind", n))
        cells.append(", ".join(f"{name} {settings[f'{section}.{name}']}".removeprefix("kind ") for name in names))
    return cells


if __name__ == "__main__":
    print(page(), end="")
