"""FID and KID: the numbers against independent forms of them, Inception against its TorchScript, and `m2s evaluate fid`."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
import tyro

import m2s.data
from m2s.cli.evaluate import images as command
from m2s.cli.evaluate.fid import PROTOCOLS, Fid, Protocol
from m2s.data import BadData
from m2s.data.files import sha256
from m2s.errors import UserError
from m2s.evaluation import inception
from m2s.evaluation.fid import Statistics, frechet, kid, squared_mmd, stored_features


def gathered(features: torch.Tensor, batch: int = 100) -> Statistics:
    statistics = Statistics.empty(features.shape[1])
    for part in features.split(batch):
        statistics.update(part)
    return statistics


def spread_out(count: int, width: int, seed: int, decay: float = 3.0) -> torch.Tensor:
    """Correlated features whose scales fall by 10^decay."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=random, dtype=torch.float64) * torch.logspace(0, -decay, width)[:, None]
    return torch.randn(count, width, generator=random, dtype=torch.float64) @ mix.double() + seed


def by_square_root(x: np.ndarray, y: np.ndarray) -> float:
    """FID as it is usually written."""
    root = scipy.linalg.sqrtm(np.cov(x, rowvar=False) @ np.cov(y, rowvar=False))
    traces = np.trace(np.cov(x, rowvar=False)) + np.trace(np.cov(y, rowvar=False)) - 2 * np.trace(root.real)
    return float(np.sum((x.mean(0) - y.mean(0)) ** 2) + traces)


def by_nuclear_norm(x: np.ndarray, y: np.ndarray) -> float:
    """FID without any covariance: tr (C_x C_y)^(1/2) is the nuclear norm of X Y^T, centered, whatever the ranks."""
    x_c, y_c = (x - x.mean(0)) / math.sqrt(len(x) - 1), (y - y.mean(0)) / math.sqrt(len(y) - 1)
    shared = np.linalg.norm(x_c @ y_c.T, "nuc")
    return float(np.sum((x.mean(0) - y.mean(0)) ** 2) + np.sum(x_c**2) + np.sum(y_c**2) - 2 * shared)


# -- the distances -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m", "width"), [(300, 200, 1), (300, 200, 7), (900, 700, 96)])
def test_frechet_is_the_form_with_a_matrix_square_root(n, m, width):
    x, y = spread_out(n, width, 0), spread_out(m, width, 1)
    if width == 1:
        expected = float((x.mean() - y.mean()) ** 2 + (x.std() - y.std()) ** 2)
    else:
        expected = by_square_root(x.numpy(), y.numpy())
    assert frechet(gathered(x), gathered(y)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "m", "width"), [(20, 31, 64), (2, 300, 16), (150, 20, 64)])
def test_frechet_where_covariances_are_singular(n, m, width):
    x, y = spread_out(n, width, 0), spread_out(m, width, 1)
    assert frechet(gathered(x), gathered(y)) == pytest.approx(by_nuclear_norm(x.numpy(), y.numpy()), rel=1e-9)


def test_frechet_of_a_set_with_itself_moved_scaled_turned():
    x, y = spread_out(500, 12, 0), spread_out(400, 12, 1)
    full, variance = gathered(x), float(gathered(x).covariance.trace())
    assert abs(frechet(full, full)) < 1e-12 * variance
    assert frechet(full, gathered(x + 0.5)) == pytest.approx(12 * 0.25, rel=1e-9)
    centered = x - x.mean(0)
    assert frechet(gathered(centered), gathered(3 * centered)) == pytest.approx(4 * variance, rel=1e-9)  # sum of (3s - s)^2
    turn = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    assert frechet(gathered(x @ turn), gathered(y @ turn)) == pytest.approx(frechet(full, gathered(y)), rel=1e-9)
    assert frechet(gathered(y), full) == pytest.approx(frechet(full, gathered(y)), rel=1e-12)


