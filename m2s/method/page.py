"""docs/methods.md, out of what the methods say of themselves: python -m m2s.method.page > docs/methods.md."""

from collections.abc import Mapping

from m2s.method import METHODS

INTRODUCTION = """# Methods

Every system here is a choice of the same parts: a process that corrupts, a head that says what the network's output means, a
loss, a network. So `m2s train mnist --method NAME` trains each on the same batches with the same network, but for two: `ar` has
a causal transformer, which sees only what stands before a site, whatever network the preset has, and `radd` has the preset's
network without its input for the time. Everything after training (`m2s sample`, `m2s evaluate`, `m2s audit`) is the same code.
Any part can be given by itself: `--method gidd --process.kind absorbing`. `m2s cite NAME` prints the BibTeX.
`tests/test_equivalences.py` shows which of these losses are one and the same.

A new method is one file in `m2s/method/` and one name in its list, if its parts exist. A loss, a head or a process that does
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
    sections = [f"## {m.name}\n\n{m.title}. Sampler: `{m.sampler}`.\n\n{m.text}\n" for m in METHODS.values()]
    return "\n".join([INTRODUCTION, table + "\n", *sections])


def _cells(settings: Mapping[str, object]) -> list[str]:
    """The settings of each section of the configuration, kind first."""
    cells = []
    for section in COLUMNS:
        names = sorted((key.partition(".")[2] for key in settings if key.startswith(section)), key=lambda n: (n != "kind", n))
        cells.append(", ".join(f"{name} {settings[f'{section}.{name}']}".removeprefix("kind ") for name in names))
    return cells


if __name__ == "__main__":
    print(page(), end="")
