"""The weights that `scripts/make_weights.py` makes: how each group is trained and measured, and what its model cards say."""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2s.data import Characters, prepare_text, root
from m2s.data.documents import find_sources
from m2s.errors import UserError
from m2s.hub import builtin
from m2s.hub.card import position_name
from m2s.io import atomic_write, output_folder
from m2s.presets import PRESETS
from m2s.training.config import Config, replace

TERMS = ("nelbo", "integral", "prior", "reconstruction")
TEXT_FOLDER = "gutenberg-chars"  # of the prepared text, in $M2S_DATA
CHARACTERS = 60_000_000  # of the text that are used
LICENSE = "The weights have the license of the package, Apache-2.0."


@dataclass(frozen=True)
class Recipe:
    """How weights are trained.

    Args:
        summary: One line about them, for lists.
        config: The training run.
    """

    summary: str
    config: Config


def configured(preset: str, **settings: Any) -> Config:
    """Return a preset with other values.

    Args:
        preset: The name of the preset.
        **settings: Values by name, with "__" for ".": `optimizer__lr=1e-3`.
    """
    config = PRESETS[preset]
    for key, value in settings.items():
        config = replace(config, key.replace("__", "."), value)
    return config


@dataclass(frozen=True)
class Group:
    """Weights that are trained on the same data and compared with each other.

    Args:
        name: The name of the group.
        recipes: The weights by name.
        data: What they were trained on, with its license, for the model card.
        device: Where they are measured; "": a GPU where there is one.
        passes: Times per example of the NELBO.
        limit: The NELBO is that of so many held-out examples, evenly spread; None: all.
    """

    name: str
    recipes: Mapping[str, Recipe]
    data: str
    device: str = "cpu"
    passes: int = 16
    limit: int | None = None

    def prepare(self, text: Path | None) -> None:
        """Prepare the data.

        Args:
            text: A file of text; None where none is needed.

        Raises:
            UserError: The group needs a text, or needs none.
        """
        if text is not None:
            raise UserError(f"--text is {text}, but {self.name} is not trained on text: leave it out")

    def commands(self, work: Path) -> list[list[str]]:
        """Return the commands that measure the weights.

        Args:
            work: The folder for their results.
        """
        limit = [] if self.limit is None else ["--limit", str(self.limit)]
        words = [["evaluate", "bpd", builtin.PREFIX + name, "--passes", str(self.passes), *limit] for name in self.recipes]
        return [self.with_device(each) + out(work / f"{name}-bpd.json") for each, name in zip(words, self.recipes, strict=True)]

    def with_device(self, words: list[str]) -> list[str]:
        """Return a command with the device.

        Args:
            words: The command.
        """
        return [*words, "--device", self.device] if self.device else words

    def read(self, work: Path) -> dict[str, dict[str, Any]]:
        """Return the contents of figures.json from the results of the commands, by name of the weights.

        Args:
            work: The folder of the results.
        """
        found = {}
        for name in self.recipes:
            bpd = read(work / f"{name}-bpd.json")
            bits = {term: {key: bpd[term]["bits"][key] for key in ("value", "error", "rows_error")} for term in TERMS}
            values = {"bits": bits, "examples": bpd["rows"], "passes": self.passes}
            commands = [shown(words, work) for words in self.commands(work) if concerns(words, name)]
            found[name] = {"commands": commands, "versions": bpd["versions"], "device": bpd["device"], "values": values}
        return found

    def card(self, name: str, figures: Mapping[str, Any]) -> str:
        """Return the section of the model card that has the numbers.

        Args:
            name: The name of the weights.
            figures: The contents of figures.json.
        """
        values = figures["values"]
        bits, unit = values["bits"], position_name(read(builtin.folder() / name / "config.json")["data"])
        terms = ", ".join(f"{term} {bits[term]['value']:.4f}" for term in TERMS[1:])
        lines = [
            f"NELBO on {values['examples']:,} held-out examples, {values['passes']} times each: "
            f"**{bits['nelbo']['value']:.4f} ± {bits['nelbo']['rows_error']:.4f}** bits per {unit} (standard error "
            f"over examples; {terms}).",
            "",
            *self.more(name, figures),
            "Measured with the weights of this folder by",
            "",
            "```bash",
            *figures["commands"],
            "```",
            "",
            f"`python scripts/make_weights.py {self.name} --check` in a clone runs them and compares the results.",
        ]
        return "\n".join(lines)

    def more(self, name: str, figures: Mapping[str, Any]) -> list[str]:
        """Return further lines of the model card, such as a table of samples.

        Args:
            name: The name of the weights.
            figures: The contents of figures.json.
        """
        return []


