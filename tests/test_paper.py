"""`scripts/reproduce_paper.py --quick`: the figures against theory, and docs/paper.md's marks and plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "reproduce_paper.py"


@pytest.fixture(scope="module")
def tables(smollm2_path) -> dict[str, dict[tuple, list]]:
    """By experiment the columns of each row, under its first cells: what is text names the row."""
    command = [sys.executable, SCRIPT, "--quick", "--json"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    names = {"recall": 2, "captured": 2, "blocks": 2}
    return {
        name: {tuple(row[: names.get(name, 1)]): row[names.get(name, 1) :] for row in table["rows"]}
        for name, table in found.items()
    }


def test_distortions_are_those_of_the_theorems(tables):
    for (bits,), row in tables["distortion"].items():
        d_mse, codebook, paper_mse, low, high, d_prod, theory, paper_prod, high_prod = row
        assert d_mse == pytest.approx(codebook, rel=0.02) and low < d_mse < high
        assert d_prod == pytest.approx(theory, rel=0.05) and low < d_prod < high_prod
        if bits < 4:
            assert d_mse == pytest.approx(paper_mse, abs=0.006) and d_prod == pytest.approx(paper_prod, rel=0.04)
    # The paper's 0.047 at 4 bits is not what its own theorem gives.
    assert tables["distortion"][4,][6] == pytest.approx(0.0534, abs=5e-4)


def test_mse_is_biased_and_prod_is_not(tables):
    for theory, mse, prod in tables["bias"].values():
        expected = float(theory.removesuffix(" %"))
        (mean, error), (prod_mean, prod_error) = (map(float, x.removesuffix(" %").split(" ± ")) for x in (mse, prod))
        assert abs(mean - expected) < 5 * error + 0.02 and abs(prod_mean) < 5 * prod_error + 0.02


def test_the_density_nears_the_gaussian(tables):
    extra = [row[3] / row[2] - 1 for row in tables["density"].values()]
    assert extra == sorted(extra, reverse=True) and extra[-1] < 0.002 < extra[1] < 0.02
    for kurtosis, theory, *_ in tables["density"].values():
        assert kurtosis == pytest.approx(theory, abs=0.03)


def test_small_blocks_do_what_a_dense_rotation_does(tables):
    rows = tables["outliers"]
    for column in (1, 2):
        none, dense, *others = (row[column] for row in rows.values())
        assert none > 10 * max(dense, *others)
        assert others[1] < 1.2 * dense and others[-1] < 0.7 * dense


def test_the_tutorials_claims_do_not_come_from_its_formulas(tables):
    for claim, formulas, _mended, prod in tables["tutorial-single"].values():
        assert formulas > 200 * claim and prod < formulas
    claimed, formulas, _mended, prod, mse = tables["tutorial-cache"].values()
    assert claimed[0] > 0.99 > 0.7 > formulas[0] and formulas[0] < prod[0] < mse[0]
    assert formulas[2] == "25.88 KB" and formulas[3] == "4.95x"  # its own bits_per_element
    slope = {name: float(row[3].split(" ± ")[0]) for (name,), row in tables["tutorial-bias"].items()}
    assert abs(slope["two stages, 3 bits"] - 1) > 0.04 > 0.03 > abs(slope["mended two stages, 3 bits"] - 1)
    assert slope["TurboQuant-prod, 3 bits"] == pytest.approx(1, abs=0.01)
    errors = [row[0] for row in tables["tutorial-faults"].values()]
    assert errors[-1] < 0.5 * min(errors[:-1])


def test_recall(tables):
    for (bits, name), row in tables["recall"].items():
        assert row == sorted(row) and 0.3 < row[0] < 1 and row[-1] > 0.9, (bits, name)
    for bits in (2, 4):
        assert tables["recall"][bits, "TurboQuant-MSE"][0] > tables["recall"][bits, "TurboQuant-prod"][0]


def test_keys_and_values_of_a_model(tables):
    rows = tables["captured"]
    for bits in (3, 4):
        mse, prod, block = (rows[bits, name] for name in ("TurboQuant-MSE", "TurboQuant-prod", "block"))
        assert prod[0] <= mse[0] + 0.25 and prod[2] > 2 * mse[2]
        assert block[1] < mse[1] and block[3] < mse[3]
    assert all(np.isfinite(row).all() for row in rows.values())


def test_block_formats(tables):
    rows = {key: row[0] for key, row in tables["blocks"].items()}
    assert rows[4.5, "searched scale (tq4)"] < rows[4.5, "q4_0"] < rows[4.5, "norm as scale (seed's TQ4)"]
    assert rows[4.5, "searched scale (tq4)"] < rows[4.5, "iq4_nl"]
    for bits, name in ((4.5, "tq4"), (3.5, "tq3")):
        assert 4.0**-bits < rows[bits, "trellis, window of 6 bits"] < rows[bits, f"searched scale ({name})"]


def test_the_page_has_every_table_and_plot(tables):
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for name in tables:
        table = page.split(f"<!-- {name}: begin -->\n")[1].split(f"<!-- {name}: end -->")[0]
        assert table.startswith("| ") and table.count("\n") == len(tables[name]) + 2, name
    for name in ("distortion", "density", "recall"):
        assert f"](paper-{name}.svg)" in page and (ROOT / "docs" / f"paper-{name}.svg").stat().st_size > 10_000


def test_an_unknown_experiment_is_named():
    done = subprocess.run([sys.executable, SCRIPT, "--only", "fun"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "no experiment 'fun'; there are distortion" in done.stderr
