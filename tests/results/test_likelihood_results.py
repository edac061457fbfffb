"""The tables of likelihood are those of their files."""

from result_files import experiment, has_rows, section


def test_rows_of_the_certificates_table() -> None:
    """Estimators that lack nothing pass everywhere, and the others fail where bounds are tight."""
    found = experiment("certificates")["certificates"]
    for name in dict.fromkeys(each["estimator"] for each in found):
        rows = [each for each in found if each["estimator"] == name]
        passed = sum(each["passed"] for each in rows)
        kraft, margin = max(each["kraft"] for each in rows), min(each["margin"] for each in rows)
        page = section("Which estimators of the likelihood are upper bounds")
        has_rows(page, f"| `{name}` | {passed} of {len(rows)} | {kraft:.6f} | {margin:.6f} |")
    for each in found:
        assert each["passed"] or each["missing"]
        assert not (each["passed"] and each["missing"] and each["world"].endswith("exact network"))


def test_rows_of_the_variance_table() -> None:
    page, methods = section("The variance of the NELBO per network call"), experiment("variance")["methods"]
    names = list(methods)
    for design in methods[names[0]]:
        cells = []
        for name in names:
            row = methods[name][design]
            interval = f" ({row['low']:.2f} to {row['high']:.2f})" if "low" in row else ""
            cells.append(f"{row['ratio']:.2f}{interval}")
        has_rows(page, f"| {design} | {' | '.join(cells)} |")


def test_rows_of_the_table_of_estimators() -> None:
    page = section("What published estimators drop on trained networks")
    for network, rows in experiment("variance")["estimators"].items():
        for name, row in rows.items():
            bound = f"no: lacks {', '.join(row['missing'])}" if row["missing"] else "yes"
            numbers = f"{row['nats']:.2f} | {row['drop']:.2f} ± {row['drop_error']:.2f} | {row['variance_times_calls']:,.0f}"
            has_rows(page, f"| `{network}` | `{name}` | {bound} | {numbers} |")
