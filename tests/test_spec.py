"""The configuration: what is accepted, and what a person reads when something is wrong."""

import pytest

from retain.errors import ConfigError
from retain.spec import RunSpec, differences, parse_metric, parse_optimizer


def message(values, settings=()):
    with pytest.raises(ConfigError) as caught:
        RunSpec.parse(values)
    return str(caught.value)


def training(**values):
    return {"training_params": values}


def test_empty_file_gives_the_defaults(tmp_path):
    path = tmp_path / "retain.yaml"
    path.write_text("")
    assert RunSpec.load(path) == RunSpec()
    assert RunSpec().stream.source == "builtin"


def test_every_wrong_key_is_named_at_once_with_a_suggestion():
    text = message({"strem": {}, **training(batch_size=0, memory={"offload_treshold": 0.9}, precision="fp8")})
    lines = text.splitlines()
    assert len(lines) == 4
    assert "training_params.batch_size=0 must be >= 1. It is the number of new rows per optimizer step." in lines
    assert "training_params.memory.offload_treshold: unknown; did you mean offload_threshold?" in lines
    assert "strem: unknown; did you mean stream?" in lines
    assert any(line.startswith("training_params.precision: fp8 is not known; known: fp32") for line in lines)


def test_replay_ratio_below_zero_says_what_the_ratio_is():
    text = message(training(regularization={"replay_ratio": -0.2}))
    where, what = "training_params.regularization.replay_ratio", "It is replayed rows per new row: 0.2 adds 20 to every 100."
    assert text == f"{where}=-0.2 must be >= 0. {what}"


@pytest.mark.parametrize(
    "values",
    [
        {"control": {}},
        {"parallel": {"data": "ddp"}},
        {"model": {"hf": "bert-base-uncased"}},
        {"budget": {"memory": "8GiB"}},
        training(memory={"checkpointing": "auto"}),
        training(methods=[{"si": {"lambda": 40.0}}]),
    ],
)
def test_parts_that_are_not_built_are_refused(values):
    assert "not available yet in this release" in message(values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AdamW(lr=5e-5)", {"name": "AdamW", "lr": 5e-5}),
        ("SGD(lr=0.1, momentum=.9, nesterov=True)", {"name": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam(betas=(0.9, 0.99))", {"name": "Adam", "betas": (0.9, 0.99)}),
        ("Adam", {"name": "Adam"}),
    ],
)
def test_optimizer_strings_are_data(text, expected):
    assert parse_optimizer(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch pwned')",
        "AdamW(lr=print(1))",
        "AdamW(0.1)",
        "AdamW(**{'lr': 1})",
        "AdamW(lr=1); import os",
        "lambda: 1",
        "(" * 500,
        "",
    ],
)
def test_code_in_an_optimizer_string_is_never_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "plain" in message(training(optimizer=text))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("AdmW(lr=1e-3)", "did you mean AdamW?"),
        ("SGD(betas=(0.9, 0.9))", "SGD takes no betas"),
        ("Adam(lr=-1)", "must be > 0"),
        ("Adam(lr=1e999)", "not a finite number"),
        ({"name": "SGD", "lr": "fast"}, "valid number"),
        ("SGD(nesterov=True)", "nesterov needs momentum"),
        ("Adam(learning_rate=1)", "learning_rate: unknown"),
    ],
)
def test_impossible_optimizers(optimizer, said):
    assert said in message(training(optimizer=optimizer))


def test_yaml_floats_without_a_dot_are_read_as_numbers(tmp_path):
    path = tmp_path / "retain.yaml"
    path.write_text("training_params: {optimizer: {name: SGD, lr: 1e-3}}")
    assert RunSpec.load(path).training_params.optimizer.lr == 1e-3


def test_two_owners_of_the_replay_memory_are_an_error():
    text = message(training(methods=[{"replay": {}}], regularization={"replay_ratio": 0.2}))
    assert "replay is configured twice" in text


def test_short_form_and_list_describe_the_same_methods():
    short = RunSpec.parse(training(regularization={"replay_ratio": 0.3, "replay_capacity": 99}))
    long = RunSpec.parse(training(methods=[{"replay": {"ratio": 0.3, "capacity": 99}}]))
    assert short.methods == long.methods
    assert RunSpec.parse(training(methods=["replay"])).methods[0].settings.capacity == 2000


