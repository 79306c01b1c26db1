"""The wheel that users install: complete, and usable with nothing of the repository in reach."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds what the wheel holds, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    run(*pip, "--no-deps", "--no-index", "--no-compile", "--target", target, wheel, cwd=target)
    return target


def test_the_wheel_holds_every_file_of_the_package(wheel):
    files = (path for path in (ROOT / "src" / "retain").rglob("*") if path.is_file())
    expected = {str(path.relative_to(ROOT / "src")) for path in files if "__pycache__" not in path.parts}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected == {name for name in names if not name.startswith("retain-")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_imports_without_the_repository(installed, tmp_path):
    code = "import retain, importlib.metadata as m; print(retain.__file__, retain.__version__, m.version('retain'))"
    file, version, recorded = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert Path(file).is_relative_to(installed)
    assert version == recorded


@pytest.mark.parametrize("command", ["module", "script"])
def test_the_command_of_the_wheel_answers(installed, tmp_path, command):
    start = [sys.executable, "-m", "retain"] if command == "module" else [installed / "bin" / "retain"]
    assert "train" in run(*start, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
