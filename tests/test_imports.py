"""What importing costs, and that every module can be imported alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in (SRC / "retain").rglob("*.py")
    if path.name != "__main__.py"
)

EACH_ALONE = """
import importlib, json, sys, traceback
failed = {}
for name in json.loads(sys.argv[1]):
    for loaded in [known for known in sys.modules if known.partition(".")[0] == "retain"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""

LOADED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def in_fresh_interpreter(code: str, argument: str):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_imports_alone():
    """Each module is imported first, before any other of retain: a cycle that only one order hides would show."""
    assert in_fresh_interpreter(EACH_ALONE, json.dumps(MODULES)) == {}


@pytest.mark.parametrize("module", ["retain", "retain.spec", "retain.errors", "retain.cli"])
def test_what_answers_at_once_loads_nothing_heavy(module):
    """`retain --help` and a wrong configuration are answered before torch is loaded."""
    heavy = {"torch", "numpy", "sklearn", "pyarrow", "datasets", "transformers"}
    assert heavy.intersection(in_fresh_interpreter(LOADED, module)) == set()


PUBLIC = """
import importlib, json, sys, types
import retain
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
values = {name: getattr(retain, name, None) for name in retain.__all__}
print(json.dumps([name for name, value in values.items() if value is None or isinstance(value, types.ModuleType)]))
"""


@pytest.mark.parametrize("before", [[], MODULES], ids=["at first", "after everything else"])
def test_every_public_name_can_be_had(before):
    """Each name in `__all__` is found, and no folder of the same name (train, plan) takes its place."""
    assert in_fresh_interpreter(PUBLIC, json.dumps(before)) == []