def test_statistics_in_batches_are_those_of_the_whole():
    x = (spread_out(1000, 9, 2) + 1e4).float()  # a mean far from zero, where sums of squares would lose their digits
    for batch in (1, 7, 1000):
        statistics = gathered(x, batch)
        assert statistics.count == 1000 and statistics.mean.dtype == torch.float64
        assert np.allclose(statistics.mean, x.double().numpy().mean(0), rtol=1e-13)
        assert np.allclose(statistics.covariance, np.cov(x.double().numpy(), rowvar=False), rtol=1e-9, atol=1e-12)
    statistics.update(x[:0])
    assert statistics.count == 1000


def test_statistics_say_what_is_wrong():
    statistics = Statistics.empty(3)
    with pytest.raises(ValueError, match=r"features\[1, 2\] is not finite"):
        statistics.update(torch.tensor([[0.0, 0, 0], [0, 0, math.inf]]))
    statistics.update(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="at least 2"):
        _ = statistics.covariance
    with pytest.raises(ValueError, match="width 3 and 4"):
        frechet(Statistics.empty(3), Statistics.empty(4))


def test_rows_are_kept_evenly():
    assert stored_features(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert stored_features(10, 4).tolist() == [0, 2, 5, 7]
    chosen = stored_features(60_000)
    assert len(chosen) == 10_000 and len(set(chosen.diff().tolist())) == 1 and chosen[-1] < 60_000
    statistics = Statistics.empty(2)
    statistics.update(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 2]))
    statistics.update(torch.arange(6.0).reshape(3, 2), torch.tensor([1]))
    assert statistics.rows.tolist() == [[0, 1], [4, 5], [2, 3]]


def test_statistics_round_trip(tmp_path):
    statistics = Statistics.empty(5)
    statistics.update(torch.randn(30, 5), torch.arange(4))
    statistics.save(tmp_path / "a.npz", "key")
    again = Statistics.load(tmp_path / "a.npz", "key")
    assert again.count == 30 and torch.equal(again.mean, statistics.mean)
    assert torch.equal(again.scatter, statistics.scatter) and torch.equal(again.rows, statistics.rows)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    with pytest.raises(BadData, match="something else"):
        Statistics.load(tmp_path / "a.npz", "other")


def test_statistics_from_a_file_that_holds_none(tmp_path):
    arrays = {"count": 3, "key": "", "mean": np.zeros(2), "scatter": np.zeros((2, 2)), "rows": np.zeros((1, 2), np.float32)}
    files = {
        "none": b"",
        "text": b"no archive",
        "object": {**arrays, "mean": np.array([{}])},
        "lacks": {"count": 3},
        "shape": {**arrays, "scatter": np.zeros((2, 3))},
        "dtype": {**arrays, "rows": np.zeros((1, 2))},
    }
    for name, contents in files.items():
        path = tmp_path / f"{name}.npz"
        if isinstance(contents, bytes):
            path.write_bytes(contents)
        else:
            np.savez(path, **contents)
        with pytest.raises(BadData, match="statistics of features"):
            Statistics.load(path)
    np.savez(tmp_path / "good.npz", **arrays)
    assert Statistics.load(tmp_path / "good.npz").count == 3


def by_loops(x: list[list[float]], y: list[list[float]]) -> float:
    """The kernel distance pair by pair."""

    def kernel(p: list[float], q: list[float]) -> float:
        return (sum(a * b for a, b in zip(p, q, strict=True)) / len(p) + 1) ** 3

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    same = [mean([kernel(z[i], z[j]) for i in range(len(z)) for j in range(len(z)) if i != j]) for z in (x, y)]
    return sum(same) - 2 * mean([kernel(p, q) for p in x for q in y])