@dataclass(frozen=True)
class ImageGroup(Group):
    """Weights for images: their samples are compared by the Fréchet distance of pixels.

    Args:
        against: The split of the data that samples are compared with.
        n: Samples of each model at each number of steps.
    """

    against: str = "digits:train"
    n: int = 512

    def commands(self, work: Path) -> list[list[str]]:
        places = [builtin.PREFIX + name for name in self.recipes]
        compare = ["compare", *places, "--against", self.against, "--n", str(self.n)]
        return [*super().commands(work), self.with_device(compare) + out(work / "compare")]

    def read(self, work: Path) -> dict[str, dict[str, Any]]:
        found, compared = super().read(work), read(work / "compare" / "compare.json")
        real = compared["reference"]["real"]
        distances = {
            str(entry["steps"]): {
                arm: {key: value[key] for key in ("value", "error")} for arm, value in entry["distances"].items()
            }
            for entry in compared["steps"]
        }
        for figures in found.values():
            figures["values"] |= {
                "pixel_distance": distances,
                "real_images": None if real is None else real["distance"]["value"],
            }
        return found

    def more(self, name: str, figures: Mapping[str, Any]) -> list[str]:
        values = figures["values"]
        steps, real = values["pixel_distance"], values["real_images"]
        arms = next(iter(steps.values()))
        about = (
            f"Fréchet distance of pixels between {self.n} samples and {self.against}, on the same noise (`m2s compare`), "
            "by sampling steps."
        )
        cells = {arm: [f"{found[arm]['value']:.3f}" for found in steps.values()] for arm in arms}
        rows = [f"| {arm} | {' | '.join(values)} |" for arm, values in cells.items()]
        return [
            about + ("" if real is None else f" Real images have {real:.3f}."),
            "",
            f"| | {' | '.join(steps)} |",
            "|---" * (len(steps) + 1) + "|",
            *rows,
            "",
        ]


@dataclass(frozen=True)
class TextGroup(Group):
    """Weights for characters of text: the words of their samples are compared with the training text and with adversaries.

    Args:
        n: Samples.
        steps: Sampling steps.
        length: Characters of a sample.
    """

    n: int = 128
    steps: int = 64
    length: int = 128

    def prepare(self, text: Path | None) -> None:
        folder = root() / TEXT_FOLDER
        if (folder / "meta.json").exists():
            return
        if text is None:
            raise UserError(f"{folder} has no prepared text: give --text FILE, a text of Project Gutenberg")
        source = output_folder(folder.with_name(f"{TEXT_FOLDER}-source")) / "gutenberg.txt"
        with atomic_write(source) as temporary, temporary.open("w", encoding="ascii") as file:
            for document in simplified(text, CHARACTERS):
                file.write(f"{document}\n<|endoftext|>\n")
        prepare_text(source, folder, Characters())

    def commands(self, work: Path) -> list[list[str]]:
        (name,) = self.recipes
        folder, samples, adversaries = str(root() / TEXT_FOLDER), work / "samples.npz", work / "adversaries"
        sample = ["sample", builtin.PREFIX + name, "--n", str(self.n), "--steps", str(self.steps)]
        made = ["unigram", "bigram", "shuffled"]
        adversary = ["data", "adversaries", folder, "--names", *made]
        files = [str(samples), *(str(adversaries / f"{each}.npz") for each in made)]
        return [
            *super().commands(work),
            self.with_device(sample) + out(samples),
            [*adversary, "--n", str(self.n), "--length", str(self.length), *out(adversaries)],
            ["evaluate", "text", *files, "--against", folder, "--metrics", "vocabulary", "repetition", *out(work / "text")],
        ]

    def read(self, work: Path) -> dict[str, dict[str, Any]]:
        found = super().read(work)
        rows = {row["name"]: row["values"]["text"] for row in read(work / "text" / "text.json")["files"]}
        columns = {"vocabulary": ("known_words", "frequent_words"), "repetition": ("distinct_4",)}
        measured = {
            row: {column: values[metric][column]["value"] for metric, names in columns.items() for column in names}
            for row, values in rows.items()
        }
        for figures in found.values():
            figures["values"]["text"] = measured
        return found

    def more(self, name: str, figures: Mapping[str, Any]) -> list[str]:
        text = figures["values"]["text"]
        rows = [
            f"| {row} | {values['known_words']:.3f} | {values['frequent_words']:.3f} | {values['distinct_4']:.3f} |"
            for row, values in text.items()
        ]
        return [
            f"Words of {self.n} samples of {self.length} characters at {self.steps} steps (`m2s evaluate text`): the fraction "
            "that occurs in the training text, and that occurs there at least ten times. The last column is the number of "
            "distinct 4-grams of characters over all of them.",
            "",
            "| | known words | frequent words | distinct 4-grams |",
            "|---|---|---|---|",
            *rows,
            "",
        ]


