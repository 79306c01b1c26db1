"""docs/monthly.md: every block of it, run in its order, does what the text says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs/monthly.md").read_text()
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", TEXT, re.DOTALL)


def test_every_block_does_what_the_text_says(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = {}
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
            continue
        run = {"cwd": tmp_path, "env": os.environ | {"PATH": path}, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-e"], input=text, check=False, **run)
        assert done.returncode == 0, (text, done.stderr)
        said[text.splitlines()[0]] = done.stdout + done.stderr

    refusal = said["python broken.py"]
    assert re.search(r"Task 2018-08 is refused by the gate: score 0.0\d+ breaks the budget of 0.3", refusal)
    assert "exit code 3" in refusal and "exit code" not in said["mv later/2018-09.csv months/"]
    lineage = [json.loads(line) for line in (tmp_path / "runs/payments/lineage.jsonl").read_text().splitlines()]
    assert ("2018-08", "rejected") in {(record["task"], record["status"]) for record in lineage}
    summary = json.loads((tmp_path / "runs/payments/summary.json").read_text())
    assert sorted(summary["tasks"]) == [f"2018-0{month}" for month in range(4, 10)]
    assert {summary["budgets"][name]["status"] for name in ("forgetting", "score")} == {"kept"}

    scores = (tmp_path / "scores.csv").read_text().splitlines()
    assert scores[0].split(",")[0] == '"customer"' and len(scores) > 9000
    assert "tensor" in said["python score.py"]
    assert "</html>" in (tmp_path / "runs/payments/report.html").read_text()
    assert "unlearned" in said["retain purge runs/payments --where customer=48"]