@pytest.mark.parametrize(
    ("value", "said"), [(-1, "=-1 must be >= 0."), (float("inf"), ": inf is not a"), (float("nan"), "=nan must")]
)
def test_a_lambda_that_cannot_be_says_what_lambda_is(value, said):
    for where, values in {
        "training_params.methods.0.ewc.lambda": training(methods=[{"ewc": {"lambda": value}}]),
        "training_params.regularization.ewc_lambda": training(regularization={"ewc_lambda": value}),
    }.items():
        text = message(values)
        assert text.startswith(where + said) and "useful range 10-100" in text and "lambda_" not in text


def test_lambda_is_written_as_in_yaml_everywhere(tmp_path):
    """It is no name in Python, so the field has another one, which nobody should see."""
    spec = RunSpec.parse(training(methods=[{"ewc": {"lambda": 5}}]))
    assert spec.to_values() == training(methods=[{"ewc": {"lambda": 5.0}}])
    assert RunSpec.parse(spec.to_values()) == spec == RunSpec.parse(spec.model_dump(mode="json", exclude_none=True))
    assert spec.model_dump(mode="json")["training_params"]["methods"][0]["ewc"]["lambda"] == 5.0
    changed = spec.with_values({"training_params.methods.0.ewc.lambda": 7})
    assert changed.methods[0].settings.lambda_ == 7
    path = tmp_path / "retain.yaml"
    path.write_text("training_params: {methods: [ewc]}")
    assert RunSpec.load(path).methods[0].settings.lambda_ == 40
    assert RunSpec.load(path, ["training_params.methods=[{ewc: {lambda: 3}}]"]).methods[0].settings.lambda_ == 3
    assert "ewc.lamda: unknown; did you mean lambda?" in message(training(methods=[{"ewc": {"lamda": 5}}]))
    assert "known here: lambda, form" in message(training(methods=[{"ewc": {"gzqx": 5}}]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tasks": "separate", "decay": 0.9}, "need `tasks: online`"),
        ({"form": "implicit", "every": 2}, "needs form: proximal"),
        ({"tasks": "separate", "refresh": 0.5}, "need `tasks: online`"),
        ({"refresh": 0.5, "tasks": "online", "importance_dtype": "bf16"}, "importance_dtype: fp32"),
        ({"decay": 0}, "ewc.decay=0 must be > 0. 1 keeps the importance"),
        ({"decay": 1.5}, "must be <= 1"),
        ({"refresh": 0}, "ewc.refresh=0 must be > 0. It is a share of the task's rows"),
        ({"refresh": 2}, "must be <= 1"),
        ({"samples": 0}, "must be >= 1"),
        ({"form": "proximate"}, "did you mean proximal?"),
        ({"fisher": "diag"}, "known: auto, exact, sampled, empirical"),
        ({"storage": "gpu"}, "known: device, host"),
    ],
)
def test_ewc_settings_that_cannot_be(settings, said):
    assert said in message(training(methods=[{"ewc": settings}]))


def test_ewc_in_short_and_twice():
    short = RunSpec.parse(training(regularization={"ewc_lambda": 9, "replay_ratio": 0.3}))
    long = RunSpec.parse(training(methods=[{"replay": {"ratio": 0.3}}, {"ewc": {"lambda": 9}}]))
    assert short.methods == long.methods
    assert "ewc is configured twice" in message(training(methods=["ewc"], regularization={"ewc_lambda": 1}))


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ({"csv": "a.csv"}, "needs `label: COLUMN`"),
        ({"csv": "a.csv", "npz": "b.npz", "label": "y"}, "give one of"),
        ({"csv": "${NO_SUCH_VARIABLE}/a.csv", "label": "y"}, "the environment has no variable NO_SUCH_VARIABLE"),
        ({"split": {"by": "time", "column": "date"}}, "every: month"),
        ({"split": {"by": "column"}}, "needs `column: NAME`"),
        ({"split": {"by": "klass"}}, "did you mean class?"),
        ({"metric": "auk"}, "did you mean auc?"),
        ({"metric": "recall_at_fpr=2"}, "between 0 and 1"),
        ({"factory": "os.system('x')"}, "package.module:function"),
        ({"test": 1.5}, "must be < 1"),
    ],
)
def test_streams_that_cannot_be(stream, said):
    assert said in message({"stream": stream})


def test_a_head_that_contradicts_the_split_is_refused():
    assert "per-task or auto" in message({"model": {"head": "single"}, "stream": {"split": {"task_id": True}}})


