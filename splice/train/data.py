"""Rows of a file or a dataset, as prompts of a loop."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from splice.cluster.environments import install
from splice.rl.sampler import RequestRefused, Row, check_row
from splice.train.functions import function_of
from splice.train.sections import DataSection

FILES = (".jsonl", ".json", ".csv", ".parquet")


def rows_of(data: DataSection, folder: Path, *, table: str) -> list[Row]:
    """Read the rows, with `prompt` or `messages` in each.

    Args:
        folder: of the file that names the data.
        table: the data's table in it, for errors.

    Raises:
        ConfigError: there is no such data, a row is no object, or a prompt's column is missing.
    """
    path = folder / data.path
    if ".py:" in data.path:
        found = _called(data.path, folder, table)
    else:
        found = _read(path) if path.suffix in FILES else _dataset(data, path)
    rows: list[Row] = []
    for number, raw in enumerate(itertools.islice(found, data.rows), 1):
        where = f"{table}.path {data.path}, row {number}"
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where} is not an object with columns: {raw!r:.100}")
        row = _prompted(dict(raw), data, where)
        try:
            check_row(row)
        except RequestRefused as error:
            raise ConfigError(f"{where}: {error}") from None
        rows.append(row)
    if not rows:
        raise ConfigError(f"{table}.path {data.path} has no rows")
    return rows


def _called(name: str, folder: Path, table: str) -> Iterable[Any]:
    function = function_of(name, folder)
    try:
        return list(function())
    except Exception as error:
        raise ConfigError(
            f"{table}.path {name} gives no rows: {type(error).__name__}: {error}"
        ) from error


def _prompted(row: dict[str, Any], data: DataSection, where: str) -> Row:
    if data.prompt is not None:
        try:
            row["prompt"] = data.prompt.format_map(row)
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{where} does not fit prompt {data.prompt!r} ({type(error).__name__}: {error}); "
                f"it has the columns {sorted(map(str, row))}"
            ) from None
    if not data.chat and data.system is None:
        return row
    system = [] if data.system is None else [{"role": "system", "content": data.system}]
    if "messages" in row:
        return row | {"messages": [*system, *row["messages"]]}
    if "prompt" not in row:
        return row  # `check_row` says so
    row["messages"] = [*system, {"role": "user", "content": row.pop("prompt")}]
    return row


def _read(path: Path) -> Iterable[Any]:
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    if path.suffix == ".csv":
        return csv.DictReader(io.StringIO(text, newline=""))  # a quoted field may have newlines
    if path.suffix == ".jsonl":  # a string may have other line separators, which splitlines() cuts
        lines = enumerate(text.split("\n"), 1)
        return [_decoded(line, f"{path}, line {n},") for n, line in lines if line.strip()]
    found = _decoded(text, str(path))
    if not isinstance(found, list):
        raise ConfigError(f"{path} does not hold a list of rows")
    return found


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _parquet(path: Path) -> Iterable[Any]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path.name} needs pyarrow: {install('data')} in this environment"
        ) from error
    found: list[Any] = parquet.read_table(path).to_pylist()
    return found


def _dataset(data: DataSection, path: Path) -> Iterable[Any]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{data.path} is no file of {', '.join(FILES)}. A dataset's name or folder needs "
            f"the package datasets: {install('data')} in this environment"
        ) from error
    name = str(path) if path.exists() else data.path
    try:
        if path.is_dir() and (path / "dataset_info.json").exists():  # of save_to_disk
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, data.subset, split=data.split)
    except Exception as error:
        raise ConfigError(
            f"dataset {data.path} (subset {data.subset}, split {data.split}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