def simplified(path: Path, characters: int) -> Iterator[str]:
    """Yield the documents of a text in the 27 characters of text8, each with a space at its end.

    Apostrophes vanish, accents are left out, and everything else that is no letter becomes one space.

    Args:
        path: The text.
        characters: Stop after this many characters.
    """
    total = 0
    for source in find_sources(path, test=""):
        for document in source.read(0):
            letters = (
                unicodedata.normalize("NFKD", re.sub("['’]", "", document.text)).encode("ascii", "ignore").decode().lower()
            )
            if words := re.sub("[^a-z]+", " ", letters).strip():
                yield words + " "
                total += len(words) + 1
            if total >= characters:
                return


def out(path: Path) -> list[str]:
    """Return the option that names the result of a command.

    Args:
        path: The file or folder.
    """
    return ["--out", str(path)]


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a result.

    Args:
        path: The file.
    """
    return dict(json.loads(path.read_text(encoding="utf-8")))


def shown(words: list[str], work: Path) -> str:
    """Return a command for the model card, without its result and without folders of this machine.

    Args:
        words: The command.
        work: The folder of the results.
    """
    text = " ".join(["m2s", *words[: words.index("--out")]])
    return text.replace(f"{work}/", "").replace(str(root()), "$M2S_DATA")


def concerns(words: list[str], name: str) -> bool:
    """Return whether a command measures these weights, or text without a model.

    Args:
        words: The command.
        name: The name of the weights.
    """
    named = [word for word in words if word.startswith(builtin.PREFIX)]
    return not named or builtin.PREFIX + name in named


ONE_STATE = {"seed": 1, "keep": 1}
DIGITS = {"steps": 2000, "validate_every": 500, "save_every": 500, "optimizer__ema": 0.998, **ONE_STATE}
CHARS = configured(
    "owt-fast",
    data__folder=f"$M2S_DATA/{TEXT_FOLDER}",
    data__length=128,
    network__size="tiny",
    batch=32,
    steps=3300,
    precision="bf16",
    validate_every=1000,
    validation_samples=512,
    save_every=250,
    log_every=100,
    optimizer__ema=0.998,
    **ONE_STATE,
)

GROUPS = {
    "digits": ImageGroup(
        name="digits",
        recipes={
            "digits-m2s": Recipe("8 x 8 digits, M2S with the paper's head", configured("digits", method="m2s", **DIGITS)),
            "digits-m2s-offset": Recipe(
                "8 x 8 digits, M2S with the exact offset", configured("digits", method="m2s-offset", **DIGITS)
            ),
            "digits-sedd": Recipe(
                "8 x 8 digits, SEDD: an unconstrained score, to audit and repair", configured("digits", method="sedd", **DIGITS)
            ),
        },
        data='The 1,541 training images of `m2s.data.load("digits")`, from Optical Recognition of Handwritten Digits '
        "(E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository, CC BY 4.0). The other 256 images are held out. "
        + LICENSE,
    ),
    "chars": TextGroup(
        name="chars",
        recipes={
            "chars": Recipe(
                "English in a to z and spaces, 128 characters, M2S with the exact offset",
                replace(CHARS, "method", "m2s-offset"),
            )
        },
        data=f"The first {CHARACTERS:,} characters of a sample of Project Gutenberg: English books in the public domain, in "
        "the 27 characters of text8. Every 100th document is held out. " + LICENSE,
        passes=4,
        limit=512,
    ),
    "mnist": ImageGroup(
        name="mnist",
        recipes={
            "mnist-gaussian": Recipe(
                "MNIST, M2S with Gaussian rates", configured("mnist-small", method="m2s-gaussian", **ONE_STATE)
            ),
            "mnist-sedd": Recipe(
                "MNIST, SEDD: an unconstrained score, to audit and repair",
                configured("mnist-small", method="sedd", **ONE_STATE),
            ),
        },
        data="The 60,000 training images of MNIST (Y. LeCun, C. Cortes and C. Burges). " + LICENSE,
        device="",
        passes=2,
        against="mnist:test",
    ),
}