def test_paths_start_at_the_file_and_hold_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_DATA", "/data")
    path = tmp_path / "retain.yaml"
    path.write_text("stream: {csv: [a.csv, '${MY_DATA}/b.csv'], label: y, split: {by: file}}\nmodel: {weights: w.safetensors}")
    spec = RunSpec.load(path)
    assert spec.stream.csv == (str(tmp_path / "a.csv"), "/data/b.csv")
    assert spec.model.weights == str(tmp_path / "w.safetensors")


def test_a_hub_name_is_not_a_path(tmp_path):
    assert RunSpec.parse({"stream": {"hf": "org/data"}}, base=tmp_path).stream.hf == "org/data"
    (tmp_path / "org" / "data").mkdir(parents=True)
    assert RunSpec.parse({"stream": {"hf": "org/data"}}, base=tmp_path).stream.hf == str(tmp_path / "org" / "data")


def test_settings_go_over_the_file(tmp_path):
    path = tmp_path / "retain.yaml"
    path.write_text("training_params: {seed: 1, methods: [{replay: {ratio: 0.1}}]}")
    spec = RunSpec.load(path, ["training_params.seed=2", "training_params.methods.0.replay.ratio=0.5", "model.mlp.hidden=[8]"])
    assert (spec.training_params.seed, spec.methods[0].settings.ratio, spec.model.mlp.hidden) == (2, 0.5, (8,))
    for setting, said in [("seed", "key=value"), ("a.b=[", "not valid YAML"), ("training_params.seed.x=1", "holds no keys")]:
        with pytest.raises(ConfigError, match=said):
            RunSpec.load(path, [setting])


@pytest.mark.parametrize(
    ("text", "said"), [("- a\n", "mapping"), ("a: [", "not valid YAML"), ("!!python/object:os.x {}", "not valid YAML")]
)
def test_files_that_are_no_configuration(text, said, tmp_path):
    path = tmp_path / "retain.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        RunSpec.load(path)
    with pytest.raises(ConfigError, match="no such file"):
        RunSpec.load(tmp_path / "missing.yaml")


def test_a_spec_is_frozen_and_a_change_is_a_new_one():
    spec = RunSpec.parse(training(seed=1))
    with pytest.raises(Exception, match="frozen"):
        spec.training_params.seed = 2
    changed = spec.with_values({"training_params.regularization.replay_ratio": 0.5})
    assert spec.methods == () and changed.methods[0].settings.ratio == 0.5
    assert differences(spec.to_values(), changed.to_values()) == {"training_params.regularization": (None, {"replay_ratio": 0.5})}


def test_values_round_trip():
    spec = RunSpec.parse(training(optimizer="SGD(lr=0.1)", methods=[{"replay": {"ratio": 0.1}}], memory={"micro_batch": 8}))
    assert RunSpec.parse(spec.to_values()) == spec
    assert parse_metric("recall_at_fpr=0.01") == ("recall_at_fpr", 0.01)


def test_an_empty_section_is_an_absent_one(tmp_path):
    path = tmp_path / "retain.yaml"
    path.write_text("training_params:\n  regularization:\nmodel:\n")
    assert RunSpec.load(path) == RunSpec()


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    path = tmp_path / "retain.yaml"
    path.write_text("training_params:\n  epochs: 1\n  epochs: 2\n")
    with pytest.raises(ConfigError, match=r"(?s)'epochs' stands twice.*retain\.yaml.*line 3"):
        RunSpec.load(path)


def test_patterns_name_files_in_order(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.csv").write_text("x")
    spec = RunSpec.parse({"stream": {"csv": "[ab].csv", "label": "y"}}, base=tmp_path)
    assert spec.stream.csv == (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"))
    with pytest.raises(ConfigError, match=r"no file matches .*z\*\.csv"):
        RunSpec.parse({"stream": {"csv": "z*.csv", "label": "y"}}, base=tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (training(precision="fp16"), "did you mean amp_fp16?"),
        (training(memory={"micro_batch": 0}), "training_params.memory.micro_batch=0 must be >= 1."),
        (training(batch_size="32"), "(seen: '32')"),
        (training(batch_size=10**30), "must be <="),
        ({"stream": {"csv": "~nosuchuser/x.csv", "label": "y"}}, "not known here"),
    ],
)
def test_messages_name_the_key_and_what_was_seen(values, said):
    assert said in message(values)