def test_kernel_distance_pair_by_pair():
    x, y = spread_out(9, 4, 0), spread_out(9, 4, 1)
    assert float(squared_mmd(x, y)) == pytest.approx(by_loops(x.tolist(), y.tolist()), rel=1e-12)
    pairs = torch.stack([x[0], x[0]])  # both of them the same: k(x, x) + k(y, y) - 2 k(x, y)
    others = torch.stack([y[0], y[0]])
    assert kid(torch.cat([pairs, pairs]), torch.cat([others, others]), size=2).mean == pytest.approx(
        by_loops(pairs.tolist(), others.tolist()), rel=1e-12
    )


def test_kid_of_subsets_is_without_bias():
    """The mean over subsets tends to the distance of the whole sets, which every size of subset estimates without bias."""
    x, y = spread_out(40, 3, 0), spread_out(40, 3, 0)[:, [1, 2, 0]] + 0.3
    full = by_loops(x.tolist(), y.tolist())
    for size in (5, 20):
        found = kid(x, y, subsets=200, size=size, seed=1)
        assert abs(found.mean - full) < 4 * found.spread / math.sqrt(200)
    assert kid(x, y, size=9, seed=3) == kid(x, y, size=9, seed=3) != kid(x, y, size=9, seed=4)


def test_the_error_of_kid_is_that_over_new_data():
    """Over many draws of the data the standard deviation of KID is the error that each single draw reports."""
    random = torch.Generator().manual_seed(5)
    found = [
        kid(torch.randn(80, 4, generator=random), torch.randn(80, 4, generator=random) + 1.0, 10, 20, seed)
        for seed in range(120)
    ]
    spread = float(np.std([one.mean for one in found], ddof=1))
    reported = math.sqrt(np.mean([one.error**2 for one in found]))
    assert reported == pytest.approx(spread, rel=0.2)  # the spread of 120 draws is itself known to 6%
    assert math.sqrt(np.mean([one.spread**2 for one in found]) / 10) < 0.6 * spread  # as if the subsets were new data


@pytest.mark.parametrize(
    ("count", "arguments", "said"),
    [(10, {"size": 10}, "smaller"), (10, {"size": 1}, "size"), (10, {"size": 4, "subsets": 1}, "subsets"), (0, {}, "smaller")],
)
def test_kid_says_what_is_wrong(count, arguments, said):
    with pytest.raises(ValueError, match=said):
        kid(torch.randn(count, 3), torch.randn(20, 3), **arguments)


# -- Inception -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "levels"), [((5, 7), 17), ((4, 6, 3), 256), ((3, 3, 1), 2)])
def test_pictures_are_resized_bilinearly_about_the_centres_of_pixels(shape, levels):
    """Output pixel i lies at (i + 1/2) n / 299 - 1/2, held within the image; between pixels, linear."""
    tokens = torch.randint(levels, (2, math.prod(shape)))
    found = inception.pictures(tokens, shape, levels)
    image = tokens.numpy().reshape(2, shape[0], shape[1], -1) / (levels - 1)

    def weights(n: int) -> np.ndarray:
        at = np.clip((np.arange(299) + 0.5) * n / 299 - 0.5, 0, n - 1)
        return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(n)))

    expected = 2 * np.einsum("ih,jw,bhwc->bcij", weights(shape[0]), weights(shape[1]), image) - 1
    assert found.shape == (2, 3, 299, 299) and np.allclose(found, np.broadcast_to(expected, found.shape), atol=2e-6)


WEIGHTS = Path(m2s.data.root()) / "inception" / inception.SCRIPT


