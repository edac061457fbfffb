"""The sections of a page about runs. Each is a function of all runs that returns HTML, empty where no run has any of it."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.image import imsave

from m2s.evaluation import genppl
from m2s.evaluation.audit import CLASSES
from m2s.evaluation.repair import ARMS, TITLES
from m2s.report import audit, curves
from m2s.report.markup import (
    data_uri,
    escape,
    folded,
    give_or_take,
    interval,
    literal,
    number,
    picture,
    png,
    prose,
    share,
    side_by_side,
    svg,
    table,
)
from m2s.report.read_run import Result, Run, Samples
from m2s.report.samples import picture_grid

T = TypeVar("T")
Row = tuple[object, ...]


class Problems(list[str]):
    """What could not be shown, file by file."""

    def attempt(self, file: Path, show: Callable[[], T]) -> T | None:
        """What `show` makes of a file; None, and a line here, where the file lacks something."""
        try:
            return show()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
            said = f"it is not as m2s writes it ({error})"
            if isinstance(error, KeyError | ValueError):
                said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            line = f"{file} is not shown in full: {said}"
            self += [] if line in self else [line]
        return None

    def each(self, runs: Sequence[Run], kind: str, show: Callable[[Run, Result], T | None]) -> list[T]:
        """What `show` makes of every result of a kind."""
        shown = [self.attempt(run.path / one.file, partial(show, run, one)) for run in runs for one in run.of(kind)]
        return [one for one in shown if one is not None]


def _together(*parts: str | None) -> str:
    return "\n".join(part for part in parts if part)


def _side(*figures: str | None) -> str:
    known = [figure for figure in figures if figure]
    return side_by_side(known) if known else ""


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# the opening and the runs

MEASURED = {
    "bpd": "the bound on the likelihood term by term",
    "fid": "distances between samples and data",
    "genppl": "generative perplexities",
    "audit": "audits of the scores",
    "repair": "samples with repaired scores",
}


def opening(runs: Sequence[Run]) -> str:
    """In words: which runs these are, and where they ended."""
    names = [
        run.name if run.name == _config(run, "method") else f"{run.name} (method {_config(run, 'method')})" for run in runs
    ]
    data = list(dict.fromkeys(_data(run) for run in runs))
    count = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    ends = [f"{' '.join(_held_out(run))} for {run.name}" for run in runs if run.validation]
    kinds = list(dict.fromkeys(MEASURED[result.kind] for run in runs for result in run.results if result.kind in MEASURED))
    said = [
        f"{count} of discrete diffusion on {_and(data)}: {_and(names)}.",
        f"At the end of training the bound on held-out data is, in bits per site, {_and(ends)}." if ends else "",
        f"Measured were {_and(kinds)}." if kinds else "",
        "Every number here comes from files in the folders of the runs, and is in this page as JSON too.",
    ]
    return " ".join(part for part in said if part)


def _config(run: Run, *keys: str) -> Any:
    value: Any = run.record["config"]
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _data(run: Run) -> str:
    """The data and the size of a row."""
    name, folder, data = _config(run, "data", "name"), _config(run, "data", "folder"), run.record["data"]
    shape = (run.config.get("data") or {}).get("shape")
    size = " × ".join(map(str, shape)) if shape else f"{data.get('length')} tokens"
    return f"{Path(folder).name if name == 'text' and folder else name} ({number(data.get('rows'))} rows of {size})"


def _held_out(run: Run) -> tuple[str, ...]:
    last = run.validation[-1] if run.validation else {}
    return give_or_take(last.get("validation_bits"), last.get("validation_error"))


def overview(runs: Sequence[Run], problems: Problems) -> str:
    """One row for each run."""

    def row(run: Run) -> Row:
        done = max([line["step"] for line in run.log], default=0)
        steps = _config(run, "run", "steps") or 0
        starts = run.record["starts"]
        return (
            run.name,
            (_config(run, "method"), f"{_config(run, 'head', 'kind')}, {_config(run, 'process', 'kind')} noise"),
            (_network(run), f"{number(run.parameters)} parameters"),
            (_data(run), f"vocabulary {number(run.record['data'].get('vocab'))}"),
            (f"{done:,}", f"of {steps:,}") if done < steps else f"{done:,}",
            _held_out(run),
            _duration(run.seconds),
            _device(run, starts[-1] if starts else {}),
        )

    rows = [problems.attempt(run.path / "train.json", partial(row, run)) for run in runs]
    head = ("run", "method", "network", "data", "steps", "held-out bound, bits per site", "time", "device")
    caption = (
        "The bound is the last one in the log, of the averaged weights, ± one standard error over the samples it was taken on; "
        "lower is better. The time is that of training, as logged."
    )
    fallen = problems.each(runs, "diverged", _fallen)
    return _together(table(head, [one for one in rows if one], caption, (4, 5, 6)), *fallen)


def _fallen(run: Run, found: Result) -> str:
    value = found.value
    return prose(
        f"{run.name}: at step {value['step']} the loss was {value['loss']} and the gradient's norm {value['grad_norm']}."
    )


def _network(run: Run) -> str:
    model = run.config.get("model") or {}
    kind = {"unet": "U-Net", "dit": "DiT"}.get(str(model.get("kind")), str(_config(run, "network", "kind")))
    shape = [f"{key} {model[key]}" for key in ("width", "depth", "heads") if isinstance(model.get(key), int)]
    return ", ".join([kind, *shape])


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _device(run: Run, start: Mapping[str, Any]) -> str:
    processes, threads = start.get("processes") or 1, start.get("threads")
    times = f"{processes} × " if processes > 1 else ""
    if start.get("gpu") and _config(run, "run", "device") != "cpu":
        return f"{times}{start['gpu']}"
    return f"{times}CPU" + (f", {threads} thread{'s' if threads > 1 else ''}" if threads else "")


# training


def training(runs: Sequence[Run], problems: Problems) -> str:
    widths = sorted({curves.window(len(run.training)) for run in runs if run.training})
    pale = (
        "Pale: records of the log, each a mean over the steps since the one before; strong: running mean over "
        f"{' or '.join(map(str, widths))} records. "
        if widths and widths[-1] > 1
        else ""
    )
    loss = (
        f"Loss in bits per site; lower is better. {pale}Circles: the bound on held-out data with averaged weights, ± one "
        "standard error; it has the terms at both ends of time, which the loss leaves out."
    )
    norm = "Norm of the gradient before it is clipped. Strong: mean over the steps of a record; pale: the greatest of them."
    names = _and([run.name for run in runs])

    def show(draw: Callable[[Sequence[Run]], Any], what: str, caption: str) -> str | None:
        figure = draw(runs)
        return None if figure is None else picture(svg(figure), f"{what} over the steps of {names}", caption)

    return _side(
        problems.attempt(Path("log.jsonl"), partial(show, curves.loss, "Loss in bits per site", loss)),
        problems.attempt(Path("log.jsonl"), partial(show, curves.gradient, "Norm of the gradient", norm)),
    )


# measures


def measures(runs: Sequence[Run], problems: Problems) -> str:
    return _together(_bounds(runs, problems), _distances(runs, problems), _perplexities(runs, problems))


def _named(run: Run, result: Result) -> str:
    """The run, with the file where it has several of a kind."""
    return run.name if len(run.of(result.kind)) == 1 else f"{run.name}, {result.file}"


def _bounds(runs: Sequence[Run], problems: Problems) -> str:
    def row(run: Run, result: Result) -> Row:
        value = result.value
        bits = {term: value[term]["bits"] for term in ("bound", "integral", "prior", "reconstruction")}
        cells = {term: give_or_take(one["value"], one["error"], one["rows_error"]) for term, one in bits.items()}
        low, high = bits["bound"]["low"], bits["bound"]["high"]
        return (
            _named(run, result),
            (value["data"]["name"], value["data"]["split"] or "all"),
            value["unit"],
            cells["bound"],
            "–" if low is None else f"{number(low)} … {number(high)}",
            cells["integral"],
            (cells["prior"][0], "exact"),
            cells["reconstruction"],
            (f"{value['rows']:,}", f"× {len(value['passes'])} passes"),
        )

    rows = problems.each(runs, "bpd", row)
    if not rows:
        return ""
    head = ("run", "data", "bits per", "bound", "95% interval", "integral", "prior", "reconstruction", "rows")
    caption = (
        "Lower is better. bound = integral + prior + reconstruction; most papers report the integral alone, which is no bound. "
        "First ±: standard error over times and noise on these rows, with Student's 95% interval; second ±: over rows."
    )
    lines = problems.each(runs, "bpd", lambda run, one: (_named(run, one), one.value["unit"], one.value["curve"]))
    what = f"The integrand of the bound over time t of {_and([name for name, _, _ in lines])}"
    over = (
        "Where on the way from data (t = 0) to noise (t = 1) the bits are spent: the integrand of the bound with standard "
        "errors. The area below a curve is its integral."
    )
    return _together(
        "<h3>Likelihood of held-out data</h3>",
        table(head, rows, caption, range(3, 9)),
        _text_units(runs, problems),
        _side(problems.attempt(Path("the loss over t"), lambda: picture(svg(curves.over_time(lines)), what, over))),
    )


def _text_units(runs: Sequence[Run], problems: Problems) -> str:
    """The bound of text per byte and character, and as a perplexity."""

    def row(run: Run, result: Result) -> Row | None:
        bound, integral = result.value["bound"], result.value["integral"]
        if "bits_per_byte" not in bound:  # images, or a text whose bytes nobody knows
            return None
        units = [bound["bits_per_byte"], bound["bits_per_character"], bound["perplexity"], integral["perplexity"]]
        return (_named(run, result), *(give_or_take(one["value"], one["error"]) for one in units))

    rows = problems.each(runs, "bpd", row)
    head = ("run", "bits per byte", "bits per character", "perplexity per token", "perplexity of the integral alone")
    return table(head, rows, "The same bound in units of text, ± standard error over times.", range(1, 5)) if rows else ""


def drawn_with(settings: Any) -> str:
    """How samples were drawn, as `m2s sample` says it."""
    if not isinstance(settings, dict):
        return ""
    parts = [f"{settings['steps']} steps" if "steps" in settings else "", settings.get("sampler"), settings.get("grid")]
    ones = {"temperature": "temperature", "top_p": "top-p", "guidance": "guidance"}
    parts += [f"{name} {settings[key]}" for key, name in ones.items() if settings.get(key) not in (None, 1.0)]
    parts += [f"top-k {settings['top_k']}"] if settings.get("top_k") is not None else []
    parts += ["projected"] if settings.get("project") else []
    parts += [f"seed {settings['seed']}"] if "seed" in settings else []
    return ", ".join(str(part) for part in parts if part)


def _distances(runs: Sequence[Run], problems: Problems) -> str:
    def row(run: Run, result: Result) -> Row:
        value = result.value
        kid = value["kid"]
        return (
            _named(run, result),
            (
                f"{value['samples']['count']:,} of {Path(value['samples']['name']).name}",
                drawn_with(value["samples"]["settings"]),
            ),
            (f"{value['reference']['count']:,} of {value['reference']['name']}", f"protocol {value['protocol'] or 'none'}"),
            value["network"]["name"],
            number(value["fid"], 2),
            "–" if kid is None else give_or_take(1000 * kid["mean"], 1000 * kid["error"], digits=3),
        )

    rows = problems.each(runs, "fid", row)
    if not rows:
        return ""
    head = ("run", "samples", "against", "features of", "FID", "1000 × KID")
    caption = (
        "Distances between samples and data; lower is better. ± standard error over KID's subsets. Published figures compare "
        "only under the same protocol and with the features of inception-2015-12-05."
    )
    return f"<h3>Images against data</h3>\n{table(head, rows, caption, (4, 5))}"


def _perplexities(runs: Sequence[Run], problems: Problems) -> str:
    def judged(run: Run, result: Result) -> list[Row]:
        return [
            (
                run.name,
                (f"{one['samples']:,} of {Path(one['file']).name}", drawn_with(one["settings"])),
                (Path(one["judge"]["name"]).name, f"protocol {one['protocol']['name']}"),
                interval(one["perplexity"], 2),
                interval(one["nats_per_token"]),
                interval(one["entropy_bits"], 3),
                number(one["distinct"]),
            )
            for one in result.value["results"]
        ]

    def paired(run: Run, result: Result) -> list[Row]:
        noise = {True: "yes", False: "no", None: "not known"}
        return [
            (
                run.name,
                f"{Path(one['file']).name} less {Path(one['against']).name}",
                interval(one["perplexity"], 2),
                interval(one["nats_per_token"]),
                noise[one["same_noise"]],
            )
            for one in result.value["differences"]
        ]

    def departures(_: Run, result: Result) -> list[str]:
        return [text for one in result.value["results"] for text in one["departures"]]

    def frontier(run: Run, result: Result) -> str | None:
        results = result.value["results"]
        what = f"{_named(run, result)}: generative perplexity against the entropy of samples"
        caption = f"{what}, with 95% intervals. Right is more varied, down is likelier."
        return picture(svg(genppl.draw(results)), what, caption) if len(results) > 1 else None

    rows = list(chain(*problems.each(runs, "genppl", judged)))
    if not rows:
        return ""
    head = ("run", "samples", "judge", "perplexity", "nats per token", "entropy, bits", "distinct")
    caption = (
        "How likely a language model, the judge, finds the samples. Lower is likelier, which is better only where the entropy "
        "(of the tokens within a sample) has not fallen with it. In brackets: 95% bootstrap intervals over samples."
    )
    said = list(dict.fromkeys(chain(*problems.each(runs, "genppl", departures))))
    gaps = list(chain(*problems.each(runs, "genppl", paired)))
    compared = ("run", "difference", "perplexity", "nats per token", "from the same noise")
    return _together(
        "<h3>Text before a judge</h3>",
        table(head, rows, caption, range(3, 7)),
        prose(f"Not as in the protocol: {'; '.join(said)}.") if said else "",
        table(compared, gaps, "Over pairs of samples, with 95% bootstrap intervals.", (2, 3)) if gaps else "",
        _side(*problems.each(runs, "genppl", frontier)),
    )


# samples


def samples(runs: Sequence[Run], problems: Problems) -> str:
    grids: list[str | None] = []
    texts: list[str | None] = []
    films, others = [], []
    for run in runs:
        for one in run.samples:
            shown = problems.attempt(run.path / one.file, partial(_drawn, run, one))
            (texts if one.images is None else grids).append(shown)
        if run.film is not None:
            what = f"{run.name}: from noise to samples"
            films.append(_file(run.film, what, f"{what}. A sample a row, the steps from left to right.", problems))
        for path in run.pictures:
            what = f"{run.name}: {path.relative_to(run.path)}"
            others.append(_file(path, what, what, problems))
    return _together(
        _side(*grids),
        *texts,
        "<h3>On the way from noise to data</h3>" if any(films) else "",
        *films,
        "<h3>Other pictures</h3>" if any(others) else "",
        _side(*others),
    )


def _file(path: Path, what: str, caption: str, problems: Problems) -> str | None:
    return problems.attempt(path, lambda: picture(png(path), what, caption))


def _drawn(run: Run, one: Samples) -> str:
    """The first samples of a file."""
    shown = len(one.texts) if one.images is None else len(one.images)
    how = drawn_with(one.settings)
    count = f"{shown} of {one.count:,}" if shown < one.count else f"{shown}"
    what = f"{run.name}: {count} samples, {how} ({one.file})" if how else f"{run.name}: {count} samples ({one.file})"
    if one.images is None:
        return f"<h3>{escape(what)}</h3>\n" + "\n".join(literal(text, flow=True) for text in one.texts)
    data = one.settings["data"]
    file = BytesIO()
    grid = picture_grid(torch.from_numpy(one.images), tuple(data["shape"]), data["levels"])
    imsave(file, grid, format="png")
    return picture(data_uri("image/png", file.getvalue()), f"A grid of samples of {run.name}", what)


# audit and repair


def audits(runs: Sequence[Run], problems: Problems) -> str:
    about = """At every step a sampler asks the network for the score of every position: how much likelier the noisy data were
    with another token there. Such ratios lie in a box C and, within it, in the smaller set P of scores that a posterior over
    clean tokens stands behind. A network that predicts the posterior is in P by construction; a free score need not be."""
    shown = problems.each(runs, "audit", _audit)
    return _together(prose(about), *shown) if shown else ""


def _audit(run: Run, result: Result) -> str:
    found, name = result.value, _named(run, result)
    overall, criteria = found["overall"], audit.criteria(found)
    sites, coordinates, both = overall["position_steps"], overall["coordinates"], (overall["before"], overall["after"])

    def mass(of: Mapping[str, Any] | None) -> str:
        return "–" if of is None else f"{number(of['mean'])} / {number(of['most'])}"

    rows = []
    for kind in CLASSES:
        strict, tolerant, projected = both[0]["strict"][kind], both[0]["classes"][kind], both[1]["classes"][kind]
        counts = (share(strict, sites), number(strict), number(tolerant), number(projected))
        rows.append((audit.NAMES[kind], _greek(criteria[kind]), *counts))
    caption = (
        f"{found['head']}. {sites:,} position-steps of {found['settings']['n']:,} samples; {drawn_with(found['settings'])}. "
        "μ̃ is the signed posterior. Fraction and count: as in the paper, no tolerance on the box; tolerant: 1e-6 on it; "
        "projected: the same, of the projected scores."
    )
    others = [
        ("single scores outside the box", *(share(when["coordinates_outside"], coordinates) for when in both)),
        ("positions with μ̃ below -1e-6", *(share(when["signed"], sites) for when in both)),
        ("negative mass of μ̃, mean / most", *(mass(when["signed_mass"]) for when in both)),
        ("positions with negative sampler weights", *(share(when["negative_weights"], sites) for when in both)),
        ("negative mass of the weights, mean / most", *(mass(when["negative_mass"]) for when in both)),
    ]
    moved = overall["moved"]
    far = f"Moved by the projection, |s' - s| / |s|: mean {number(moved['mean'])}, most {number(moved['most'])}."
    what = f"{name}: the audit over the time of the run, in four panels"
    return _together(
        f"<h3>{escape(name)}</h3>",
        table(("position-step class", "criterion", "fraction", "count", "tolerant", "projected"), rows, caption, range(2, 6)),
        table(("with a tolerance of 1e-6", "as it is", "projected"), others, far, (1, 2)),
        picture(svg(audit.draw(found | {"checkpoint": curves.label(found["checkpoint"])})), what, f"{what}.", wide=True),
        folded("Every step", literal(audit.table(found))),
    )


def _greek(criterion: str) -> str:
    for word, sign in {"mu~": "μ̃", "rho": "ρ", "alpha": "α", "<=": "≤", ">=": "≥"}.items():
        criterion = criterion.replace(word, sign)
    return criterion


def repairs(runs: Sequence[Run], problems: Problems) -> str:
    return "\n".join(problems.each(runs, "repair", partial(_repair, problems)))


def _repair(problems: Problems, run: Run, result: Result) -> str:
    value, name = result.value, _named(run, result)
    counts = value["changes"]
    caption = (
        f"Drawn twice from the same noise ({drawn_with(value['audits']['free']['settings'])}), with the score as it is and "
        f"projected. {counts['tokens_changed']:,} of {counts['tokens']:,} tokens and {counts['samples_changed']:,} of "
        f"{counts['samples']:,} samples differ. Classes are shares of all position-steps, with a tolerance of 1e-6 on the box."
    )
    rows = []
    for arm in ARMS:
        overall = value["audits"][arm]["overall"]
        sites, before = overall["position_steps"], overall["before"]
        shares = [share(before["classes"][kind], sites) for kind in CLASSES]
        rows.append((TITLES[arm], *shares, share(before["negative_weights"], sites), number(counts[f"distinct_{arm}"])))
    pairs = (run.path / result.file).parent / "pairs.png"
    what = f"{name}: samples in pairs, on the left with the score as it is, on the right projected"
    return _together(
        f"<h3>{escape(name)}</h3>",
        _paired(value["measure"]),
        table(("score", *CLASSES, "negative weights", "distinct samples"), rows, caption, range(1, 7)),
        _side(_file(pairs, what, f"{what}; the noise is the same.", problems) if pairs.is_file() else None),
    )


def _paired(measure: Mapping[str, Any] | None) -> str:
    """What the measure says of either kind of sample, and of their difference."""
    if measure is None:
        return ""
    gap = measure["difference"]
    if measure["kind"] == "fid":
        rows: list[Row] = [(TITLES[arm], number(measure[arm])) for arm in ARMS]
        rows.append(("projected less free", "–" if gap is None else interval(gap)))
        caption = (
            f"FID of {measure['samples']:,} samples against {measure['reference']['name']}; lower is better. In brackets: 95% "
            "of resampled pairs."
        )
        return table(("score", "FID"), rows, caption, (1,))
    names = ("nats_per_token", "perplexity", "entropy_bits")
    rows = [(TITLES[arm], *(interval(measure[arm][name]) for name in names)) for arm in ARMS]
    rows.append(("projected less free", *(interval(gap[name]) for name in names)))
    free = measure["free"]
    departures = f" Not as in the protocol: {'; '.join(free['departures'])}." if free["departures"] else ""
    caption = (
        f"{free['samples']:,} samples before {Path(free['judge']['name']).name}, protocol {free['protocol']['name']}. In "
        f"brackets: 95% bootstrap intervals, of the difference over pairs.{departures}"
    )
    return table(("score", "nats per token", "perplexity", "entropy, bits"), rows, caption, (1, 2, 3))


# how this was made


def made(runs: Sequence[Run], problems: Problems) -> str:
    return "\n".join(_made(run) for run in runs)


def _made(run: Run) -> str:
    parts = [f"<h3>{escape(run.name)}</h3>"]
    for start in run.record["starts"]:
        about = (f"started {start.get('started')}", _device(run, start), _versions(start))
        parts.append(_step("train.json, log.jsonl, config.json, model.safetensors", start, *about))
    for result in run.results:
        value, versions = result.value, result.value.get("versions")
        device, known = str(value.get("device") or ""), _versions(versions if isinstance(versions, dict) else value)
        parts.append(_step(result.file, value, device, known, drawn_with(value.get("settings"))))
    parts += [_step(one.file, one.settings, drawn_with(one.settings)) for one in run.samples]
    parts.append(folded(f"Resolved configuration of {run.name}", literal(json.dumps(run.record["config"], indent=2))))
    return "\n".join(parts)


def _step(file: str, maker: Mapping[str, Any], *about: str) -> str:
    """A file with what is known of its making, and the command where the file has it."""
    typed = command(maker)
    details = "; ".join(part for part in (*about, "" if typed else "the file does not hold the command") if part)
    return _together(
        f'<p class="step"><code>{escape(file)}</code><small>{escape(details)}</small></p>',
        literal(typed, flow=True) if typed else "",
    )


def command(value: Mapping[str, Any]) -> str:
    """What was typed: argv, with m2s for the path of the program."""
    words = value.get("command")
    if not isinstance(words, list) or not words:
        return ""
    program, *rest = map(str, words)
    ours = program.replace("\\", "/").endswith(("/m2s", "/m2s/cli/__main__.py"))
    return shlex.join(["m2s" if ours else program, *rest])


def _versions(value: Mapping[str, Any]) -> str:
    names = ("m2s", "git", "torch", "numpy", "python")
    return ", ".join(f"{name} {value[name]}" for name in names if isinstance(value.get(name), str))
