"""Write docs/methods.md from the descriptions of the methods: python -m m2s.methods.docs_page > docs/methods.md."""

import re
import unicodedata

from m2s.methods import METHODS, HeadConfig, Method, ProcessConfig

INTRODUCTION = """# Methods

Every method here is a choice of the same parts: a process that corrupts, a head, which defines what the network's output
means, a loss, a network. `m2s train mnist --method NAME` trains each on the same batches with the same network. There are two
exceptions. `ar` has a causal transformer, whatever network the preset has. `radd` has the preset's network without its time
input. After training, `m2s sample`, `m2s evaluate` and `m2s audit` run the same code for all methods.

`m2s sample` takes the exact step (`bayes`) where there is a posterior. Each section names the sampler of the method's authors
where it is known; it is given by `--sampler`. Any part can be changed by itself: `--method gidd --process.kind absorbing`.
`m2s cite NAME` prints the BibTeX. `tests/losses/test_equivalences.py` shows which of these losses are equal.

A method is a factory in Python too:

```python
from m2s.methods import METHODS

parts = METHODS["md4"].build(vocab=27)  # parts.head, parts.loss, parts.nelbo_loss, parts.defaults
```

A new method is one file in `m2s/methods/` and one line in its list, or one registration in a plugin:
[method-and-metric.md](extending/method-and-metric.md).

In the equations $k = x_t$ is the token that the network reads at a position. The noise has the distribution $P_t(y\\mid z) =
\\alpha_t\\,[y=z] + m_t(y)$, where it has this form. Its rates are $Q_t$, and the rate into $k$ is $n_t(k)$. The posterior of
the clean token is $\\mu$. The leave-one-out distribution $\\nu$ is the same without the token of the position itself.
"""


def page() -> str:
    """Return the text of docs/methods.md."""
    rows = [f"| [`{m.name}`](#{m.name}) | {m.title} | {' | '.join(_cells(m))} |" for m in METHODS.values()]
    table = "\n".join(["| name | title | process | head | network |", "|---|---|---|---|---|", *rows])
    sections = [
        f"## {m.name}\n\n{m.title}. Sampler: `--sampler {m.sampler}`.\n\n{m.text}\n\n"
        f"Reference: {'; '.join(reference(entry) for entry in m.entries)}.\n"
        for m in METHODS.values()
    ]
    return "\n".join([INTRODUCTION, table + "\n", *sections])


def reference(entry: str) -> str:
    """Return a BibTeX entry in one line.

    Args:
        entry: The entry.

    Returns:
        Authors, title, place and year.
    """
    found = {name: _plain(value) for name, value in re.findall(r"(\w+)\s*=\s*\{((?:[^{}]|\{[^{}]*\})*)\}", entry)}
    names = [author.partition(",")[0] for author in found["author"].split(" and ")]
    who = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    paper = f"[arXiv:{found['eprint']}](https://arxiv.org/abs/{found['eprint']})" if "eprint" in found else ""
    return ", ".join(filter(None, [who, f"*{found['title']}*", found.get("booktitle", paper), found.get("year")]))


def _plain(value: str) -> str:
    """The text of a TeX value, without braces and with umlauts, in one line."""
    value = re.sub(r'\{\\"(\w)\}', lambda letter: unicodedata.normalize("NFC", f"{letter[1]}\u0308"), value)
    return " ".join(value.replace("{", "").replace("}", "").split())


def _cells(method: Method) -> list[str]:
    """The choices of a method: process, head and network."""
    cells = []
    for config, default in ((method.process, ProcessConfig()), (method.head, HeadConfig())):
        changed = {name: value for name, value in vars(config).items() if value != getattr(default, name)}
        names = sorted(changed, key=lambda name: (name != "kind", name))
        cells.append(", ".join(f"{name} {changed[name]}".removeprefix("kind ") for name in names))
    return [*cells, "" if method.network_time else "time no"]


if __name__ == "__main__":
    print(page(), end="")