@pytest.mark.skipif(
    not WEIGHTS.is_file()
    or not all(not m2s.data.DATASETS[name].missing(m2s.data.root() / name) for name in ("mnist", "cifar10")),
    reason=f"needs {WEIGHTS}, MNIST and CIFAR-10; `m2s evaluate fid cifar10:test --against cifar10:train` says how to get them",
)
def test_inception(tmp_path, monkeypatch):
    """Our network under the TorchScript's weights agrees with the TorchScript, and its FID with independent forms."""
    network = inception.load(WEIGHTS)
    assert network.name == "inception-2015-12-05" and network.width == 2048
    images = {name: m2s.data.load(name) for name in ("mnist", "cifar10")}
    found = {
        name: torch.cat(list(inception.features(network, data.test[:16], data.shape, data.vocab, 8)))
        for name, data in images.items()
    }
    script = torch.jit.load(str(WEIGHTS), map_location="cpu").eval()
    for name, data in images.items():
        with torch.inference_mode():
            theirs = script(inception.pictures(data.test[:4], data.shape, data.vocab))
        assert found[name].shape == (16, 2048) and float((found[name][:4] - theirs).abs().max()) < 1e-4

    x, y = (part[:, ::4].double() for part in found.values())  # a quarter of the features, for speed
    together = gathered(torch.cat([x, y]))
    assert abs(frechet(together, together)) < 1e-6
    assert frechet(gathered(x), gathered(y)) == pytest.approx(by_nuclear_norm(x.numpy(), y.numpy()), rel=1e-6)

    state = {**network.module.state_dict(), "fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    torch.save(state, tmp_path / "inception.pth")
    torch.jit.save(script.net, str(tmp_path / "layers.pt"))  # the layers at the root, as in the file of StyleGAN
    monkeypatch.setattr(inception, "KNOWN_SCRIPTS", {sha256(tmp_path / "layers.pt")})
    for path in ("inception.pth", "layers.pt"):
        again = inception.load(tmp_path / path)
        assert again.name == network.name
        assert all(torch.equal(again.module.state_dict()[name], value) for name, value in network.module.state_dict().items())


def test_the_weights_must_be_inceptions(tmp_path):
    (tmp_path / "text.pt").write_text("no archive")
    torch.save(torch.zeros(3), tmp_path / "tensor.pth")
    torch.save({"Conv2d_1a_3x3.conv.weight": torch.zeros(32, 3, 3, 3)}, tmp_path / "part.pth")
    torch.save({}, tmp_path / "pt-01234567.pth")
    said = {
        "absent.pt": "is no file",
        "text.pt": "neither inception-2015-12-05.pt nor a state dict",
        "tensor.pth": "holds Tensor, expected a state dict",
        "part.pth": r"Conv2d_1a_3x3.bn.weight is missing or of another shape, and so are 468 more",
        "pt-01234567.pth": "its name says 01234567",
    }
    for name, words in said.items():
        with pytest.raises(BadData, match=words):
            inception.load(tmp_path / name)


def test_code_in_a_file_of_weights_does_not_run(tmp_path, monkeypatch):
    """A TorchScript of unknown origin and a pickle that calls a function."""

    class Runs:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"Conv2d_1a_3x3.conv.weight": Runs()}, tmp_path / "pickle.pth")
    torch.save(Runs(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"Conv2d_1a_3x3.conv.weight": "text"}, tmp_path / "text.pth")
    script(tmp_path / "script.pt", Projection(4))
    loaded = []
    monkeypatch.setattr(torch.jit, "load", lambda *given, **options: loaded.append(given))
    said = {
        "pickle.pth": "nor a state dict of tensors alone",
        "old.pth": "nor a state dict of tensors alone",
        "text.pth": "holds more than tensors",
        "script.pt": r"is a TorchScript, whose code would run, and its SHA-256 [0-9a-f]{64} is not that of",
    }
    for name, words in said.items():
        with pytest.raises(BadData, match=words):
            inception.load(tmp_path / name)
    assert not loaded and not (tmp_path / "executed").exists()


# -- the command ---------------------------------------------------------------------------------------------------------------


class Projection(torch.nn.Module):
    """Stands in for Inception: the mean of 4 x 4 patches, mixed."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(48, width) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(x, 4).flatten(1) @ self.mix


class Maps(Projection):
    """No features: maps of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def script(path: Path, module: torch.nn.Module) -> Path:
    torch.jit.save(torch.jit.script(module), str(path))
    return path


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A network, one that gives no features, and one whose features are not finite."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("scripts")
    for name, module in {"net": Projection(12), "maps": Maps(2), "wild": Projection(2, math.nan)}.items():
        script(folder / f"{name}.pt", module)
    return folder


