"""Finished studies as tables for SQL: one run, or every run below a folder.

    runs          a row per run
    evaluations   a row per evaluation batch of a run
    ledger        a row per term of a run's ledgers
    rollouts      a row per update rollout
    tokens        a row per update token (tokens.parquet: influence on the first evaluation batch)
    evaluation_tokens   the same for every evaluation batch

Files are read by `study_files`, each checked against its manifest, and copied into a database in
memory. The user's SQL then runs with no access to files or network, no extensions and a locked
configuration: it may be anything, and can change nothing. It must be one SELECT.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropy_experiments.artifacts import MANIFEST
from entropy_experiments.input_errors import short
from entropy_experiments.results import INFLUENCE, InfluenceResult
from entropy_experiments.study_files import IDENTITY, RunFiles, open_run

if TYPE_CHECKING:
    import pyarrow

INSTALL = "pip install 'entropy-experiments[query]'"
TABLES: dict[str, dict[str, str]] = {
    "runs": {
        "run": "the study's folder, as seen from the one that was named",
        "checkpoint": "what was studied",
        "step": "its step; null: not known",
        "lr": "learning rate of the step",
        "loss": "the loss that the step minimised",
        "rollouts": "update rollouts",
        "prompts": "update prompts",
        "tokens": "update tokens that the loss counts",
        "mean_reward": "of the update batch; null: not recorded",
        "predicted": "change of entropy to first order, nats",
        "measured": "change of entropy by importance weights, nats",
        "measured_stderr": "its standard error",
        "unexplained": "measured less all terms; null: not known",
        "trusted": "no check found a reason for doubt about the measured change",
        "real": "the batch is the one that training learned from",
    },
    "evaluations": {
        "run": "as in runs",
        "evaluation": "name of the evaluation batch: eval_00, eval_01, ...",
        "kind": "where it came from",
        "rollouts": "its rollouts",
        "prompts": "its prompts",
        "tokens": "its tokens",
        "mean_reward": "null: nothing scored them",
        "predicted": "change of its entropy to first order, nats",
        "measured": "by importance weights, nats",
        "measured_stderr": "its standard error",
        "trusted": "of the measured change",
        "reliability": "correlation of tokens' influence between halves of the prompts",
    },
    "ledger": {
        "run": "as in runs",
        "evaluation": "as in evaluations",
        "quantity": "entropy or reward",
        "term": "momentum, decay, gradient, ...",
        "this_step": "what the term did in this step, nats (of a reward: its unit)",
        "eventual": "with the momentum that it leaves to later steps; null: the same",
        "stderr": "of this_step; null: not known",
    },
    "rollouts": {
        "run": "as in runs",
        "rollout": "row in the update batch, from 0",
        "uid": "what the framework that made it calls it; null: it has no name",
        "prompt": "number of its prompt",
        "prompt_text": "the prompt",
        "response": "the tokens that the policy drew, as text",
        "reward": "null: not recorded",
        "advantage": "mean over its tokens",
        "tokens": "response tokens",
        "truncated": "the length limit ended it; null: not recorded",
        "influence": "change of H to first order, nats: the sum over its tokens",
        "entropy": "mean over its tokens, nats",
        "logprob": "sum over its tokens",
    },
}
"""Columns of the tables that are made here; those of tokens are in docs/file_formats.md."""
TOKENS = ("tokens", "evaluation_tokens")


def query_studies(folder: str | Path, sql: str) -> pyarrow.Table:
    """What a SELECT over the studies of a folder gives.

    Args:
        folder: A study's run directory, or a folder with several below it.
        sql: One SELECT over the tables of this module.

    Returns:
        An Arrow table.

    Raises:
        ValueError: If the SQL is not one SELECT, or fails.
    """
    checked()
    tables = study_tables(find_studies(Path(folder))[0])
    return run_sql(tables, sql)


def checked() -> None:
    """Refuse where DuckDB is not installed."""
    if find_spec("duckdb") is None:
        raise ValueError(f"`query` needs duckdb, which is not installed: {INSTALL}")


def find_studies(folder: Path) -> tuple[dict[str, RunFiles], list[str]]:
    """(studies by name, notes on what is left out)."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"No folder {folder}; expected the run directory of `entropy-probe influence`, or one "
            "with several below it."
        )
    if (folder / MANIFEST).is_file() or (folder / IDENTITY).is_file():
        return {folder.resolve().name: open_run(folder)}, []
    studies: dict[str, RunFiles] = {}
    notes: list[str] = []
    for identity in sorted([*folder.rglob(MANIFEST), *folder.rglob(IDENTITY)]):
        place = identity.parent
        name = place.relative_to(folder).as_posix()
        if name in studies or not _is_study(place):
            continue
        if not (place / MANIFEST).is_file():
            notes.append(f"{name} is left out: the study is not finished")
            continue
        studies[name] = open_run(place)
    if not studies:
        raise ValueError(
            f"{folder} has no finished study below it"
            + (f" ({'; '.join(notes)})" if notes else "")
            + "; expected run directories of `entropy-probe influence`."
        )
    return studies, notes


