"""docs/configuration.md: every key of run.toml, made from the models.

python -m splice.reference > docs/configuration.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from splice.client.run_file import BY_DEVICE
from splice.train.sections import TrainFile

HEAD = """# Configuration: every key of run.toml

`splice init` writes the file with the keys that matter first. `--set trainer.seed=7` overrides one
for a command. `splice config show` prints all values of a run, `splice config check` checks them
against the host. This page is made from the models by `python -m splice.reference`.

The tables `data`, `loop`, `sampling`, `loss`, `optim` and `eval` are for
[`splice train`](train.md). Other commands pass over them.
"""


def markdown() -> str:
    """Return the page."""
    schema = TrainFile.model_json_schema()
    return "\n".join([HEAD, *_tables(schema, schema["$defs"], name="")])


def _tables(model: dict[str, Any], defs: dict[str, Any], *, name: str) -> Iterator[str]:
    """Yield a table of the model's plain keys, then the tables of the models within it."""
    within, rows = [], []
    for key, field in model["properties"].items():
        inner = _model_in(field)
        if inner is not None:
            within.append((f"{name}.{key}" if name else key, field, defs[inner]))
        else:
            rows.append((key, field))
    yield f"## `[{name}]`\n" if name else "## At the top of the file\n"
    yield "| key | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    required = model.get("required", ())
    for key, field in rows:
        default = "required" if key in required and not _is_shared(name, key) else _default(field)
        if _is_shared(name, key):
            default = "the top's"
        if key in BY_DEVICE["cpu"].get(name, {}):
            cpu, cuda = (json.dumps(BY_DEVICE[d][name][key]) for d in ("cpu", "cuda"))
            default = f"`{cpu}`; on GPUs `{cuda}`"
        meaning = " ".join(str(field.get("description", "")).split()).replace("|", "\\|")
        if (name, key) == ("trainer", "model"):  # the file's are folders; JSON files take Hub ids
            meaning = "Folder with a Hugging Face checkpoint; `splice init --model` downloads one."
        yield f"| `{key}` | {_values(field)} | {default} | {meaning} |"
    yield ""
    for path, _, inner_model in within:
        yield from _tables(inner_model, defs, name=path)


def _is_shared(table: str, key: str) -> bool:
    shared = table in ("trainer", "inference") and key in ("model", "device", "dtype")
    return shared or (table, key) == ("inference", "name")


def _model_in(field: dict[str, Any]) -> str | None:
    for part in (field, *field.get("allOf", ()), *field.get("anyOf", ())):
        if "$ref" in part:
            return str(part["$ref"]).rpartition("/")[2]
    return None


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "this Python"
    value = field["default"]
    return "none" if value is None else f"`{json.dumps(value)}`"


def _values(field: dict[str, Any]) -> str:
    """Return the allowed values in words."""
    if "anyOf" in field:
        return " or ".join(_values(part) for part in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field["type"] == "array":
        return f"list of {_values(field['items'])}"
    if field["type"] == "object":
        return "table"
    kind = {"string": "text", "integer": "integer", "number": "number", "null": "none"}
    bounds = [
        f"{sign} {field[key]:g}"
        for key, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if key in field
    ]
    return " ".join([kind.get(field["type"], field["type"]), ", ".join(bounds)]).strip()


if __name__ == "__main__":
    sys.stdout.write(markdown())