@pytest.fixture
def place(scripts, tmp_path, monkeypatch):
    """A folder without weights or statistics, with small networks and, as `samples.npz`, images like the digits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2S_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    shutil.copytree(scripts, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(inception, "KNOWN_SCRIPTS", {sha256(path) for path in tmp_path.glob("*.pt")})
    samples("samples.npz", m2s.data.load("digits").train.numpy()[::-1][:90])
    return tmp_path


def samples(name: str, tokens: np.ndarray, **settings: object) -> None:
    np.savez(name, tokens=tokens.astype(tokens.dtype if tokens.dtype.kind == "f" else np.int32), settings=json.dumps(settings))


def run(*arguments: str) -> dict:
    tyro.cli(Fid, args=[*arguments, "--out", "fid.json", "--overwrite"]).run()
    return json.loads(Path("fid.json").read_text())


def features(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Written once more: digits through the network of a file."""
    images = (tokens.reshape(-1, 1, 8, 8) / 16).expand(-1, 3, -1, -1)
    with torch.no_grad():
        return torch.jit.load(str(path))(2 * F.interpolate(images, size=(299, 299), mode="bilinear") - 1)


def test_a_split_against_another(place, capsys):
    common = ("--inception", "net.pt", "--batch-size", "50", "--limit", "120")
    result = run("digits:train", "--against", "digits:test", *common)
    digits = m2s.data.load("digits")
    x, y = (features(place / "net.pt", part[:120]) for part in (digits.train, digits.test))
    assert result["fid"] == pytest.approx(by_square_root(x.double().numpy(), y.double().numpy()), rel=1e-4)
    assert result["samples"]["count"] == result["reference"]["count"] == 120
    assert result["kid"]["size"] == 60 and result["kid"]["subsets"] == 100
    assert abs(result["kid"]["mean"] - by_loops(x.tolist(), y.tolist())) < 4 * result["kid"]["spread"] / math.sqrt(100)
    assert result["network"]["features"] == 12 and len(result["network"]["sha256"]) == 64
    assert result["options"]["batch_size"] == 50 and result["versions"]["torch"] == torch.__version__
    text = capsys.readouterr().out
    assert f"FID  {result['fid']:.4f}" in text and f"± {result['kid']['error']:.6f}" in text and "not FID's Inception" in text


def test_samples_of_a_file(place):
    common = ("--against", "digits:test", "--inception", "net.pt", "--no-kid")
    result = run("samples.npz", *common)
    with np.load("samples.npz") as file:
        x = features(place / "net.pt", torch.from_numpy(file["tokens"]))
    y = features(place / "net.pt", m2s.data.load("digits").test)
    assert result["fid"] == pytest.approx(by_square_root(x.double().numpy(), y.double().numpy()), rel=1e-4)
    assert result["kid"] is None and result["samples"]["count"] == 90
    samples("same.npz", m2s.data.load("digits").test.numpy(), seed=7)
    same = run("same.npz", *common)
    assert abs(same["fid"]) < 1e-9 and same["samples"]["settings"] == {"seed": 7}
    assert same["samples"]["sha256"] == same["reference"]["sha256"]


def test_protocols(place, monkeypatch):
    assert PROTOCOLS["mnist-5k"] == Protocol(5_000, "mnist:test", 5_000)
    assert PROTOCOLS["cifar10-50k"] == Protocol(50_000, "cifar10:train", None)
    monkeypatch.setitem(PROTOCOLS, "digits-80", Protocol(80, "digits:test", 60))
    named = run("samples.npz", "--protocol", "digits-80", "--inception", "net.pt")
    assert (named["samples"]["count"], named["reference"]["count"], named["protocol"]) == (80, 60, "digits-80")
    limited = run("digits:train", "--against", "digits:test", "--inception", "net.pt", "--limit", "60")
    assert (limited["samples"]["count"], limited["reference"]["count"]) == (60, 60)
    assert limited["reference"]["sha256"] == named["reference"]["sha256"]
    samples("few.npz", m2s.data.load("digits").train.numpy()[:79])
    with pytest.raises(UserError, match=r"holds 79 samples, but digits-80 is of 80: draw more \(m2s sample --n 80\)"):
        run("few.npz", "--protocol", "digits-80", "--inception", "net.pt")


