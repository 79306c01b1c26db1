import copy
import logging
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from retain.data.task import Stream
from retain.errors import ConfigError
from retain.models.build import ImageInput, build_model
from retain.models.heads import GrowingHead, grow_, resolve_head
from retain.spec import RunSpec

FACTORY = """
import torch
from torch import nn


def features(input_shape):
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))


def logits(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def tokens():
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten())


def plain():
    return nn.Flatten()


def wrong_classes(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes + 1))


def not_flat():
    return nn.Identity()


def not_a_module():
    return 3


def fails():
    raise RuntimeError("no such luck")


number = 7


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x.flatten(1)))
"""


def stream(kind="image", shape=(1, 8, 8), classes=4, scenario="domain-incremental"):
    return Stream((), [str(number) for number in range(classes)], kind, shape, scenario)


def spec(model=None, seed=0, **stream_keys):
    return RunSpec.parse({"model": model or {}, "stream": stream_keys, "training_params": {"seed": seed}})


def images(*shape, rows=3):
    return torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """`factory("name")` is a spec with a factory that lies in the working directory."""
    (tmp_path / "user_model.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_model", raising=False)
    yield lambda name, **keys: spec({"factory": f"user_model:{name}", **keys})
    sys.modules.pop("user_model", None)


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (3, 11, 17), (1, 28, 28), (3, 64, 64)])
def test_cnn_takes_images_of_any_size(shape):
    model = build_model(spec(), stream(shape=shape), [])
    assert model(images(*shape)).shape == (3, 4)
    assert [part.out_channels for part in model.modules() if isinstance(part, torch.nn.Conv2d)] == [32, 64, 128]


def test_mlp_flattens_images_and_takes_vectors():
    assert build_model(spec({"mlp": {}}), stream(), [])(images(1, 8, 8)).shape == (3, 4)
    model = build_model(spec(), stream("vector", (7,)), [])
    assert model(torch.randn(3, 7)).shape == (3, 4)
    assert [param.shape[0] for param in model.parameters() if param.ndim == 2] == [256, 256, 4]
    assert build_model(spec({"mlp": {"hidden": []}}), stream("vector", (7,)), [])(torch.randn(3, 7)).shape == (3, 4)


@pytest.mark.parametrize(
    ("model", "kind", "shape", "said"),
    [
        ({"cnn": {}}, "vector", (7,), "cnn takes images"),
        ({"cnn": {}}, "image", (8, 8), "cnn takes images"),
        ({}, "tokens", (16,), "mlp and cnn take vectors or images"),
        ({"mlp": {}}, "tokens", (16,), "mlp and cnn take vectors or images"),
    ],
)
def test_a_body_that_does_not_go_with_the_input_is_refused(model, kind, shape, said):
    with pytest.raises(ConfigError, match=said):
        build_model(spec(model), stream(kind, shape), [])


# --- input layer ------------------------------------------------------------------------------------------------------


