"""The tables of images and of samplers are those of their files."""

import pytest
from derived_values import repair_tables, validations
from result_files import RESULTS, experiment, has_rows, nelbo, section


def test_rows_of_the_digits_tables() -> None:
    for row in experiment("digits"):
        found, mean = " ".join(f"{bits:.3f}" for bits in row["bits"]), sum(row["bits"]) / len(row["bits"])
        has_rows(RESULTS, f"| `{row['method']}` | {row['limit']:.2f} | {found} | {mean:.3f} |")
        assert max(row["bits"]) < row["limit"]
    for row in experiment("methods")["rows"]:
        bits = f"{row['bits']:.4f}" + ("" if row["error"] is None else f" ± {row['error']:.4f}")
        has_rows(RESULTS, f"| `{row['method']}` | {bits} | {row['distance']:.3f} | {row['samples_per_second']:.1f} |")


def test_rows_of_the_mnist_table() -> None:
    from m2s.methods import METHODS  # here, so that the other tests do not import torch

    page, rows = section("Every method on MNIST, one budget"), experiment("mnist")["rows"]
    assert [row["method"] for row in rows] == [name for name in METHODS if name != "m2s-hybrid"]  # that one is gidd
    for row in rows:
        bits, distances = nelbo(row), [f"{each['fid']:.2f}" for each in row["samples"]]
        if len(distances) == 1:
            distances = ["-", "-", f"{distances[0]} ({row['samples'][0]['steps']} steps)"]
        speed = f"{row['images_per_second']:,.0f} | {row['peak_gib']:.1f} | {row['samples'][-1]['samples_per_second']:,.1f}"
        line = f"{bits['value']:.4f} ± {bits['rows_error']:.4f} | {' | '.join(distances)} | {speed} | {row['sampler']}"
        has_rows(page, f"| `{row['method']}` | {line} |")


def test_rows_of_the_50_epochs_table() -> None:
    page = section("MNIST at 50 epochs")
    pairs = list(zip(validations("m2s"), validations("m2s-offset"), strict=True))
    for paper, offset in pairs:
        assert paper["step"] == offset["step"] and paper["bits"] > offset["bits"]  # "higher at all 20 validations"
        bits = f"{paper['bits']:.4f} | {offset['bits']:.4f} | {paper['bits'] - offset['bits']:.4f}"
        terms = f"{paper['reconstruction']:.4f} | {offset['reconstruction']:.4f}"
        has_rows(page, f"| {paper['step']:,} | {bits} | {terms} |")
    assert len(pairs) == 20 and pairs[-1][0]["step"] == 11_700
    # "`m2s-offset` passes that value between steps 3,510 and 4,095"
    passed = [offset["step"] for _, offset in pairs if offset["bits"] < pairs[-1][0]["bits"]]
    assert passed[0] == 4095
    assert all(
        "error" in row and "nelbo" not in row for row in experiment("mnist-50-epochs")["rows"]
    )  # "Both rows are incomplete"


@pytest.mark.parametrize(("name", "wanted"), [("fid-mnist", 4.56), ("fid-cifar10", 3.15)])
def test_fid_of_data_against_data(name: str, wanted: float) -> None:
    assert round(experiment(name)["fid"], 2) == wanted


def test_rows_of_the_tables_of_projection() -> None:
    page, rows = section("When projection helps"), experiment("repair")["rows"]
    has_rows(page, *repair_tables())
    for row in rows:
        for errors in row["score_errors"]:  # "the lower score entropy at every time"
            assert errors["score_entropy"]["projected"] < errors["score_entropy"]["as it is"]
        for steps in row["steps"][:2]:  # "After 600 steps it removes"
            assert row["state"] == 200 or steps["differences"]["projected - as it is"]["value"] < 0
    means = [one for row in rows for one in row["mean_scores"]]
    assert max(one["as it is"] - one["projected"] for one in means if one["t"] >= 0.3) < 0.03
    assert max(one["projected"] - one["as it is"] for one in means) < 0  # "Projection lowers the mean score"
