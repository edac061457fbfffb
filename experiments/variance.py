"""Measure how many network calls the NELBO needs at an equal standard error, technique by technique, on small trained networks.

    python experiments/variance.py out/variance

It trains three small networks on the digits, of M2S, SEDD and MDLM, each in a minute or two on one core, and estimates the
NELBO of held-out images by groups of eight passes in several designs. The ratio is variance times calls of plain Monte Carlo
over that of the design, with a 95 % interval by resampling images. It also measures every named estimator of the likelihood
that supports the network. Finished networks are loaded. It writes variance.json into the folder.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import m2s
from m2s.evaluation.bpd import dataset_nelbo
from m2s.evaluation.likelihood import ESTIMATORS, Options, measure, supported
from m2s.evaluation.likelihood.design import PLAIN, Design, nelbo_groups
from m2s.io import write_json

METHODS = ("m2s-offset", "sedd", "mdlm")
STEPS, BATCH, WIDTH, DEPTH = 400, 64, 48, 2
IMAGES, GROUPS, PASSES, RESAMPLES = 256, 12, 8, 2000
DESIGNS = {
    "plain Monte Carlo": PLAIN,
    "importance 0.01": Design(importance=0.01),
    "importance 0.1": Design(importance=0.1),
    "stratified": Design(stratified=True),
    "antithetic": Design(coupling="antithetic"),
    "sweep": Design(coupling="sweep"),
    "reconstruction once in 8": Design(last_every=8),
    "reconstruction split, once in 8": Design(split=True, last_every=8),
    "all": Design(0.1, True, "sweep", True, 8),
    "all but importance": Design(None, True, "sweep", True, 8),
    "all but stratified": Design(0.1, False, "sweep", True, 8),
    "all but sweep": Design(0.1, True, "independent", True, 8),
    "all, antithetic for sweep": Design(0.1, True, "antithetic", True, 8),
    "all but the split": Design(0.1, True, "sweep", False, 8),
}
OTHER_PASSES = {f"all, groups of {passes}": passes for passes in (2, 4, 16)}


def trained(method: str, folder: Path) -> m2s.Checkpoint:
    """Return a small network that was trained on the digits.

    Args:
        method: The method.
        folder: Where the checkpoint is, or is saved.
    """
    if (folder / "config.json").exists():
        return m2s.load(folder)
    images = m2s.data.load("digits")
    torch.manual_seed(1)
    parts = m2s.methods.METHODS[method].build(images.vocab)
    head = parts.head
    config = m2s.models.DiTConfig(states=head.process.states, width=WIDTH, depth=DEPTH, heads=3, condition_width=32, length=64)
    model = m2s.models.DiT(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS)
    objective = m2s.Objective(model, head, parts.loss)
    for step in range(STEPS):
        x_0 = images.train[torch.randint(len(images.train), (BATCH,))].long()
        value = objective(x_0).sum(-1).mean()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{method} step {step} loss {float(value.detach()):.2f}", flush=True)
    m2s.save(folder, model.eval(), head, {"kind": "image", "shape": [8, 8], "levels": 17})
    return m2s.load(folder)


def compare(checkpoint: m2s.Checkpoint) -> dict[str, Any]:
    """Return variance, calls and the ratio of calls of every design.

    Args:
        checkpoint: The network.
    """
    images = m2s.data.load("digits").test[:IMAGES]
    rows: dict[str, Any] = {}
    resampled = np.random.default_rng(0).integers(IMAGES, size=(RESAMPLES, IMAGES))
    plain: np.ndarray | None = None
    designs = {**DESIGNS, **dict.fromkeys(OTHER_PASSES, DESIGNS["all"])}
    for name, design in designs.items():
        passes = OTHER_PASSES.get(name, PASSES)
        nats, calls = nelbo_groups(checkpoint.model, checkpoint.head, images, design, GROUPS, passes, seed=1)
        cost = (nats.var(0) * calls).numpy()
        plain = cost if plain is None else plain
        ratios = plain[resampled].mean(1) / cost[resampled].mean(1)
        mean, error = float(nats.mean()), float(nats.mean(0).std() / IMAGES**0.5)
        noise = float((nats.var(0) / GROUPS).sum().sqrt()) / IMAGES
        low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
        rows[name] = {
            "nats": mean,
            "noise_error": noise,
            "error": error,
            "variance": float(nats.var(0).mean()),
            "calls": calls,
            "ratio": float(plain.mean() / cost.mean()),
            "low": low,
            "high": high,
        }
        print(
            f"  {name:34s} {mean:9.3f} ± {noise:.3f}   ratio {rows[name]['ratio']:6.2f}  {low:6.2f} .. {high:6.2f}", flush=True
        )
    assert plain is not None
    found = dataset_nelbo(checkpoint.model, checkpoint.head, images, passes=GROUPS * PASSES, seed=1)
    # Times are stratified over images here, so that the variance is that of the mean over images.
    variance = float(found.term("nelbo").mean(1).var()) * IMAGES
    ratio = float(plain.mean()) / (2 * variance)
    rows["m2s evaluate bpd"] = {"nats": float(found.term("nelbo").mean()), "variance": variance, "calls": 2.0, "ratio": ratio}
    print(f"  {'m2s evaluate bpd':34s} {rows['m2s evaluate bpd']['nats']:9.3f}           ratio {ratio:6.2f}", flush=True)
    return rows


def estimators(checkpoint: m2s.Checkpoint) -> dict[str, Any]:
    """Return nats, terms, missing terms, and variance times calls of every named estimator.

    Args:
        checkpoint: The network.
    """
    images = m2s.data.load("digits").test[:IMAGES]
    draws = {name: measure(*checkpoint, images, name, PASSES, seed=1) for name in supported(checkpoint.head)}
    rows = {}
    for name, each in draws.items():
        drop, error = each.drop(draws["nelbo"])
        lacks = ESTIMATORS[name].missing(checkpoint.head, Options())
        rows[name] = {**each.summary({"dimension": 64.0}), "drop": drop, "drop_error": error, "missing": lacks}
        print(f"  {name:16s} {rows[name]['nats']:9.3f}  x calls {rows[name]['variance_times_calls']:9.1f}  {lacks}", flush=True)
    return rows


def main(out: Path) -> None:
    """Train and compare all methods.

    Args:
        out: Folder of the checkpoints and of variance.json.
    """
    torch.set_num_threads(1)
    settings = {"steps": STEPS, "batch": BATCH, "width": WIDTH, "depth": DEPTH}
    settings |= {"images": IMAGES, "groups": GROUPS, "passes": PASSES}
    result: dict[str, Any] = {"settings": settings, "methods": {}, "estimators": {}}
    for method in METHODS:
        checkpoint = trained(method, out / method)
        print(method, flush=True)
        result["methods"][method] = compare(checkpoint)
        result["estimators"][method] = estimators(checkpoint)
        write_json(out / "variance.json", result)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python experiments/variance.py FOLDER")
    main(Path(sys.argv[1]))