def test_uint8_images_are_scaled_and_normalised_per_channel():
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    model = build_model(spec(image_mean=mean, image_std=std), stream(shape=(3, 8, 8)), [])
    x = images(3, 8, 8)
    expected = torch.stack([(x[:, c] / 255 - mean[c]) / std[c] for c in range(3)], dim=1)
    torch.testing.assert_close(model.inputs(x), expected)
    torch.testing.assert_close(model.inputs(x.float()), (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_images_take_the_dtype_of_the_body(dtype):
    model = build_model(spec(image_mean=0.5, image_std=0.5), stream(), []).to(dtype)
    assert model.inputs(images(1, 8, 8)).dtype == dtype
    assert model(images(1, 8, 8)).dtype == dtype


def test_low_precision_images_are_rounded_once():
    x = images(1, 8, 8)
    expected = ((x.float() / 255 - 0.5) / 0.25).bfloat16()
    assert torch.equal(ImageInput(0.5, 0.25).bfloat16()(x), expected)


def test_the_input_layer_is_exported_but_not_saved():
    model = build_model(spec(image_mean=0.5), stream(), []).eval()
    assert not [name for name in model.state_dict() if name.startswith("inputs")]
    exported = torch.export.export(model, (images(1, 8, 8),)).module()
    torch.testing.assert_close(exported(images(1, 8, 8)), model(images(1, 8, 8)))


def test_channels_and_statistics_must_agree():
    with pytest.raises(ConfigError, match="image_mean has 2 values; the images have 3 channels"):
        build_model(spec(image_mean=[0.1, 0.2]), stream(shape=(3, 8, 8)), [])


# --- initial weights --------------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_the_seed_only():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_model(spec(), stream(), []).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = build_model(spec(), stream(), []).state_dict()
    other = build_model(spec(seed=1), stream(), []).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["body.0.weight"], other["body.0.weight"])
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_the_body_does_not_depend_on_the_head():
    single = build_model(spec(), stream(), []).body.state_dict()
    growing = build_model(spec({"head": "growing"}), stream(), [9]).body.state_dict()
    assert all(torch.equal(single[name], growing[name]) for name in single)


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "head", "kind"),
    [
        ("class-incremental", "auto", "growing"),
        ("task-incremental", "auto", "per-task"),
        ("domain-incremental", "auto", "single"),
        ("class-incremental", "single", "single"),
        ("class-incremental", "per-task", "per-task"),
    ],
)
def test_the_head_follows_the_scenario_unless_it_is_given(scenario, head, kind):
    assert resolve_head(spec({"head": head}), stream(scenario=scenario)) == kind


@pytest.mark.parametrize(("scenario", "outputs"), [("class-incremental", (2, 4)), ("task-incremental", (2, 3, 1))])
def test_sizes_rebuild_a_model_that_saved_weights_fit_into(scenario, outputs):
    model = build_model(spec(), stream(scenario=scenario), [])
    for number, count in enumerate(outputs):
        grow_(model.head, count, key=number)
    again = build_model(spec(), stream(scenario=scenario), model.head.sizes)
    again.load_state_dict(model.state_dict())
    x = images(1, 8, 8)
    assert torch.equal(model.eval()(x, 0), again.eval()(x, 0))


def test_a_single_head_refuses_classes_that_came_later():
    """Unless the head was left to the run, which then has one that grows."""
    with pytest.raises(ConfigError, match="head: growing"):
        build_model(RunSpec.parse({"model": {"head": "single"}}), stream(classes=5), [4])
    assert isinstance(build_model(spec(), stream(classes=5), [4]).head, GrowingHead)
    assert build_model(spec(), stream(classes=3), [4]).head.sizes == [4]


# --- factories --------------------------------------------------------------------------------------------------------


def test_a_factory_that_returns_features_gets_a_head(factory):
    path = list(sys.path)
    model = build_model(factory("features"), stream(scenario="class-incremental"), [3])
    assert model(images(1, 8, 8)).shape == (3, 3)
    assert model.head.weight.shape == (3, 5)
    assert sys.path == path


def test_finding_the_width_leaves_buffers_modes_and_random_state_alone(factory):
    before = torch.get_rng_state()
    model = build_model(factory("features"), stream(), [])
    assert torch.equal(torch.get_rng_state(), before)
    norm = model.body[2]
    assert torch.equal(norm.running_mean, torch.zeros(5)) and int(norm.num_batches_tracked) == 0
    assert all(part.training for part in model.modules())


def test_a_factory_that_takes_classes_makes_the_logits(factory):
    made = factory("logits")
    assert resolve_head(made, stream(scenario="class-incremental")) == "single"
    model = build_model(made, stream(scenario="class-incremental"), [])
    assert model.head.sizes == [4] and not list(model.head.parameters())
    x = images(1, 8, 8)
    assert torch.equal(model(x), model.body(model.inputs(x)))
    again = build_model(made, stream(scenario="class-incremental"), [4])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_logits_of_a_factory_cannot_grow(factory, head):
    with pytest.raises(ConfigError, match="Drop the `classes` argument"):
        build_model(factory("logits", head=head), stream(), [])


def test_tokens_need_a_factory(factory):
    model = build_model(factory("tokens"), stream("tokens", (6,)), [])
    assert model(torch.zeros(2, 6, dtype=torch.int64)).shape == (2, 4)