def test_statistics_of_data_are_kept(place, monkeypatch, capsys):
    arguments = ("samples.npz", "--against", "digits:test", "--inception", "net.pt")
    first = run(*arguments)
    (kept_file,) = (place / "data" / "statistics").iterdir()
    assert kept_file.name.startswith("digits-test-256-")
    seen, full = [], inception.features

    def counted(network, tokens, *rest):
        seen.append(len(tokens))
        return full(network, tokens, *rest)

    monkeypatch.setattr(inception, "features", counted)
    second = run(*arguments)
    for name in ("fid", "kid", "samples", "reference", "network"):
        assert second[name] == first[name]
    assert seen == [90]
    kept_file.write_bytes(kept_file.read_bytes()[:-100])
    assert run(*arguments)["fid"] == first["fid"] and seen == [90, 90, 256]
    assert "computing again" in capsys.readouterr().err
    run(*arguments, "--limit", "60")
    monkeypatch.setattr(inception, "KNOWN_SCRIPTS", {sha256(script(place / "net.pt", Projection(12)))})
    assert run(*arguments)["fid"] != first["fid"]
    assert seen[3:] == [60, 60, 90, 256] and len(list(kept_file.parent.iterdir())) == 3


def test_a_place_that_cannot_be_written_costs_the_statistics_only(place, capsys):
    (place / "data").write_text("a file")
    assert run("samples.npz", "--against", "digits:test", "--inception", "net.pt")["fid"] > 0
    assert "are not kept" in capsys.readouterr().err


def test_few_images(place, capsys):
    arguments = ("digits:train", "--against", "digits:test", "--inception", "net.pt", "--limit", "12")
    with pytest.raises(UserError, match="has 12 images, too few for a covariance of 12 features: at least 13 are needed"):
        run(*arguments)
    result = run(*arguments, "--few")
    digits = m2s.data.load("digits")
    x, y = (features(place / "net.pt", part[:12]).double().numpy() for part in (digits.train, digits.test))
    assert result["fid"] == pytest.approx(by_nuclear_norm(x, y), rel=1e-4)
    assert "the covariance is singular" in capsys.readouterr().out
    with pytest.raises(UserError, match="KID, which needs 4"):
        run(*arguments[:-1], "3", "--few")
    assert run(*arguments[:-1], "3", "--few", "--no-kid")["samples"]["count"] == 3