def refuse_targets(files: Iterable[Path]) -> None:
    """A result is written beside studies, never into one, and each into a file of its own."""
    places = [file.resolve() for file in files]
    twice = [str(place) for place, count in Counter(places).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is named for two results; expected a file for each.")
    for place in places:
        study = next((folder for folder in place.parents if _is_study(folder)), None)
        if study is not None:
            raise ValueError(
                f"{place} is in the folder of a study, {study}; expected a file elsewhere. Studies "
                "are read, never written."
            )


def _is_study(place: Path) -> bool:
    for name in (MANIFEST, IDENTITY):
        path = place / name
        if path.is_file():
            try:
                content = json.loads(path.read_bytes())
            except ValueError:
                return name == IDENTITY or (place / IDENTITY).is_file()
            return isinstance(content, dict) and (
                name == IDENTITY or content.get("format") == INFLUENCE.name
            )
    return False


def study_tables(studies: Mapping[str, RunFiles]) -> dict[str, pyarrow.Table]:
    """The tables by name, all studies below each other, each with its `run`."""
    import pyarrow

    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    tokens: dict[str, list[pyarrow.Table]] = {name: [] for name in TOKENS}
    for name, study in studies.items():
        summary = study.summary()
        rows["runs"].append({"run": name, **_run(summary)})
        first = _with_run(study.table("tokens.parquet"), name)
        tokens["tokens"].append(first)
        for one in summary["evaluations"]:
            rows["evaluations"].append({"run": name, **_evaluation(one)})
            rows["ledger"] += [{"run": name, **line} for line in _ledger(one)]
            table = _with_run(study.table(f"{one['name']}_tokens.parquet"), name)
            column = pyarrow.array([one["name"]] * len(table), pyarrow.string())
            tokens["evaluation_tokens"].append(table.add_column(1, "evaluation", column))
        texts = study.json("update_rollouts.json")
        rows["rollouts"] += [{"run": name, **row} for row in _rollouts(first, texts)]
    schemas = _schemas()
    out = {
        name: pyarrow.Table.from_pylist(lines, schema=schemas[name]) for name, lines in rows.items()
    }
    # Studies may have another number of folds: a column that one lacks is null there.
    return out | {
        name: pyarrow.concat_tables(parts, promote_options="permissive")
        for name, parts in tokens.items()
    }


def _schemas() -> dict[str, pyarrow.Schema]:
    import pyarrow

    text, whole, real, yes = pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.bool_()
    kinds = {
        **dict.fromkeys(("run", "checkpoint", "loss", "evaluation", "kind", "quantity"), text),
        **dict.fromkeys(("term", "uid", "prompt_text", "response"), text),
        **dict.fromkeys(("step", "rollouts", "prompts", "tokens", "rollout", "prompt"), whole),
        **dict.fromkeys(("trusted", "real", "truncated"), yes),
    }
    return {
        table: pyarrow.schema([(name, kinds.get(name, real)) for name in columns])
        for table, columns in TABLES.items()
    }


def _with_run(table: pyarrow.Table, name: str) -> pyarrow.Table:
    import pyarrow

    if "uid" not in table.column_names:  # of an earlier version
        nothing = pyarrow.nulls(len(table), pyarrow.string())
        table = table.append_column("uid", nothing)
    run = pyarrow.array([name] * len(table), pyarrow.string())
    return table.replace_schema_metadata(None).add_column(0, "run", run)


def _run(summary: InfluenceResult) -> dict[str, Any]:
    update, ledger = summary["update"], summary["ledger"]
    unexplained = ledger.get("unexplained")
    return {
        "checkpoint": summary["checkpoint"],
        "step": summary["step"],
        "lr": summary["lr"],
        "loss": update["objective"].get("loss"),
        "rollouts": update["rollouts"],
        "prompts": update["prompts"],
        "tokens": update["tokens"],
        "mean_reward": update["mean_reward"],
        "predicted": ledger["predicted"]["value"],
        **_measured(ledger["measured"]),
        "unexplained": None if unexplained is None else unexplained["value"],
        "real": update["real"],
    }


def _evaluation(one: Mapping[str, Any]) -> dict[str, Any]:
    ledger = one["ledger"]["entropy"]
    names = ("kind", "rollouts", "prompts", "tokens", "mean_reward", "reliability")
    return {
        "evaluation": one["name"],
        **{name: one.get(name) for name in names},
        "predicted": ledger["predicted"]["value"],
        **_measured(ledger["measured"]),
    }


def _measured(estimate: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "measured": estimate["value"],
        "measured_stderr": estimate.get("stderr"),
        "trusted": estimate.get("trusted"),
    }


def _ledger(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "evaluation": one["name"],
            "quantity": quantity,
            "term": term,
            **{name: line.get(name) for name in ("this_step", "eventual", "stderr")},
        }
        for quantity, ledger in one["ledger"].items()
        if ledger is not None
        for term, line in ledger["lines"].items()
    ]


