"""Runs `splice check` on a folder, with a mistake in Megatron's config if one is named.

python -m tests.trainer_node.tools.checked OUT FOLDER [FIELD VALUE | --whole]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trainer_node.model import providers
from trainer_node.tools import check_model


def main() -> None:
    """See the module's docstring."""
    out, folder, *mistake = sys.argv[1:]
    prepare = providers.prepare

    def prepare_wrongly(provider: Any, *args: Any) -> None:
        prepare(provider, *args)
        setattr(provider, mistake[0], json.loads(mistake[1]))

    whole = mistake == ["--whole"]
    if mistake and not whole:
        providers.prepare = prepare_wrongly
    code = check_model.main(["--model", folder, "--out", out, *["--whole"] * whole])
    sys.exit(0 if code in (0, 1) else code)


if __name__ == "__main__":
    main()
