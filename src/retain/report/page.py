"""One self-contained HTML page that tells the story of a run: whether its model may be shipped, and why.

Made from the lineage alone, so the same run gives the same bytes. Nothing is fetched: plotly.js is in the page, and its
content security policy runs the page's two scripts, known by their hashes, and forbids the network.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from retain.errors import RunError
from retain.forgetting import metrics
from retain.report.plots import charts
from retain.report.tables import clean, cut, duration, number, peak_text, size
from retain.spec import RunSpec
from retain.training.lineage import RunDirectory, load_checkpoint
from retain.training.summary import summarize

DRAW = (
    'for (const chart of JSON.parse(document.getElementById("charts").textContent)) '
    "Plotly.newPlot(chart.id, chart.data, chart.layout, {responsive: true, displayModeBar: false});"
)
TOLD = ("promote", "rollback", "purge", "configuration")
"""Events that the page lists: what people did to the run."""
STATES = {"learned": "✓", "rejected": "✕", "promoted": "↑", "rolled back": "↩"}
"""A mark beside each status of a record, so that colour is not alone."""
MARKS = {"kept": "✓", "broken": "✕", "none": "–"}
NAME_CELLS = 32
EVENT_CELLS = 400


def page(path: Path) -> str:
    """The page of a run.

    Args:
        path: the run's directory. It is read without the lock, so a run may be training in it.

    Raises:
        RunError: there is no such run, it has learned no task yet, or a task's record is damaged.
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such run directory.")
    run = RunDirectory(path)
    run.read_records(repair=False)
    if not run.learned:
        raise RunError(f"{path} has learned no task yet.")
    settings = str(load_checkpoint(run.task_path(run.learned[-1]["number"]), ["spec.yaml"])["spec.yaml"])
    summary = _summary(run, settings)
    events = list(_events(path / "events.jsonl"))
    attempts = _attempts(run.records, summary)
    drawn = charts(summary)
    scripts = [get_plotlyjs(), DRAW]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "size": size, "duration": duration, "clean": clean, "name": _name, "moment": _moment}
    return environment.get_template("page.html.jinja").render(
        run=path.resolve().name,
        summary=summary,
        verdict=_verdict(summary, attempts, events),
        budgets=_budgets(summary),
        refused=_refused(run),
        newest=run.learned[-1],
        records=run.learned[::-1],
        methods=list(dict.fromkeys(name for record in run.learned for name in record["state_bytes"])),
        top=max(record["memory"]["peak_bytes"] for record in run.learned),
        peak=peak_text(summary["memory"]["measured_peak_bytes"], summary["memory"]["measured_by"]),
        attempts=attempts[::-1],
        events=_told(events)[::-1],
        settings=settings,
        states=STATES,
        marks=MARKS,
        charts=[{key: chart[key] for key in ("id", "data", "layout")} for chart in drawn],
        styles={chart["id"]: chart["style"] for chart in drawn},
        scripts=[Markup(script) for script in scripts],
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def _summary(run: RunDirectory, settings: str) -> dict[str, Any]:
    """`summary.json` where it is of the tasks that count now, else the same made from the lineage.

    It is written when training ends: a run that trains, was rolled back or had a task promoted is ahead of it.
    """
    made = summarize(RunSpec.parse(yaml.safe_load(settings)), run.learned)
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        kept = json.loads((run.path / "summary.json").read_bytes())
        if kept.keys() >= made.keys() and all(kept[key] == made[key] for key in ("schema", "tasks", "matrices", "formulas")):
            return dict(kept)
    return made


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Events as they happened, without lines that are cut off or say something else."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if isinstance(event, dict) and isinstance(event.get("event"), str):
                        yield event


def _attempts(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every record of the lineage in its order, with what was forgotten if it counted, and the task that fell most with it.

    Lines of refused and rolled-back tasks may be of older releases: what they lack is None.
    """
    primary, better = summary["primary"], summary["matrices"][summary["primary"]]["higher_is_better"]
    before: list[Mapping[str, Any]] = []
    found = []
    for record in records:
        chain = [*before[: record["number"]], record]
        values = [_row(each, primary, len(chain)) for each in chain]
        rows = record.get("rows")
        found.append(
            {
                "number": record["number"],
                "task": str(record.get("task")),
                "status": record["status"],
                "finished": record.get("finished"),
                "rows": rows.get("train") if isinstance(rows, Mapping) else None,
                "metric": values[-1][-1],
                "forgetting": metrics.forgetting(values, better),
                "fell": _fell(chain, values, better),
            }
        )
        if record["status"] in ("learned", "rolled back"):
            before = chain
    return found


def _row(record: Mapping[str, Any], metric: str, count: int) -> list[float | None]:
    """The metric on each task as a record has it, None where it has none."""
    row = record.get("row")
    values = row.get(metric) if isinstance(row, Mapping) else None
    known = [value if isinstance(value, (int, float)) else None for value in (values if isinstance(values, list) else [])]
    return [*known, *[None] * count][:count]


def _fell(
    chain: Sequence[Mapping[str, Any]], values: Sequence[Sequence[float | None]], better: bool
) -> tuple[str, float, float] | None:
    """The earlier task that fell most from its best: its name, its best and what it is now; None where none fell."""
    sign, falls = (1 if better else -1), []
    for task, now in enumerate(values[-1][:-1]):
        earlier = [sign * value for row in values[task:-1] if (value := row[task]) is not None]
        if now is not None and earlier and max(earlier) > sign * now:
            falls.append((max(earlier) - sign * now, (str(chain[task].get("task")), sign * max(earlier), now)))
    return max(falls, default=(0, None), key=lambda fall: fall[0])[1]


# --- words ------------------------------------------------------------------------------------------------------------


def _verdict(
    summary: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What to do with the model, and the reasons: `state`, `title`, `reasons`."""
    budgets, last = _budgets(summary), attempts[-1]
    statuses = {budget["status"] for budget in budgets}
    if last["status"] == "rejected":
        refused, used = _name(last["task"]), _name(summary["tasks"][-1])
        title = f"{refused} was refused; the model of {used} stays in use"
        return {"state": "broken", "title": title, "reasons": _refusal(summary, last, events)}
    reasons = [_sentence(budget) for budget in budgets if budget["limit"] is not None]
    if "broken" in statuses:
        current = next(each for each in reversed(attempts) if each["status"] == "learned")
        reasons += _fall(summary, current) if summary["budgets"]["forgetting"]["status"] == "broken" else []
        return {"state": "broken", "title": "A budget is broken: do not ship the model as it is", "reasons": reasons}
    if "kept" in statuses:
        return {"state": "kept", "title": "The model keeps its budgets: it may be shipped", "reasons": reasons}
    advice = "No budget is set. budget.forgetting and budget.score in the configuration say what a model must keep to be shipped."
    return {"state": "none", "title": "Nothing says yet whether the model may be shipped", "reasons": reasons or [advice]}


def _refusal(summary: Mapping[str, Any], attempt: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the gate refused a task, as it said then."""
    refusals = (each for each in reversed(events) if each["event"] == "rejected" and each.get("task") == attempt["task"])
    said: Mapping[str, Any] = next(refusals, {})
    try:
        budgets = _budgets({**summary, "budgets": said["budgets"]})
    except (KeyError, TypeError, ValueError, AttributeError):  # of another release, or cut off
        budgets = []
    known = (
        f"With it, forgetting would be {number(attempt['forgetting'])}; {summary['primary']} on it is {number(attempt['metric'])}."
    )
    forgot = not budgets or any(budget["name"] == "forgetting" for budget in budgets)
    return [*map(_sentence, budgets), *([] if budgets else [known]), *(_fall(summary, attempt) if forgot else [])]


def _fall(summary: Mapping[str, Any], attempt: Mapping[str, Any]) -> list[str]:
    if attempt["fell"] is None:
        return []
    task, best, now = attempt["fell"]
    return [f"{_name(task)} fell most: {summary['primary']} {number(best)} → {number(now)}."]


def _budgets(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each budget in words; memory in bytes, others as numbers."""
    found = []
    for name, budget in summary["budgets"].items():
        limit, measured = budget["limit"], budget["measured"]
        floor = name == "score" and summary["matrices"][summary["primary"]]["higher_is_better"]
        found.append(
            {
                "name": name.replace("_", " "),
                "of": f"{summary['primary']} on the newest task" if name == "score" else name.replace("_", " "),
                "status": budget["status"],
                "measured": None if measured is None else size(measured) if name == "memory" else number(measured),
                "limit": None if limit is None else size(limit) if name == "memory" else f"{limit:g}",
                "bound": "at least" if floor else "at most",
            }
        )
    return sorted(found, key=lambda budget: budget["limit"] is None)  # those that were set come first


def _sentence(budget: Mapping[str, Any]) -> str:
    """What became of a budget that was set."""
    name = budget["of"][0].upper() + budget["of"][1:]
    if budget["measured"] is None:
        return f"{name} is not measured yet; its budget is {budget['limit']} {budget['bound']}."
    verb = {"kept": "keeps", "broken": "breaks"}.get(budget["status"], "has")
    return f"{name} is {budget['measured']} and {verb} its budget of {budget['bound']} {budget['limit']}."


def _refused(run: RunDirectory) -> list[str]:
    """Names of refused tasks that were not learned since."""
    learned = {record["task"] for record in run.learned}
    return list(
        dict.fromkeys(str(r.get("task")) for r in run.records if r["status"] == "rejected" and r.get("task") not in learned)
    )


def _told(events: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What people did to the run, each with the task that was the last one learned then."""
    found, after = [], "–"
    for event in events:
        if event["event"] == "learned":
            after = str(event.get("task"))
        if event["event"] in TOLD:
            parts = {key: value for key, value in event.items() if key != "event"}
            if isinstance(changes := parts.get("changes"), dict):
                parts = {key: " → ".join(map(str, pair)) if isinstance(pair, list) else pair for key, pair in changes.items()}
            said = "; ".join(f"{key}: {', '.join(map(str, v)) if isinstance(v, list) else v}" for key, v in parts.items())
            found.append({"kind": event["event"], "after": after, "said": cut(clean(said), EVENT_CELLS)})
    return found


def _name(text: str, cells: int = NAME_CELLS) -> str:
    """A task's name, shortened."""
    return cut(clean(text), cells)


def _moment(text: object) -> str:
    """A time to the minute, as the lineage has it: in UTC."""
    try:
        return datetime.datetime.fromisoformat(str(text)).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return "–"
