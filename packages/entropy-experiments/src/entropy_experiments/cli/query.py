"""`entropy-probe query`: SQL over the tables of finished studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from entropy_experiments.artifacts import named_os_errors, try_outputs, write_whole
from entropy_experiments.cli.job import ending
from entropy_experiments.cli.options import Debug, Quiet
from entropy_experiments.input_errors import printable

if TYPE_CHECKING:
    import pyarrow

EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe query RUN                  the tables and their columns\n"
    '  entropy-probe query RUN "SELECT rollout, uid, influence FROM rollouts\n'
    '      ORDER BY influence LIMIT 5"           rollouts that lower entropy most\n'
    '  entropy-probe query RUN "SELECT text, COUNT(*) AS n, SUM(influence) AS nats\n'
    '      FROM tokens GROUP BY text ORDER BY ABS(SUM(influence)) DESC LIMIT 10"\n'
    '  entropy-probe query runs/ "SELECT run, step, predicted, measured FROM runs\n'
    '      ORDER BY step"                        every study below a folder\n'
    '  entropy-probe query RUN "SELECT * FROM tokens WHERE counted" --parquet mine.parquet\n\n'
    "Tables: runs, evaluations, ledger, rollouts, tokens, evaluation_tokens; each has a column run."
)
ROWS = 40
WIDEST = 48
"""Characters of a cell on the screen; files have all."""


def query(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a study, or one with studies below it."),
    ],
    sql: Annotated[
        str | None, typer.Argument(metavar="[SQL]", help="One SELECT. Left out: list the tables.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the result as CSV.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write it as parquet.")
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Rows shown on the screen; files have all.")
    ] = ROWS,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Ask the tables of finished studies in SQL (DuckDB): tokens, rollouts, ledgers, runs."""
    with ending(debug=debug):
        from entropy_experiments.report import query as studies

        asked = {"csv": csv, "json": json, "parquet": parquet}
        files = {kind: path for kind, path in asked.items() if path is not None}
        studies.refuse_targets(files.values())
        try_outputs((), tuple(files.values()))
        if sql is None and files:
            raise ValueError(f"--{next(iter(files))} writes a result: give the SQL, too.")
        studies.checked()
        found, notes = studies.find_studies(run)
        tables = studies.study_tables(found)
        if not quiet:
            for note in notes:
                typer.echo(printable(f"note: {note}"), err=True)
        if sql is None:
            typer.echo(printable("\n".join(studies.described_tables(tables))))
            return
        result = studies.run_sql(tables, sql)
        write = {"csv": studies.as_csv, "json": studies.as_json, "parquet": studies.as_parquet}
        contents = {path: write[kind](result) for kind, path in files.items()}
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
            if not quiet:
                typer.echo(f"{len(result):,} rows: {path}")
        if not files:
            with named_os_errors("standard output"):
                _show(result, studies.rows_of(result.slice(0, rows)))


def _show(table: pyarrow.Table, shown: Sequence[tuple[Any, ...]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Of a pipe nobody knows the width: lines are as long as they are.
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for field in table.schema:
        number = str(field.type) in ("int64", "double", "int32", "hugeint", "float", "uint64")
        drawn.add_column(Text(printable(field.name)), justify="right" if number else "left")
    for row in shown:
        drawn.add_row(*(Text(_cell(value)) for value in row))
    console.print(drawn)
    left = len(table) - len(shown)
    if left > 0:
        console.print(f"{left:,} more rows (--rows, or a LIMIT of your own)")


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = printable(value).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
