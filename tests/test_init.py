"""`retain init`: what it writes is taken by `retain train` as it stands, and what it refuses it refuses in a sentence."""

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner

import retain as package
from retain.cli import app
from retain.data.tables import table_bytes
from retain.spec import RunSpec
from retain.training.loop import look

ROWS = 240


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def retain(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result, *said):
    assert result.exit_code == 2, result.output
    for word in said:
        assert word in result.stderr, result.stderr
    assert result.stdout == "" and "Traceback" not in result.output


def columns(rows=ROWS, months=12, rare=2, **more):
    """Orders: a number, a category, dates over some months, an identifier, and a label of which one in `rare` is yes."""
    draws = np.random.default_rng(0)
    date = [f"2026-{1 + i * months // rows:02d}-{1 + i % 28:02d}" for i in range(rows)]
    return {
        "amount": draws.normal(size=rows),
        "shop": draws.choice(["north", "south"], rows),
        "ordered": date,
        "order_id": [f"A{i:06d}" for i in range(rows)],
        "churned": ["yes" if i % rare == 0 else "no" for i in range(rows)],
        **more,
    }


def save(path, **values):
    table = pa.table(values)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        pyarrow.csv.write_csv(table, path)
    return path


def written(*arguments, output="retain.yaml"):
    """What init saw and what training would do with what it wrote; both must succeed."""
    result = retain("init", *arguments, "--output", output, "--json")
    assert result.exit_code == 0, result.output
    dry = retain("train", output, "--dry-run", "--json", "--run", "run")
    assert dry.exit_code == 0, dry.output
    return json.loads(result.stdout), json.loads(dry.stdout), yaml.safe_load((Path.cwd() / output).read_text(encoding="utf-8"))


def test_months_of_one_file(here):
    save(here / "orders.csv", **columns())
    seen, dry, config = written("--data", "orders.csv", "--label", "churned")
    assert [task["task"] for task in dry["tasks"]] == seen["tasks"] == [f"2026-{month:02d}" for month in range(1, 13)]
    assert config["stream"]["split"] == {"by": "time", "column": "ordered", "every": "month"}
    assert config["stream"]["drop"] == ["order_id"] and config["stream"]["metric"] == "auc"
    assert config["training_params"]["regularization"] == {"replay_ratio": 0.5, "replay_capacity": 2000}
    assert config["budget"] == {"forgetting": 0.05}
    text = (here / "retain.yaml").read_text()
    assert "12 months, 2026-01 to 2026-12; 240 rows" in text and "ewc_lambda" in text and "no: 120" in text


def test_what_it_writes_can_be_trained(here):
    save(here / "orders.csv", **columns(months=3))
    result = retain("init", "--data", "orders.csv", "--label", "churned")
    assert result.exit_code == 0 and result.stdout.endswith("Next: retain train retain.yaml --dry-run\n")
    assert retain("train", "retain.yaml", "--set", "training_params.epochs=1").exit_code == 0


@pytest.mark.parametrize("months", [1, 2])
def test_too_few_months_make_four_periods(here, months):
    save(here / "orders.csv", **columns(months=months))
    _, dry, config = written("--data", "orders.csv", "--label", "churned", "--time", "ordered")
    assert config["stream"]["split"] == {"by": "time", "column": "ordered", "periods": 4} and len(dry["tasks"]) == 4


def test_months_without_enough_rows_and_times_that_are_numbers_make_four_periods(here):
    values = columns()
    values["ordered"][-1] = "2027-05-01"
    save(here / "orders.csv", **values, day=np.arange(ROWS) * 7)
    for name in ("ordered", "day"):
        _, dry, config = written("--data", "orders.csv", "--label", "churned", "--time", name, output=f"{name}.yaml")
        assert config["stream"]["split"]["periods"] == len(dry["tasks"]) == 4


def test_several_files_are_tasks_and_paths_start_at_the_yaml(here):
    (here / "data").mkdir()
    (here / "configs").mkdir()
    for name, year in (("january", 2026), ("february", 2027)):
        ordered = [day.replace("2026", str(year)) for day in columns()["ordered"]]
        save(here / f"data/{name}.csv", **columns(ordered=ordered, paid=columns()["ordered"]))
    both = ("--data", "data/january.csv", "--data", here / "data/february.csv")
    _, dry, config = written(*both, "--label", "churned", output="configs/a.yaml")
    assert config["stream"]["csv"] == ["../data/january.csv", "../data/february.csv"]
    assert config["stream"]["split"] == {"by": "file"} and set(config["stream"]["drop"]) == {"ordered", "order_id"}
    assert [task["task"] for task in dry["tasks"]] == ["january", "february"]


def test_a_pattern_stands_in_the_yaml_for_files_that_come_later(here):
    (here / "data").mkdir()
    for year in (2026, 2027):
        save(here / f"data/{year}.csv", **columns(ordered=[day.replace("2026", str(year)) for day in columns()["ordered"]]))
    seen, dry, config = written("--data", "data/*.csv", "--label", "churned", "--time", "ordered")
    assert config["stream"]["csv"] == ["data/*.csv"] and seen["rows"] == 2 * ROWS and len(dry["tasks"]) == 24
    refused(retain("init", "--data", "date/*.csv", "--label", "churned", "--force"), "date/*.csv", "no file matches")