def test_the_import_is_said_once(factory, caplog):
    with caplog.at_level(logging.INFO, logger="retain"):
        build_model(factory("plain"), stream(), [])
    assert [record.getMessage() for record in caplog.records] == [
        "model.factory=user_model:plain: importing code from user_model, as the configuration says"
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong_classes", r"logits \[2, 4\]; they gave \(2, 5\)"),
        ("not_flat", r"features \[2, d\]; they gave \(2, 1, 8, 8\)"),
        ("not_a_module", "must return a torch.nn.Module; it returned int"),
        ("fails", r"RuntimeError: no such luck \(.*user_model\.py:\d+\)"),
        ("number", "has no function number"),
        ("absent", "has no function absent"),
        ("tokens", "model.factory=user_model:tokens: RuntimeError"),
    ],
)
def test_a_factory_that_fails_is_named(factory, name, said):
    with pytest.raises(ConfigError, match=said) as error:
        build_model(factory(name), stream(), [])
    assert f"user_model:{name}" in str(error.value)


def test_a_module_that_does_not_exist_is_named():
    path = list(sys.path)
    with pytest.raises(ConfigError, match=r"nowhere_at_all:make: ModuleNotFoundError: No module named 'nowhere_at_all'$"):
        build_model(spec({"factory": "nowhere_at_all:make"}), stream(), [])
    assert sys.path == path


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(path, **keys):
    return spec({"mlp": {"hidden": [3]}, "weights": str(path), **keys})


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "start.safetensors"
    model = build_model(spec({"mlp": {"hidden": [3]}}, seed=7), stream(), [])
    save_file(model.state_dict(), path)
    return path, model.state_dict()


def test_weights_are_loaded_into_body_and_head(checkpoint):
    path, saved = checkpoint
    loaded = build_model(weights(path), stream(), []).state_dict()
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_weights_may_be_those_of_the_body_alone(checkpoint, caplog):
    path, saved = checkpoint
    save_file({name.removeprefix("body."): t for name, t in saved.items() if name.startswith("body.")}, path)
    with caplog.at_level(logging.INFO, logger="retain"):
        model = build_model(weights(path), stream(), [])
    assert torch.equal(model.body[1].weight, saved["body.1.weight"])
    assert "keeps its initial weights (head.bias, head.weight)" in caplog.text


def test_a_head_of_another_size_keeps_its_initial_weights(checkpoint, caplog):
    path, saved = checkpoint
    fresh = build_model(spec({"mlp": {"hidden": [3]}}), stream(classes=6), [])
    with caplog.at_level(logging.INFO, logger="retain"):
        model = build_model(weights(path), stream(classes=6), [])
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert torch.equal(model.body[1].weight, saved["body.1.weight"])
    assert "the head keeps its initial weights" in caplog.text


def test_every_name_that_does_not_fit_is_listed(checkpoint):
    path, saved = checkpoint
    faulty = copy.copy(saved)
    faulty["body.1.weight"] = torch.zeros(3, 5)
    del faulty["body.1.bias"]
    faulty |= {f"body.extra.{number}": torch.zeros(1) for number in range(7)}
    save_file(faulty, path)
    with pytest.raises(ConfigError) as error:
        build_model(weights(path), stream(), [])
    text = str(error.value)
    assert "missing: body.1.bias" in text
    assert "unexpected: body.extra.0, body.extra.1, body.extra.2, body.extra.3, body.extra.4 and 2 more" in text
    assert "of another shape: body.1.weight (3, 5) not (3, 64)" in text


def test_a_tied_tensor_is_needed_under_one_name(factory, tmp_path):
    path = tmp_path / "tied.safetensors"
    saved = {name: t.clone() for name, t in build_model(factory("Tied"), stream(), []).state_dict().items()}
    saved = {name: t + 1 for name, t in saved.items() if name != "body.two.weight"}
    save_file(saved, path)
    model = build_model(factory("Tied", weights=str(path)), stream(), [])
    assert torch.equal(model.body.two.weight, load_file(path)["body.one.weight"])


@pytest.mark.parametrize(("name", "said"), [("old.pt", "Convert it"), ("absent.safetensors", "no such file")])
def test_only_existing_safetensors_are_read(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        build_model(weights(tmp_path / name), stream(), [])


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match=r"broken\.safetensors: cannot be read"):
        build_model(weights(path), stream(), [])
