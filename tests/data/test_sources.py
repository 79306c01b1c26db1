import gzip
import io
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from retain.data import images
from retain.data.scenarios import build_stream
from retain.errors import DataError, RetainError
from retain.spec import RunSpec

ROWS = {"age": [1, 2, 3, 4, 5, 6, 7, 8], "job": list("aabbaabb"), "y": ["no", "yes"] * 4}


def build(frozen=None, **keys):
    keys.setdefault("split", {"by": "none"})
    return build_stream(RunSpec.parse({"stream": keys}), frozen)


def refused(text, **keys):
    with pytest.raises(RetainError, match=text) as caught:
        build(**keys)
    assert caught.value.exit_code == 2


@pytest.fixture
def csv(tmp_path):
    def write(text, name="data.csv"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def table_csv(rows=ROWS):
    return "\n".join([",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]) + "\n"


def npz(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_every_file_format_gives_the_same_rows(tmp_path, csv):
    table = pa.table(ROWS)
    files = {
        "csv": csv(table_csv()),
        "parquet": tmp_path / "d.parquet",
        "jsonl": tmp_path / "d.jsonl",
        "arrow": tmp_path / "d.arrow",
    }
    pq.write_table(table, files["parquet"])
    files["jsonl"].write_text("\n".join(str(row).replace("'", '"') for row in table.to_pylist()))
    pyarrow.feather.write_feather(table, str(files["arrow"]), compression="uncompressed")
    found = {form: build(**{form: str(path)}, label="y").tasks[0].fingerprint for form, path in files.items()}
    with gzip.open(tmp_path / "d.csv.gz", "wt") as file:
        file.write(table_csv())
    found["gz"] = build(csv=str(tmp_path / "d.csv.gz"), label="y").tasks[0].fingerprint
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    found["stream"] = build(arrow=str(tmp_path / "s.arrow"), label="y").tasks[0].fingerprint
    assert len(set(found.values())) == 1


def test_features_are_all_other_columns_or_those_named(csv):
    path = csv(table_csv())
    assert build(csv=path, label="y").features == ["age", "job=a", "job=b", "job=(other)"]
    assert build(csv=path, label="y", features=["age"]).features == ["age"]
    assert build(csv=path, label="y", drop=["age"]).features == ["job=a", "job=b", "job=(other)"]
    assert build(csv=path, label="y", split={"by": "column", "column": "job"}).features == ["age"]


def test_a_column_that_is_text_in_one_file_is_text_in_all(csv):
    first = csv("code,y\n" + "007,a\n12,b\n12,a\n007,b\n" * 2, "first.csv")
    second = csv("code,y\n" + "x,a\nx,b\n" * 2, "second.csv")
    stream = build(csv=[first, second], label="y", split={"by": "file"})
    assert stream.features == ["code=007", "code=12", "code=(other)"] and [t.name for t in stream.tasks] == ["first", "second"]
    alone = build(frozen=stream.frozen, csv=[first], label="y", split={"by": "file"})
    assert alone.tasks[0].fingerprint == stream.tasks[0].fingerprint


def test_a_file_of_a_finished_task_may_be_gone(csv, tmp_path):
    names = [csv(table_csv(), "may.csv"), csv(table_csv(), "june.csv")]
    stream = build(csv=names, label="y", split={"by": "file"})
    (tmp_path / "may.csv").unlink()
    later = build(frozen=stream.frozen, csv=names, label="y", split={"by": "file"})
    assert later.tasks[0].fingerprint == stream.tasks[1].fingerprint and "may.csv" in later.notes[0]
    refused("no such file", csv=names, label="y")


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        ("", {}, "the file is empty"),
        ("age,y\n", {}, r"no rows, only columns \(age, y\)"),
        ("a,b,label\n1,2,x\n3,4\n", {}, r"Expected 3 columns, got 2.*as many fields as the header"),
        (table_csv(), {"label": "Y2"}, r"stream\.label: .*no column Y2; did you mean y\?"),
        (table_csv(), {"features": ["agee"]}, r"stream\.features: .*no column agee; did you mean age\?"),
        (table_csv(), {"features": ["age", "y"]}, r"stream\.features: y is also the label"),
        (table_csv(), {"drop": ["agee"]}, r"stream\.drop: .*no column agee"),
        (table_csv(), {"drop": ["age", "job"]}, "no columns beside the label"),
        (
            table_csv(),
            {"split": {"by": "column", "column": "shop"}},
            r"stream\.split\.column: .*no column shop; known: age, job, y",
        ),
        (table_csv(), {"split": {"by": "column", "column": "job", "order": ["c"]}}, "no row has the value c. The data hold a, b"),
        (table_csv({**ROWS, "y": ["yes"] * 8}), {}, "every row has the label yes"),
        (table_csv({**ROWS, "y": [0.5] * 8}), {}, "holds fractions"),
        ("x,y\n1,a\n,b\ninf,a\n-inf,b\n", {}, r"data\.csv: column x has 2 infinite values \(rows 3, 4\).*drop"),
        ("x,y\n1,\n2,\n", {}, r"no row of .*data\.csv has a value in y"),
        ("x,y\n1,inf\n2,1\n", {}, r"column y has 1 missing or infinite value \(row 1\)"),
        ("x;y\n1;a\n2;b\n", {}, "Separate the fields by commas"),
        ("x,x,y\n1,1,a\n2,2,b\n", {"features": ["x"]}, "2 columns are called x"),
    ],
)
def test_tables_that_cannot_be_used(csv, text, keys, said):
    refused(said, **{"csv": csv(text), "label": "y", **keys} if "label" not in text else {"csv": csv(text), "label": "label"})


def test_files_that_cannot_be_read(tmp_path):
    refused("no such file", csv=str(tmp_path / "nothing.csv"), label="y")
    refused("is a folder", csv=str(tmp_path), label="y")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing of use PAR1")
    refused("cannot be read as parquet", parquet=str(tmp_path / "bad.parquet"), label="y")
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    refused("cannot be read as npz", npz=str(tmp_path / "bad.npz"))


def test_types_that_differ_between_files_are_named(tmp_path):
    for name, values in (("a", [1, 2]), ("b", ["x", "z"])):
        pq.write_table(pa.table({"v": values, "y": [0, 1]}), tmp_path / f"{name}.parquet")
    refused("column v holds double in .*a.parquet and string in", parquet=[str(tmp_path / f"{n}.parquet") for n in "ab"], label="y")


def test_images_in_a_table_are_decoded(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    encoded = []
    for each in pixels:
        image.fromarray(each).save(buffer := io.BytesIO(), "PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    pq.write_table(pa.table({"img": encoded, "raw": pixels.tolist(), "y": [0, 1] * 3}), tmp_path / "d.parquet")
    decoded = build(parquet=str(tmp_path / "d.parquet"), label="y", image="img")
    lists = build(parquet=str(tmp_path / "d.parquet"), label="y", image="raw")
    assert decoded.kind == "image" and decoded.shape == (1, 5, 4)
    assert decoded.tasks[0].fingerprint == lists.tasks[0].fingerprint
    rows = torch.cat([decoded.tasks[0].train.inputs["x"], decoded.tasks[0].test.inputs["x"]])
    assert {row.numpy().tobytes() for row in rows} == {each.tobytes() for each in pixels}
    assert build(parquet=str(tmp_path / "d.parquet"), label="y", image="img", image_size=3).shape == (1, 3, 3)


def test_values_that_no_type_here_holds_are_refused(tmp_path):
    path = str(tmp_path / "d.parquet")

    def wrong(said, label="y", **columns):
        pq.write_table(pa.table(columns), path)
        refused(said, parquet=path, label=label)

    wrong(r"label column y holds numbers as large as 1e\+20", x=[1, 2], y=[1e20, 1.0])
    wrong(r"label column y holds numbers as large as 9\.2", x=[1, 2], y=pa.array([2**63, 1], pa.uint64()))
    wrong(r"column x has 1 too large \(more than 3\.4e38\) value \(row 2\)", x=[1.0, 1e300, 2.0], y=[0, 1, 0])
    wrong("column t holds texts that are not valid Unicode", t=pa.array([b"\xff", b"a"]).view(pa.string()), y=[0, 1])
    pq.write_table(pa.table({"age": [1, 2], "y": [0, 1]}), path)
    refused("column age: row 1 holds int, which is no image", parquet=path, label="y", image="age")


def test_a_file_in_another_encoding_says_how_to_convert_it(tmp_path):
    (tmp_path / "a.csv").write_bytes("city,n,y\nKöln,1,a\nBonn,2,b\nBonn,3,a\nBonn,3,b\n".encode("latin1"))
    (tmp_path / "b.csv").write_text("city,n,y\nKöln,1,a\nBonn,2,b\n")
    refused(r"column city holds bytes that are not UTF-8.*iconv -f latin1 -t utf-8", csv=str(tmp_path / "a.csv"), label="y")
    assert build(csv=str(tmp_path / "a.csv"), label="y", drop=["city"]).features == ["n"]
    refused("iconv", csv=[str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], label="y")
    (tmp_path / "c.csv").write_bytes("größe,y\n1,a\n2,b\n".encode("latin1"))
    refused("iconv", csv=str(tmp_path / "c.csv"), label="y")


# --- arrays -----------------------------------------------------------------------------------------------------------


def arrays(shape=(5, 4), rows=8, dtype=np.uint8):
    x = np.random.default_rng(0).integers(0, 256, (rows, *shape)).astype(dtype)
    return {"x_train": x, "y_train": np.arange(rows) % 2, "x_test": x[:4], "y_test": np.arange(4) % 2}


@pytest.mark.parametrize(("shape", "want"), [((5, 4), (1, 5, 4)), ((6, 5, 3), (3, 6, 5)), ((3, 6, 5), (3, 6, 5)), ((7,), (7,))])
def test_arrays_are_images_channels_first_or_vectors(tmp_path, shape, want):
    stream = build(npz=npz(tmp_path / "d.npz", **arrays(shape)))
    assert stream.shape == want and stream.kind == ("image" if len(shape) > 1 else "vector")
    assert stream.tasks[0].train.inputs["x"].dtype == (torch.uint8 if len(shape) > 1 else torch.float32)
    assert (len(stream.tasks[0].train), len(stream.tasks[0].test)) == (8, 4)


def test_the_sources_own_validation_and_groups_are_used(tmp_path):
    given = arrays() | {"x_val": arrays()["x_train"][:2], "y_val": [0, 1], "group_train": list("aaaabbbb")}
    path = npz(tmp_path / "d.npz", **given, group_val=["a", "b"], group_test=list("abab"))
    stream = build(npz=path, split={"by": "column", "column": "group"})
    assert [(t.name, len(t.train), len(t.validation), len(t.test)) for t in stream.tasks] == [("a", 4, 1, 2), ("b", 4, 1, 2)]
    refused("arrays are split by group only", npz=path, split={"by": "column", "column": "shop"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y_train": np.arange(5)}, "x_train has 8 rows and y_train has 5"),
        ({"y_test": None}, "there is no y_test; .*seen: x_train, y_train, x_test"),
        ({"x_train": np.full((8, 5, 4), np.nan)}, r"x_train has 8 missing or infinite values \(rows 1, 2, 3, 4, 5, …\)"),
        ({"x_train": np.arange(8)}, r"x_train has shape \(8,\)"),
        ({"x_train": np.array(["a"] * 8)}, "x_train holds <U1"),
        ({"x_train": np.full((8, 5, 4), 256)}, "whole numbers from 256 to 256"),
        ({"x_test": np.zeros((4, 6, 4), np.uint8)}, r"shape \(1, 5, 4\), .*shape \(1, 6, 4\).*image_size"),
        ({"y_train": np.zeros((8, 2))}, "y_train of shape .* is no column"),
        ({"y_train": np.array(["a", "\ud800"] * 4)}, "y_train of shape .* is no column"),
        ({"x_train": np.full((8, 5), 1e300)}, r"x_train has 8 too large \(more than 3\.4e38\) values"),
        ({"x_train": np.full((8, 5), 2**63, np.uint64)}, r"x_train holds whole numbers up to 9223372036854775808"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path, change, said):
    given = {name: value for name, value in (arrays() | change).items() if value is not None}
    refused(said, npz=npz(tmp_path / "d.npz", **given))


@pytest.mark.parametrize("size", [10**9, 10**10])
def test_an_image_size_beyond_memory_is_refused(tmp_path, size):
    refused(f"stream.image_size={size}: .*Choose a smaller size", npz=npz(tmp_path / "d.npz", **arrays()), image_size=size)


def test_a_table_is_no_npz_archive(csv):
    refused("it is no npz archive of arrays.*a table belongs under stream.csv", npz=csv(table_csv()))


def test_pickled_objects_are_refused(tmp_path):
    refused("Object arrays", npz=npz(tmp_path / "d.npz", **arrays() | {"y_train": np.array([{}] * 8)}))


def test_digits_and_random_rows_keep_their_dtypes():
    digits = build(builtin="digits")
    assert digits.shape == (1, 8, 8) and digits.tasks[0].train.inputs["x"].dtype == torch.uint8
    assert int(digits.tasks[0].train.inputs["x"].max()) == 255
    for form, shape, dtype in (("tokens", [9], torch.int64), ("image", [3, 6, 5], torch.uint8), ("vector", [7], torch.float32)):
        given = {"input": form, "shape": shape, "classes": 3, "samples": 30, "tasks": 2}
        stream = build(random=given)
        assert (stream.kind, stream.shape, len(stream.tasks)) == (form, tuple(shape), 2)
        task = stream.tasks[1]
        assert task.train.inputs["x"].dtype == dtype and task.train.targets.dtype == torch.int64
        assert task.train.targets.bincount().tolist() == [8, 8, 8] and len(task.test) == 6
        assert task.fingerprint == build(random=given).tasks[1].fingerprint != stream.tasks[0].fingerprint
    refused("random.shape", random={"input": "image", "shape": [4]})


def test_a_factory_gives_tasks_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "own_stream.py").write_text(
        "import numpy as np\n\n\ndef tasks():\n"
        "    for k in range(2):\n        x = np.arange(12).reshape(6, 2) + k\n"
        "        yield {'x_train': x, 'y_train': [0, 1] * 3, 'x_test': x[:2], 'y_test': [0, 1], 'name': f'week {k}'}\n\n\n"
        "def fails():\n    raise RuntimeError('no disk')\n\n\ndef wrong():\n    return [1]\n\n\n"
        "def single():\n    return next(tasks())\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    stream = build_stream(RunSpec.parse({"stream": {"factory": "own_stream:tasks"}}))
    assert [task.name for task in stream.tasks] == ["week 0", "week 1"] and stream.kind == "tokens" and sys.path == path
    assert stream.tasks[1].train.inputs["x"].tolist() == (np.arange(12).reshape(6, 2) + 1).tolist()
    refused("factory=own_stream:fails: RuntimeError: no disk", factory="own_stream:fails")
    refused("factory=own_stream:wrong: gave a int", factory="own_stream:wrong")
    refused("gave one dict.*Return it in a list", factory="own_stream:single")
    refused("has no function nothing", factory="own_stream:nothing")
    refused("factory=no_such_module:f: ModuleNotFoundError", factory="no_such_module:f")
    sys.modules.pop("own_stream")


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def test_a_saved_data_set_is_read_with_its_splits_and_class_names(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["ham", "spam"])})

    def part(rows):
        return datasets.Dataset.from_dict({"x": list(range(rows)), "label": [0, 1] * (rows // 2)}, features=features)

    saved = datasets.DatasetDict({"train": part(8).shuffle(seed=1), "test": part(4), "extra": part(2)})
    saved.save_to_disk(tmp_path / "saved")
    stream = build(hf=str(tmp_path / "saved"))
    assert stream.classes == ["ham", "spam"] and (len(stream.tasks[0].train), len(stream.tasks[0].test)) == (8, 4)
    assert "extra" in stream.notes[0]
    (tmp_path / "repo").mkdir()
    for name in ("train", "test"):
        saved[name].to_csv(str(tmp_path / "repo" / f"{name}.csv"))
    stream = build(hf=str(tmp_path / "repo"), label="label")
    assert (len(stream.tasks[0].train), len(stream.tasks[0].test), stream.features) == (8, 4, ["x"])
    refused("no such folder", hf=str(tmp_path / "absent"))
    (tmp_path / "hollow").mkdir()
    refused("cannot be read as a data set", hf=str(tmp_path / "hollow"))


def test_without_a_network_a_hub_name_is_refused_and_says_what_to_do(tmp_path):
    pytest.importorskip("datasets")
    code = (
        "from retain.spec import RunSpec\nfrom retain.data.scenarios import build_stream\nfrom retain.errors import ConfigError\n"
        "try:\n    build_stream(RunSpec.parse({'stream': {'hf': 'nobody/nothing'}}))\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "nobody/nothing cannot be loaded from the hub" in done.stdout and "save_to_disk" in done.stdout, done.stderr


def test_importing_the_builder_loads_no_library_that_is_not_needed():
    code = "import sys, retain.data.scenarios\nprint([n for n in ('sklearn', 'datasets', 'pandas', 'PIL') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


# --- images -----------------------------------------------------------------------------------------------------------


def test_a_quarter_turn_is_exact_and_counter_clockwise():
    square = torch.randint(0, 256, (3, 2, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for quarters in (1, 2, 3):
        want = torch.tensor(np.rot90(square.numpy(), quarters, axes=(2, 3)).copy())
        assert torch.equal(images.rotated(square, 90.0 * quarters), want)
    wide = square[..., :4]
    assert torch.equal(images.rotated(wide, 180), wide.flip(2, 3))


def test_resizing_keeps_the_dtype_and_a_flat_image():
    flat = torch.full((2, 3, 9, 7), 201, dtype=torch.uint8)
    assert torch.equal(images.resized(flat, 4), torch.full((2, 3, 4, 4), 201, dtype=torch.uint8))


def test_faults_of_all_columns_are_told_at_once(tmp_path):
    (tmp_path / "d.csv").write_text("a,b,y\ninf,1,u\n1,inf,v\n")
    with pytest.raises(DataError) as caught:
        build(csv=str(tmp_path / "d.csv"), label="y")
    assert len(caught.value.findings) == 2