def test_whom_a_row_is_about(here):
    save(here / "orders.csv", **columns(customer=[i % 40 for i in range(ROWS)]))
    seen, _, config = written("--data", "orders.csv", "--label", "churned", "--id", "customer")
    assert config["stream"]["id"] == "customer" and "customer" not in {column["name"] for column in seen["columns"]}
    again = ("init", "--data", "orders.csv", "--label", "churned", "--force")
    refused(retain(*again, "--id", "custmer"), "--id", "custmer", "customer")
    refused(retain(*again, "--id", "churned"), "--id churned is also the label")
    refused(retain(*again, "--id", "ordered", "--time", "ordered"), "--id ordered is also the time")


@pytest.mark.parametrize("name", ["orders.csv.gz", "orders.jsonl", "orders.jsonl.gz", "orders.arrow", "orders.CSV"])
def test_every_form(here, name):
    form = name.lower().removesuffix(".gz").rpartition(".")[2]
    data = table_bytes(pa.table(columns()), form)
    (here / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    seen, dry, config = written("--data", name, "--label", "churned")
    assert seen["config"] == config and config["stream"][form] == [name] and len(dry["tasks"]) == 12


def test_files_that_disagree_about_their_columns(here):
    save(here / "a.parquet", **columns(extra=np.arange(ROWS) % 7, mixed=np.arange(ROWS) % 5))
    save(here / "b.parquet", **columns(mixed=["x", "y"] * (ROWS // 2)))
    _, _, config = written("--data", "a.parquet", "--data", "b.parquet", "--label", "churned")
    assert {"extra", "mixed"} <= set(config["stream"]["drop"])


def test_parquet_with_columns_that_training_refuses(here):
    odd = {
        "empty": pa.nulls(ROWS),
        "same": [3] * ROWS,
        "gaps": [None if i == 5 else float(i % 9) for i in range(ROWS)],
        "lists": [[1, 2]] * ROWS,
        "number": range(1000, 1000 + ROWS),
        "huge": [1e300, 1.0] * (ROWS // 2),
        "second": pa.array(np.arange(ROWS) * 86400, pa.timestamp("s")),
    }
    save(here / "orders.parquet", **columns(**odd))
    seen, dry, config = written("--data", "orders.parquet", "--label", "churned", "--time", "ordered")
    assert set(config["stream"]["drop"]) == {*odd, "order_id"} - {"gaps", "second"} and len(dry["tasks"]) == 12
    assert {c["name"]: c["kind"] for c in seen["columns"]}["number"] == "identifier"
    text = (here / "retain.yaml").read_text()
    assert "an indicator tells the model of: gaps (1)" in text and "1 of dates" in text


def test_rows_that_have_no_label_yet_are_left_out_and_said(here):
    save(here / "orders.csv", **columns(churned=["", *columns()["churned"][1:-1], ""]))
    seen, _, _ = written("--data", "orders.csv", "--label", "churned")
    assert seen["rows"] == ROWS - 2 and seen["unlabelled"] == 2 and set(seen["classes"]) == {"no", "yes"}
    assert "2 more rows have no label" in (here / "retain.yaml").read_text()


def test_two_columns_of_dates_do_not_split_unasked(here):
    save(here / "orders.csv", **columns(paid=columns()["ordered"]))
    _, dry, config = written("--data", "orders.csv", "--label", "churned")
    assert config["stream"]["split"] == {"by": "file"} and config["stream"]["drop"] == ["order_id"]
    assert "--time ordered or paid" in (here / "retain.yaml").read_text() and len(dry["tasks"]) == 1


HOSTILE = [
    'quo"te', "it's", "a: b", "a, b", "# no", "line\nbreak", "\r", "tab\t", " lead", "trail ", "订单号", "yes", "null", "1",
    "2026-01", "", "- x", "[x]", "{x}", "&x", "*x", "!x", "%x", "@x", "`x`", "back\\slash", "\u2028\x85", "\ufeff", "😀", "x" * 300,
    "a\n  b: c", "\x07",
]  # fmt: skip


def test_hostile_names_come_back_as_they_are(here):
    """As dropped columns, as leak suspects (which are named in comments), as label, as time and as classes."""
    odd = {name: [f"{name[:3]}{i}" for i in range(ROWS)] for name in HOSTILE}
    values = columns()
    leaks = {f"{name}~": values["churned"] for name in HOSTILE}
    label, when = "la:b\n'\"el, #订", "wh\nen: #"
    save(here / "orders.parquet", amount=values["amount"], **{when: values["ordered"], label: values["churned"]}, **odd, **leaks)
    _, dry, config = written("--data", "orders.parquet", "--label", label)
    assert config["stream"]["drop"] == HOSTILE and config["stream"]["label"] == label
    assert config["stream"]["split"]["column"] == when and len(dry["tasks"]) == 12
    text = (here / "retain.yaml").read_text(encoding="utf-8")
    assert text.count("# leak? ") == 21 and text.count("tells the label alone") == 20


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_classes(here, name):
    rare = [name if i % 30 == 0 else "fine" for i in range(ROWS)]
    save(here / "orders.parquet", **columns() | {"churned": rare})
    _, dry, config = written("--data", "orders.parquet", "--label", "churned")
    assert config["stream"]["positive"] == name and dry["classes"] == ["fine", name]


def test_imbalance_picks_the_metric(here):
    found = {}
    for rare in (2, 10, 30):
        save(here / "orders.csv", **columns(rare=rare))
        _, _, found[rare] = written("--data", "orders.csv", "--label", "churned", output=f"{rare}.yaml")
    assert [found[rare]["stream"]["metric"] for rare in found] == ["auc", "auc", "average_precision"]
    assert found[30]["stream"]["positive"] == "yes" and "positive" not in found[2]["stream"]
    assert "recall_at_fpr=0.01" in (here / "30.yaml").read_text()
    save(here / "orders.csv", **columns() | {"churned": [f"c{i % 3}" for i in range(ROWS)]})
    _, _, three = written("--data", "orders.csv", "--label", "churned", output="three.yaml")
    assert three["stream"]["metric"] == "accuracy"


def test_the_rare_class_is_positive_whatever_the_alphabet_says(here):
    save(here / "orders.csv", **columns() | {"churned": ["a" if i % 30 == 0 else "z" for i in range(ROWS)]})
    _, dry, config = written("--data", "orders.csv", "--label", "churned")
    assert config["stream"]["positive"] == "a" and dry["classes"] == ["z", "a"]


def test_leak_suspects_are_named_and_kept(here):
    values = columns()
    paid = [1.5 + i if label == "yes" else -1.5 - i for i, label in enumerate(values["churned"])]
    save(here / "orders.csv", **values, refund=values["churned"], paid=paid)
    seen, _, config = written("--data", "orders.csv", "--label", "churned")
    assert {c["name"] for c in seen["columns"] if c["leak"]} == {"refund", "paid"}
    assert config["stream"]["drop"] == ["order_id"]


def test_columns_and_labels_that_cannot_be(here):
    save(here / "orders.csv", **columns(same=["x"] * ROWS, gaps=["" if i < 3 else "x" for i in range(ROWS)]))
    data = ("--data", "orders.csv")
    refused(retain("init", *data, "--label", "churnd"), "--label", "did you mean churned?")
    refused(retain("init", *data, "--label", "churned", "--time", "orderd"), "--time", "did you mean ordered?")
    refused(retain("init", *data, "--label", "churned", "--time", "shop"), "no date")
    refused(retain("init", *data, "--label", "churned", "--time", "churned"), "--time churned is also the label")
    refused(retain("init", *data, "--label", "same"), "every row has the label x")
    refused(retain("init", *data, "--label", "order_id"), "240 values in 240 rows")
    refused(retain("init", *data, "--label", "amount"), "fractions")
    refused(retain("init", *data, "--label", "ordered"), "dates")
    refused(retain("init", *data, "--label", "gaps"), "every row has the label x")
    refused(retain("init", "--data", "nowhere.csv", "--label", "y"), "no such file")
    refused(retain("init", "--data", "orders.xlsx", "--label", "y"), ".parquet")
    refused(retain("init", *data, *data, "--label", "churned"), "listed twice")
    refused(retain("init", *data, "--label", "churned", "--output", "nowhere/a.yaml"), "--output")
    assert [path.name for path in here.iterdir()] == ["orders.csv"]


def test_a_file_that_is_there_stays_unless_forced(here):
    save(here / "orders.csv", **columns())
    (here / "retain.yaml").write_text("mine")
    refused(retain("init", "--data", "orders.csv", "--label", "churned"), "--force")
    assert (here / "retain.yaml").read_text() == "mine"
    assert retain("init", "--data", "orders.csv", "--label", "churned", "--force").exit_code == 0
    assert sorted(path.name for path in here.iterdir()) == ["orders.csv", "retain.yaml"]


def test_a_path_that_yaml_reads_otherwise_is_refused(here):
    (here / "$HOME").mkdir()
    save(here / "$HOME/orders.csv", **columns())
    refused(retain("init", "--data", "$HOME/orders.csv", "--label", "churned"), "Rename")


def test_from_python(here):
    save(here / "orders.csv", **columns())
    seen = package.init("orders.csv", "churned")
    assert seen["rows"] == ROWS and len(look(RunSpec.load("retain.yaml"), here / "run")["tasks"]) == 12


def test_ten_thousand_columns(here):
    numbers = np.random.default_rng(0).normal(size=(10_000, 40))
    save(here / "wide.parquet", label=["a", "b"] * 20, **{f"x{i}": row for i, row in enumerate(numbers)})
    start = time.perf_counter()
    seen = package.init("wide.parquet", "label")
    assert time.perf_counter() - start < 60 and len(seen["columns"]) == 10_000
