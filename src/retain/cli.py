"""The command line. A user's mistake ends in a sentence and an exit code, never in a traceback."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from retain.errors import BUDGET_BROKEN, FAILED, ConfigError, RetainError
from retain.spec import RunSpec

app = typer.Typer(
    name="retain",
    help="Train a model on a stream of tasks inside a memory budget and without forgetting.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="Run directory. Default: runs/<name of CONFIG>.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the file's, as training_params.seed=1.")]


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import retain

        typer.echo(f"retain {retain.__version__}")
        raise typer.Exit


@app.command()
def init(
    data: Annotated[list[str], typer.Option("--data", help="A .csv, .parquet, .jsonl or .arrow file; repeatable.")],
    label: Annotated[str, typer.Option(help="The column of labels.")],
    time: Annotated[str | None, typer.Option(help="The column that splits by time; default: the only one of dates.")] = None,
    who: Annotated[str | None, typer.Option("--id", help="The column that says whom a row is about; no feature.")] = None,
    output: Annotated[Path, typer.Option(help="The YAML file to write.")] = Path("retain.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Look at tables and write a commented configuration that `retain train` takes as it stands.

    Example: retain init --data orders.csv --label churned --time ordered --id customer
    """
    with _errors(as_json):
        from retain.api import init as write

        seen = write(data, label, time=time, id=who, output=output, force=force)
        if as_json:
            typer.echo(json.dumps({"schema": 1, "output": str(output), **seen}, ensure_ascii=False))
            return
        counts = f"{seen['rows']:,} rows, {len(seen['classes'])} classes, {len(seen['columns'])} other columns"
        typer.echo(f"{output}: {counts}, tasks: {len(seen['tasks'])}, metric: {seen['config']['stream']['metric']}.")
        typer.echo(f"Next: retain train {shlex.quote(str(output))} --dry-run")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML configuration.")],
    settings: Settings = None,
    run: RunOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would be done.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Refuse a task that breaks a budget; exit 3 where one is broken.")] = False,
    as_json: Json = False,
) -> None:
    """Learn the tasks of the stream that the run does not have yet.

    The same command goes on where it stopped, whatever stopped it.

    Example: retain train examples/digits.yaml --run runs/seed1 --set training_params.seed=1
    """
    with _errors(as_json):
        spec = RunSpec.load(config, settings or ())
        path = run or Path("runs") / config.stem
        if dry_run:
            _dry_run(spec, path, as_json)
            return
        from rich.console import Console

        from retain.report.progress import TerminalProgress
        from retain.report.tables import summary_view
        from retain.training.loop import train as learn

        console = Console(stderr=True)
        progress = TerminalProgress(console)
        try:
            with _shown_log(), redirect_stdout(sys.stderr):  # what a user's own factory prints is not part of the result
                summary = learn(spec, path, listener=progress, gate=gate)
        finally:
            progress.close()
        if as_json:
            typer.echo(json.dumps(summary, ensure_ascii=False))
        else:
            table = _console()
            table.print(summary_view(summary))
            table.print(str(path / "summary.json"), style="dim", highlight=False, markup=False, soft_wrap=True)
        broken = any(budget["status"] == "broken" for budget in summary["budgets"].values())
        if gate and (broken or summary["rejected"]):
            raise typer.Exit(BUDGET_BROKEN)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    table: Annotated[Path, typer.Option("--input", help="A .csv, .parquet, .jsonl or .arrow file with the run's columns.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write, of one of these kinds; default: csv on standard output.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="The model after this task, by name or number; default: the promoted one.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A column to carry along, such as an identifier; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Classes and probabilities for the rows of a table.

    Example: retain predict runs/orders --input march.csv --keep order_id --output scored.csv
    """
    with _errors(as_json):
        from retain.api import FORMS
        from retain.api import predict as score
        from retain.data.tables import table_bytes
        from retain.training.lineage import write_file

        form = "csv" if output is None else FORMS.get(output.suffix)
        if form is None:
            raise ConfigError(f"--output {output}: expected a name that ends in .csv, .parquet, .jsonl or .arrow.")
        found = score(run, table, task=task, keep=keep or ())
        if output is not None:
            write_file(output, table_bytes(found, form))
        if as_json:
            columns = {"rows": found.num_rows, "columns": found.column_names, "output": None if output is None else str(output)}
            values = {} if output is not None else {"values": found.to_pydict()}
            typer.echo(json.dumps({"schema": 1, **columns, **values}, ensure_ascii=False, default=str))
        elif output is None:
            typer.echo(table_bytes(found, "csv").decode(), nl=False)
        else:
            typer.echo(f"{output}: {found.num_rows:,} rows, {', '.join(found.column_names)}")


@app.command()
def promote(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    task: Annotated[str, typer.Argument(help="Name of a task that the gate refused.")],
    as_json: Json = False,
) -> None:
    """Count a task that the gate refused as learned; its model is the promoted one.

    Example: retain promote runs/orders 2026-03
    """
    with _errors(as_json):
        from retain.api import promote as accept

        accept(run, task)
        typer.echo(
            json.dumps({"schema": 1, "promoted": task}, ensure_ascii=False) if as_json else f"{run}: {task} is the promoted task."
        )


@app.command()
def rollback(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    task: Annotated[str, typer.Argument(help="Name or number (from 0) of the last task to keep.")],
    as_json: Json = False,
) -> None:
    """Count every task after TASK as not learned; its model is the promoted one again.

    Example: retain rollback runs/digits 2
    """
    with _errors(as_json):
        from retain.api import rollback as roll_back

        dropped = roll_back(run, task)
        if as_json:
            typer.echo(json.dumps({"schema": 1, "dropped": dropped}, ensure_ascii=False))
        elif dropped:
            typer.echo(f"{run}: back at task {task}; no longer counted as learned: {', '.join(dropped)}.")
        else:
            typer.echo(f"{run}: no task was learned after {task}; nothing was changed.")


@app.command()
def purge(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    where: Annotated[list[str], typer.Option(help="COLUMN=VALUE; the column is the run's stream.id; repeatable.")],
    as_json: Json = False,
) -> None:
    """Remove a person's rows from the replay memory and the kept evaluation rows. The model is not unlearned.

    Example: retain purge runs/orders --where customer=48
    """
    with _errors(as_json):
        from retain.api import purge as forget
        from retain.errors import ConfigError

        pairs = [text.partition("=") for text in where]
        if not all(column and equals for column, equals, _ in pairs) or len({column for column, _, _ in pairs}) > 1:
            raise ConfigError(f"--where {' '.join(where)}: expected COLUMN=VALUE, with one column, the run's stream.id.")
        found = forget(run, {pairs[0][0]: [value for _, _, value in pairs]})
        if as_json:
            typer.echo(json.dumps({"schema": 1, "removed": found}, ensure_ascii=False))
            return
        for place, rows in found.items():
            typer.echo(f"{place}: " + ", ".join(f"{count:,} rows of {holder}" for holder, count in rows.items()))
        if not found:
            typer.echo(f"{run}: no row is kept of {', '.join(where)}.")
        typer.echo(
            "The model is not unlearned: its weights are as they were. Take the rows out of the data too, or they come back."
        )


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    output: Annotated[Path | None, typer.Option(help="The HTML file to write; default: report.html in RUN.")] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page that tells the story of a run: whether its model may be shipped, and why.

    The page is one file and fetches nothing: it can be sent and kept.

    Example: retain report runs/orders --output orders.html
    """
    with _errors(as_json):
        from retain.api import report as tell

        written = tell(run, output)
        typer.echo(json.dumps({"schema": 1, "output": str(written)}, ensure_ascii=False) if as_json else str(written))


def _dry_run(spec: RunSpec, path: Path, as_json: bool) -> None:
    """Print the resolved spec, the tasks, their rows and steps; nothing is written."""
    import yaml

    from retain.report.tables import tasks_table
    from retain.training.loop import look

    found = look(spec, path)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    console = _console()
    console.print(yaml.safe_dump(found["spec"], sort_keys=False, allow_unicode=True), highlight=False, markup=False)
    rows = [(t["task"], t["train"], t["validation"], t["test"], t["steps"], t["state"]) for t in found["tasks"]]
    console.print(tasks_table(rows))
    for text in found["notes"]:
        console.print(f"· {text}", highlight=False, markup=False)
    last = f"{found['scenario']}, head {found['head']}, {found['steps']:,} steps to go, run directory {path}"
    console.print(last, highlight=False, markup=False)


@contextmanager
def _shown_log() -> Iterator[None]:
    """Print what the package logs meanwhile, such as that it imports a factory's code."""
    import logging

    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("retain")
    handler.setFormatter(logging.Formatter("· %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _console() -> Any:
    """Standard output: as wide as the terminal, wide enough for a table in a pipe; a reader who leaves is no error."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            _leave_pipe()

    return Output() if sys.stdout.isatty() else Output(width=160)


def _leave_pipe() -> None:
    """End quietly after the reader of standard output has left, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(0)


@contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    """Print a `RetainError` as sentences (or as JSON) and exit with its code."""
    try:
        yield
    except RetainError as error:
        if as_json:
            findings = [vars(finding) for finding in error.findings] if isinstance(error, ConfigError) else []
            typer.echo(json.dumps({"schema": 1, "error": {"exit_code": error.exit_code, "text": str(error), "findings": findings}}))
        else:
            mark = "error: " if error.exit_code < 128 else ""
            typer.secho(f"{mark}{error}", err=True, fg=typer.colors.RED if mark else None)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:
        _leave_pipe()
    except OSError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(FAILED) from None


def main() -> None:
    """The `retain` command."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    app()
