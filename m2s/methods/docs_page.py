"""Write docs/methods.md from the descriptions of the methods: python -m m2s.methods.docs_page > docs/methods.md."""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

from m2s.methods import METHODS, HeadConfig, Method, ProcessConfig

RESULTS = Path(__file__).parents[2] / "experiments" / "results"

INTRODUCTION = """# Methods

Every method here is a choice of the same parts: a process that corrupts, a head, which defines what the network's output
means, a loss, a network. `m2s train mnist --method NAME` trains each on the same batches with the same network. There are two
exceptions. `ar` has a causal transformer, whatever network the preset has. `radd` has the preset's network without its time
input. After training, `m2s sample`, `m2s evaluate` and `m2s audit` run the same code for all methods.

## All methods

A picture leads to the equations, the commands and the numbers of its method. [Masks or uniform
noise?](faq.md#masks-or-uniform-noise) helps with the choice.
"""

READING = """## How to read a section

`m2s sample` takes the exact step (`bayes`) where there is a posterior. Each section names the sampler of the method's authors
where it is known; it is given by `--sampler`. Any part can be changed by itself: `--method gidd --process.kind absorbing`.
`m2s cite NAME` prints the BibTeX. `tests/losses/test_equivalences.py` shows which of these losses are equal.

A method is a factory in Python too:

```python
from m2s.methods import METHODS

parts = METHODS["md4"].build(vocab=27)  # parts.head, parts.loss, parts.nelbo_loss, parts.defaults
```

A new method is one file in `m2s/methods/` and one line in its list, or one registration in a plugin:
[A method and a metric](extending/method-and-metric.md).

In the equations $k = x_t$ is the token that the network reads at a position. The noise has the distribution $P_t(y\\mid z) =
\\alpha_t\\,[y=z] + m_t(y)$, where it has this form. Its rates are $Q_t$, and the rate into $k$ is $n_t(k)$. The posterior of
the clean token is $\\mu$. The leave-one-out distribution $\\nu$ is the same without the token of the position itself.

### Pictures and numbers

The samples and numbers show that every method trains and samples by the same commands. One seed and such budgets do not show
which method is best.

- The picture has 24 samples at 64 sampling steps, after {training_steps} training steps on 8 x 8 digits. The first row of the
  table below it is the NELBO of this network. `python experiments/gallery.py out/gallery` made both
  ([gallery.json](../experiments/results/gallery.json)).
- The second row has 1,000 training steps, the preset's number, and the Fréchet distance between the pixels of 512 samples and
  the training images ([methods.json](../experiments/results/methods.json)). For 256 held-out images it is {held_out:.3f}.
- The third row is MNIST: a larger U-Net, 3,000 training steps of 256 images, and FID at 100 sampling steps, for `ar` at 784
  ([mnist.json](../experiments/results/mnist.json)). `m2s-hybrid` is `gidd` there.

The unit of the NELBO is bits per pixel, and "±" is its standard error over times. Lower is better. For `ar` it is the exact
NLL, and lower after 400 training steps than after 1,000. These are 24 held-out digits:

![24 held-out digits](gallery/data.png)
"""

# The kinds of noise, in the order of the page, with the kinds of process that belong to each.
NOISE = {
    "Uniform noise: a token becomes any other": ("uniform", "chain-uniform"),
    "Masks: a token is hidden": ("absorbing", "chain-absorbing"),
    "Masks and uniform noise": ("hybrid",),
    "Ordered levels: a token becomes a near one": ("gaussian", "chain-gaussian"),
    "No noise": ("none",),
}


def page(results: Path = RESULTS) -> str:
    """Return the text of docs/methods.md.

    Args:
        results: The folder with gallery.json, methods.json and mnist.json.
    """
    found = {
        name: json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in ("gallery", "methods", "mnist")
    }
    reading = READING.replace("{training_steps}", str(found["gallery"]["settings"]["training_steps"]))
    reading = reading.replace("{held_out:.3f}", f"{found['methods']['held_out_distance']:.3f}")
    rows = [f"| [`{m.name}`](#{m.name}) | {m.title} | {' | '.join(_cells(m))} |" for m in METHODS.values()]
    table = "\n".join(["| name | title | process | head | network |", "|---|---|---|---|---|", *rows])
    sections = [
        f"## {m.name}\n\n{m.title}. Sampler: `--sampler {m.sampler}`.\n\n{m.text}\n\n{_commands(m)}\n\n"
        f"![Samples of {m.name}](gallery/{m.name}.png)\n\n{_numbers(m.name, found)}\n\n"
        f"Reference: {'; '.join(reference(entry) for entry in m.entries)}.\n"
        for m in METHODS.values()
    ]
    return "\n".join([INTRODUCTION, *_pictures(), table + "\n", reading, *sections])


def _pictures() -> list[str]:
    """The samples of all methods by the kind of noise, in Markdown. Each picture is a link to the section of its method."""
    parts = []
    for title, kinds in NOISE.items():
        links = [
            f"[![Samples of {m.name}](gallery/{m.name}.png)<br>`{m.name}`](#{m.name})"
            for m in METHODS.values()
            if m.process.kind in kinds
        ]
        parts.append(f'**{title}**\n\n<div class="m2s-gallery" markdown>\n\n' + "\n\n".join(links) + "\n\n</div>\n")
    return parts


def _commands(method: Method) -> str:
    """The commands that train a method and draw samples, in Markdown."""
    run = f"runs/{method.name}"
    return (
        f"```text\nm2s train digits --method {method.name} --out {run}\n"
        f"m2s sample {run} --sampler {method.sampler} --steps 64 --n 24 --out {method.name}.png\n```"
    )


def _numbers(name: str, found: dict[str, Any]) -> str:
    """The table of the numbers of a method, in Markdown."""
    gallery, digits, mnist = (next((row for row in found[key]["rows"] if row["method"] == name), None) for key in found)
    assert gallery is not None and digits is not None
    steps = found["gallery"]["settings"]["training_steps"]
    rows = [
        f"| digits, the picture | {steps} | {_bits(gallery['bits'], gallery['error'])} | |",
        f"| digits | 1,000 | {_bits(digits['bits'], digits['error'])} | distance {digits['distance']:.3f} |",
    ]
    if mnist is not None:
        bits, fid = mnist["bound"]["bound"]["value"], mnist["samples"][-1]["fid"]
        rows.append(f"| MNIST | {mnist['settings']['updates']:,} | {bits:.3f} | FID {fid:.2f} |")
    return "\n".join(["| data | training steps | NELBO | samples |", "|---|---|---|---|", *rows])


def _bits(value: float, error: float | None) -> str:
    """A likelihood with its error, where it has one."""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


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