DIGITS = np.zeros((40, 64), np.int32)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["samples.npz"], "--protocol mnist-5k or cifar10-50k, or --against"),
        (["samples.npz", "--protocol", "mnist-50k"], "choose from mnist-5k, cifar10-50k"),
        (["samples.npz", "--protocol", "mnist-5k", "--against", "digits:test"], "drop --against"),
        (["samples.npz", "--protocol", "mnist-5k", "--limit", "9"], "drop --against and --limit"),
        (["samples.npz", "--protocol", "mnist-5k", "--inception", "net.pt"], "mnist: .* get them from"),
        (["samples.npz", "--against", "digits"], "choose from digits:train, digits:test, mnist:train"),
        (["samples.npz", "--against", "digits:valid"], "choose from"),
        (["samples.npz", "--against", "digits:test", "--limit", "1"], "--limit is 1"),
        (["samples.npz", "--against", "digits:test", "--batch-size", "0"], "--batch-size is 0"),
        (["samples.npz", "--against", "digits:test", "--device", "abacus"], "device is 'abacus', but it must be cpu, cuda"),
        (["samples.npz", "--against", "digits:test", "--inception", "net.pt", "--out", "new/x.txt"], "must end in .json"),
        (["samples.npz", "--against", "digits:test"], "Online: curl .*pytorch-fid.*6726825d.pth .*Offline: .*--inception"),
        (["samples.npz", "--against", "digits:test", "--inception", "nowhere.pt"], "nowhere.pt is no file"),
        (["samples.npz", "--against", "digits:test", "--inception", "maps.pt"], "does not map images"),
        (
            ["samples.npz", "--against", "digits:test", "--inception", "wild.pt"],
            "wild.pt fails in the batch that starts at image 0",
        ),
        (["nowhere.npz", "--against", "digits:test", "--inception", "net.pt"], "there is no file nowhere.npz"),
        (["runs", "--against", "digits:test", "--inception", "net.pt"], "there is no file runs"),
        (["mnist:dev", "--against", "digits:test", "--inception", "net.pt"], "there is no file mnist:dev"),
        (["text.npz", "--against", "digits:test", "--inception", "net.pt"], "no .npz with an array `tokens`"),
        (["other.npz", "--against", "digits:test", "--inception", "net.pt"], "no .npz with an array `tokens`"),
        (
            ["long.npz", "--against", "digits:test", "--inception", "net.pt"],
            r"int32 tokens of shape \[40, 65\].* 8 x 8: .*\[N, 64\]",
        ),
        (["square.npz", "--against", "digits:test", "--inception", "net.pt"], r"shape \[40, 8, 8\]"),
        (["float.npz", "--against", "digits:test", "--inception", "net.pt"], "float64 tokens"),
        (["mask.npz", "--against", "digits:test", "--inception", "net.pt"], r"tokens\[3, 5\] is 17, .* 0..16: .* vocabulary"),
        (["negative.npz", "--against", "digits:test", "--inception", "net.pt"], r"tokens\[0, 1\] is -1"),
        (
            ["binary.npz", "--against", "digits:test", "--inception", "net.pt"],
            "17 levels: give images of the same size",
        ),
        (["one.npz", "--against", "digits:test", "--inception", "net.pt"], "has 1 images, too few .* at least 13"),
        (["empty.npz", "--against", "digits:test", "--inception", "net.pt", "--few"], "has 0 images, too few .* at least 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(arguments, said, place):
    (place / "runs").mkdir()
    (place / "text.npz").write_text("no archive")
    np.savez("other.npz", images=DIGITS)
    masked, negative = DIGITS.copy(), DIGITS.copy()
    masked[3, 5], negative[0, 1] = 17, -1
    files = {"long": np.zeros((40, 65)).astype(int), "square": DIGITS.reshape(40, 8, 8), "float": DIGITS.astype(float)}
    for name, tokens in {**files, "mask": masked, "negative": negative, "one": DIGITS[:1], "empty": DIGITS[:0]}.items():
        samples(f"{name}.npz", tokens)
    samples("binary.npz", DIGITS, data={"kind": "image", "shape": [8, 8], "levels": 2})
    before = sorted(place.rglob("*"))
    given = tyro.cli(Fid, args=[*arguments, *([] if "--out" in arguments else ["--out", "fid.json"])])
    with pytest.raises(UserError, match=said) as error:
        given.run()
    assert "\n" not in str(error.value) and sorted(place.rglob("*")) == before


def test_images_of_another_kind(place, monkeypatch):
    other = command.ImageTokens("mnist:train", torch.zeros(3, 784, dtype=torch.uint8), (28, 28), 256)
    monkeypatch.setattr(command, "load_split", lambda name: other)
    reference = command.ImageTokens("digits:test", torch.zeros(3, 64, dtype=torch.uint8), (8, 8), 17)
    with pytest.raises(
        UserError, match=r"mnist:train has images of \[28, 28\] in 256 levels, but digits:test has \[8, 8\] in 17"
    ):
        command.read("mnist:train", reference)