def _rollouts(tokens: pyarrow.Table, texts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    columns = tokens.to_pydict()
    by_rollout: dict[int, list[int]] = {}
    for at, rollout in enumerate(columns["rollout"]):
        by_rollout.setdefault(rollout, []).append(at)
    out = []
    for text in texts:
        rows = by_rollout.get(text["rollout"], [])

        def column(name: str, rows: list[int] = rows) -> list[Any]:
            return [columns[name][at] for at in rows]

        count = len(rows)
        out.append(
            {
                **{name: text.get(name) for name in ("rollout", "uid", "prompt", "prompt_text")},
                "response": "".join(column("piece")),
                "reward": text.get("reward"),
                "advantage": math.fsum(column("advantage")) / count if count else None,
                "tokens": count,
                "truncated": text.get("truncated"),
                "influence": math.fsum(column("influence")),
                "entropy": math.fsum(column("entropy")) / count if count else None,
                "logprob": math.fsum(column("logprob")),
            }
        )
    return out


def run_sql(tables: Mapping[str, pyarrow.Table], sql: str) -> pyarrow.Table:
    """One SELECT over these tables, with access to nothing else; no two columns of one name."""
    import duckdb

    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The SQL is not text: {short(error)}; expected valid UTF-8.") from error
    with duckdb.connect(":memory:", config=CLOSED) as database:
        for name, table in tables.items():
            database.register("arrow_table", table)
            database.execute(f'CREATE TABLE "{name}" AS SELECT * FROM arrow_table')
            database.unregister("arrow_table")
        # Last: nothing may be opened from here on, by whatever the SQL says.
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        listed = ", ".join(tables)
        try:
            statements = database.extract_statements(sql)
            if len(statements) != 1 or statements[0].type not in (
                duckdb.StatementType.SELECT,
                duckdb.StatementType.EXPLAIN,
            ):
                kinds = [str(one.type).rpartition(".")[2] for one in statements]
                if kinds == ["MULTI"]:
                    raise ValueError(
                        "A PIVOT that finds its columns itself is more than one statement; "
                        "expected one SELECT. Name the columns: PIVOT ... ON column IN (values)."
                    )
                raise ValueError(
                    f"The SQL has {len(statements)} statements {kinds}; expected one SELECT. "
                    "Studies are read, never written: --csv, --json and --parquet write a result."
                )
            result = database.sql(statements[0]).to_arrow_table()
        except duckdb.Error as error:
            words = " ".join(str(error).split())
            raise ValueError(f"SQL: {short(words, 400)} (Tables: {listed}.)") from error
    _refuse_equal_names(result)
    return result


def _refuse_equal_names(result: pyarrow.Table) -> None:
    """Rows by name would have one value for both."""
    twice = [name for name, count in Counter(result.column_names).items() if count > 1]
    if twice:
        raise ValueError(
            f"The result has more than one column {', '.join(map(repr, twice))}; expected each "
            f'name once. Name them apart: SELECT t."{twice[0]}" AS first, r."{twice[0]}" AS second.'
        )


CLOSED: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
}
"""No extension is fetched or loaded, and no variable of this program is a table."""


def described_tables(tables: Mapping[str, pyarrow.Table]) -> list[str]:
    """Every table with its columns, for a query without SQL."""
    lines = []
    for name, table in tables.items():
        lines += [f"{name} ({len(table):,} rows)"]
        about = TABLES.get(name, {})
        for field in table.schema:
            what = about.get(field.name, "")
            lines.append(f"  {field.name:<22}{field.type!s:<9}{what}".rstrip())
    return lines


def rows_of(table: pyarrow.Table) -> list[tuple[Any, ...]]:
    """The values of each row, in the order of the columns."""
    import pyarrow

    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            raise ValueError(
                f"Column {name!r} has a {column.type} that cannot be written "
                f"({short(error, 120)}); expected dates of the years 1 to 9999. Cast it: "
                f'"{name}"::VARCHAR.'
            ) from error
    return list(zip(*columns, strict=True))


def as_csv(table: pyarrow.Table) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(table.column_names)
    writer.writerows(rows_of(table))
    return out.getvalue().encode("utf-8", errors="replace")


def as_json(table: pyarrow.Table) -> bytes:
    """A list of objects; what is no number is null."""
    names = table.column_names
    rows = [dict(zip(names, map(_plain, row), strict=True)) for row in rows_of(table)]
    return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False, default=str).encode(
        "utf-8", errors="replace"
    )


def as_parquet(table: pyarrow.Table) -> bytes:
    import pyarrow.parquet

    out = io.BytesIO()
    try:
        pyarrow.parquet.write_table(table, out)
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"Parquet cannot hold this result ({short(error, 120)}); expected numbers, texts, "
            "dates, lists and structs. Cast the column: column::VARCHAR."
        ) from error
    return out.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return value
