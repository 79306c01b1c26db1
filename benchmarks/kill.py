"""Kill `retain train` with SIGKILL at random moments, give the same command again each time, and compare the final weights.

Run: python benchmarks/kill.py [--kills 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

CONFIG = {
    "stream": {"builtin": "digits", "split": {"by": "class", "groups": 5}},
    "model": {"mlp": {"hidden": [256, 256]}},
    "training_params": {
        "epochs": 60,
        "optimizer": "Adam(lr=1e-3)",
        "schedule": "cosine",
        "regularization": {"replay_ratio": 1.0, "replay_capacity": 200},
    },
    "checkpoint": {"every_steps": 20},
}


def phase(run: Path) -> str:
    """What the run was doing when it died, as far as its directory shows."""
    if any(run.glob("*/.*.tmp")) or any(run.glob(".*.tmp")):
        return "while saving"
    learned = len(list((run / "tasks").glob("[0-9]*"))) if run.exists() else 0
    return f"with {learned} tasks and {len(list((run / 'partial').glob('[0-9]*')))} checkpoints within a task"


def main() -> None:
    """Print where each kill hit and whether the weights agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "retain.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        command = [sys.executable, "-m", "retain", "train", str(config), "--json", "--run"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*command, f"{folder}/undisturbed"], check=True, **quiet)
        run = Path(folder) / "killed"
        kills = 0
        while kills < options.kills:
            process = subprocess.Popen([*command, str(run)], **quiet)
            start = time.monotonic()
            seen = len(list(run.glob("*/*/manifest.json"))) if run.exists() else 0
            while process.poll() is None and time.monotonic() - start < 20:  # wait until it has written something new
                if len(list(run.glob("*/*/manifest.json"))) != seen:
                    break
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.25))
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            kills += 1
            print(f"kill {kills:2}: {phase(run)}", flush=True)
        subprocess.run([*command, str(run)], check=True, **quiet)
        manifests = [json.loads((p / "tasks/0004/manifest.json").read_text()) for p in (Path(folder) / "undisturbed", run)]
        hashes = [m["model.safetensors"]["sha256"] for m in manifests]
        print(f"{kills} kills; final weights {'bit-identical' if hashes[0] == hashes[1] else 'DIFFER'}: {hashes[0][:16]}")
        sys.exit(hashes[0] != hashes[1])


if __name__ == "__main__":
    main()
