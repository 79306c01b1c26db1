"""Names that mean something elsewhere, from the table to the predictions, and tables of odd shapes."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from typer.testing import CliRunner

from retain.cli import app

NAMES = [
    'quo"te',
    "it's",
    "a, b",
    "<script>alert(1)</script>",
    "line\nbreak",
    "订单号",
    " lead",
    "a: b #c",
    "=1+1",
    "😀",
    "{{ x }}",
]
CLASSES = ['<script>alert("x")</script>', 'no, "thanks"\n']
LABEL = "label <y>"


def retain(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A csv whose every name is odd, and its configuration by `retain init`."""
    draw, rows = np.random.default_rng(0), 60
    columns = {name: draw.normal(size=rows) for name in NAMES}
    columns |= {"empty": pa.nulls(rows, pa.float64()), "constant": [3.0] * rows}
    columns["text"] = [("<b>", 'x,"y"', "新\n行")[row % 3] for row in range(rows)]
    columns[LABEL] = [CLASSES[row % 2] for row in range(rows)]
    pyarrow.csv.write_csv(pa.table(columns), tmp_path / "rows.csv")
    monkeypatch.chdir(tmp_path)
    retain("init", "--data", "rows.csv", "--label", LABEL)
    return tmp_path


def test_odd_names_go_from_the_table_to_the_predictions(hostile):
    out = retain("train", "retain.yaml", "--run", "run", "--json")
    assert json.loads(out.stdout)["tasks"] == ["rows"]
    retain("predict", "run", "--input", "rows.csv", "--keep", "a, b", "--keep", "line\nbreak", "--output", "scored.csv")
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    scored, rows = (pyarrow.csv.read_csv(name, parse_options=options) for name in ("scored.csv", "rows.csv"))
    assert scored.column_names == ["a, b", "line\nbreak", "prediction", *(f"p({name})" for name in CLASSES)]
    assert scored["a, b"].equals(rows["a, b"]) and set(scored["prediction"].to_pylist()) <= set(CLASSES)


def test_every_column_of_odd_names_may_stay(hostile):
    """Without init's drop: a column without values is left out and said, a constant one is harmless."""
    text = (hostile / "retain.yaml").read_text().replace("    - empty  # empty\n", "").replace("    - constant  # always 3\n", "")
    (hostile / "all.yaml").write_text(text.replace("  drop:  # 2 of 14 columns\n", ""))
    found = json.loads(retain("train", "all.yaml", "--run", "all", "--dry-run", "--json").stdout)
    assert any("left out: empty" in note for note in found["notes"])
    retain("train", "all.yaml", "--run", "all", "--set", "training_params.max_steps=2")
    retain("predict", "all", "--input", "rows.csv", "--output", "scored.parquet")


def test_a_kept_column_is_carried_as_it_is_written(hostile):
    retain("train", "retain.yaml", "--run", "run", "--set", "training_params.max_steps=1")
    rows = pyarrow.csv.read_csv("rows.csv", parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
    pyarrow.csv.write_csv(rows.append_column("id", pa.array([f"{row:04d}" for row in range(60)])), "with_id.csv")
    out = retain("predict", "run", "--input", "with_id.csv", "--keep", "id", "--keep", 'quo"te', "--json")
    assert json.loads(out.stdout)["values"]["id"][7] == "0007"


def test_ten_thousand_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    columns = {f"c{place}": draw.normal(size=40).round(3) for place in range(10_000)}
    pyarrow.csv.write_csv(pa.table({**columns, "y": np.arange(40) % 2}), "wide.csv")
    retain("init", "--data", "wide.csv", "--label", "y")
    retain("train", "retain.yaml", "--run", "run", "--set", "training_params.max_steps=1")
    assert json.loads(retain("predict", "run", "--input", "wide.csv", "--json").stdout)["rows"] == 40
