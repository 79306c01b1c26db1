"""What the documentation says is there, and runs."""

import re
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel
from torch import nn

from retain.spec import RunSpec, _part_of, keys_of

ROOT = Path(__file__).parent.parent


def keys(part: type[BaseModel]):
    for name, kind in keys_of(part).items():
        yield name
        if found := _part_of(kind):
            yield from keys(found)


def test_every_key_is_documented():
    text = (ROOT / "docs/configuration.md").read_text()
    missing = {key for key in keys(RunSpec) if not re.search(rf"\b{key}\b", text)}
    assert not missing


def test_the_loop_of_the_readme_remembers():
    """Two tasks that tell their labels apart by other inputs: with the loop as it is printed, the first is still known."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict = {}
    exec(blocks[0], scope)
    torch.manual_seed(0)
    y = torch.tensor([0, 1]).repeat(320)
    tasks = [(torch.randn(640, 4) + 4 * (2 * y - 1)[:, None] * torch.eye(4)[number], y) for number in (0, 1)]
    model = nn.Linear(4, 2)
    scope["learn"](model, torch.optim.SGD(model.parameters(), lr=0.1), tasks)
    for x, _ in tasks:
        assert (model(x).argmax(1) == y).double().mean() > 0.9


def test_the_tree_of_the_readme_names_every_file():
    text = (ROOT / "README.md").read_text()
    files = {path.relative_to(ROOT / "src/retain").as_posix() for path in (ROOT / "src/retain").rglob("*.py")}
    assert not {file for file in files if Path(file).name not in text and "__" not in file}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.yaml")))
def test_every_example_is_a_valid_configuration(name, monkeypatch):
    monkeypatch.setenv("RETAIN_DATA", "/data")
    RunSpec.load(ROOT / "examples" / name)
