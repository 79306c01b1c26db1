"""Scoring new rows of a table with the model of a run."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from retain import api
from retain.cli import app
from retain.errors import DataError, RunError


def rows(count, seed):
    made = np.random.default_rng(seed)
    kind = made.choice(["a", "b", 'c, "d"'], count)
    age = made.normal(40, 10, count)
    churned = np.where(age + 15 * (kind == "a") + made.normal(0, 2, count) > 45, "yes", "no")
    return pa.table({"id": [f"{k:05d}" for k in range(count)], "age": age, "kind": kind, "churned": churned})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("churn")
    for month in (1, 2):
        pyarrow.csv.write_csv(rows(300, month), folder / f"{month}.csv")
    stream = {"csv": [str(folder / "1.csv"), str(folder / "2.csv")], "label": "churned", "drop": ["id"]}
    training = {"epochs": 10, "optimizer": "Adam(lr=1e-2)", "regularization": {"replay_ratio": 0.5}}
    api.train({"stream": stream, "training_params": training}, folder / "run")
    return folder / "run"


def write(table, path):
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl", "arrow"])
def test_probabilities_are_those_of_the_module_on_rows_encoded_by_hand(run, tmp_path, form):
    """Without a label, with the columns in another order."""
    new = rows(200, 9)
    write(new.select(["kind", "id", "age"]), tmp_path / f"new.{form}")
    found = api.predict(run, tmp_path / f"new.{form}", keep=["id"])
    learned = api.load(run)
    by_name = {entry["name"]: entry for entry in learned.columns}
    age = (np.array(new["age"]) - by_name["age"]["mean"]) / by_name["age"]["std"]
    kinds = [[float(kind == known) for known in (*by_name["kind"]["categories"], "(other)")] for kind in new["kind"].to_pylist()]
    parts = {"age": age[:, None].clip(-10, 10), "kind": np.array(kinds)}
    x = torch.tensor(np.concatenate([parts[entry["name"]] for entry in learned.columns], 1), dtype=torch.float32)
    expected = learned.module(x).double().softmax(1).detach().numpy()
    assert found.column_names == ["id", "prediction", *(f"p({name})" for name in learned.classes)]
    assert found["id"].to_pylist() == new["id"].to_pylist()
    for place, name in enumerate(learned.classes):
        np.testing.assert_allclose(np.array(found[f"p({name})"]), expected[:, place], atol=1e-5)
    right = np.array(found["prediction"].to_pylist()) == np.array(new["churned"].to_pylist())
    assert right.mean() > 0.85


def test_a_category_that_was_never_seen_is_one_of_the_others(run, tmp_path):
    write(pa.table({"age": [40.0, 40.0], "kind": ["new", "newer"]}), tmp_path / "new.csv")
    first, second = api.predict(run, tmp_path / "new.csv")["p(yes)"].to_pylist()
    assert first == second


def test_what_cannot_be_scored_is_refused(run, tmp_path):
    write(pa.table({"age": [40.0]}), tmp_path / "narrow.csv")
    with pytest.raises(DataError, match="kind"):
        api.predict(run, tmp_path / "narrow.csv")
    write(pa.table({"age": ["forty"], "kind": ["a"]}), tmp_path / "words.csv")
    with pytest.raises(DataError, match="age held numbers"):
        api.predict(run, tmp_path / "words.csv")
    with pytest.raises(DataError, match="no such file"):
        api.predict(run, tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"expected a file called \.csv"):
        api.predict(run, tmp_path / "table.xlsx")
    write(pa.table({"age": [40.0], "kind": ["a"]}), tmp_path / "new.csv")
    with pytest.raises(DataError, match="order"):
        api.predict(run, tmp_path / "new.csv", keep=["order"])
    digits = {"stream": {"random": {"shape": [4], "samples": 8}}, "training_params": {"epochs": 1}}
    api.train(digits, tmp_path / "vectors")
    with pytest.raises(RunError, match="not learned from a table"):
        api.predict(tmp_path / "vectors", tmp_path / "new.csv")


def test_the_command(run, tmp_path):
    write(rows(20, 5).drop_columns(["churned"]), tmp_path / "new.csv")
    command = ["predict", str(run), "--input", str(tmp_path / "new.csv"), "--keep", "id"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == '"id","prediction","p(no)","p(yes)"'
    assert lines[1].startswith('"00000",')
    assert len(lines) == 21
    for suffix in ("csv", "parquet", "jsonl", "arrow"):
        target = tmp_path / f"scored.{suffix}"
        said = CliRunner().invoke(app, [*command, "--output", str(target)])
        assert said.exit_code == 0, said.output
        assert "20 rows" in said.stdout
        assert target.stat().st_size
    as_json = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert as_json["rows"] == 20
    assert len(as_json["values"]["p(yes)"]) == 20
    wrong = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "scored.xls")])
    assert wrong.exit_code == 2
    assert "expected a name that ends in .csv" in wrong.stderr
    assert not list(tmp_path.glob(".*"))
