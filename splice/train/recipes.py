"""Recipes for `splice init --recipe NAME`: what a run trains. splice/recipes has a file for each.

[recipe]    about, model, lora_rank, max_model_len, files, measured, command; `like`: another's rest
[run]       the tables after it go into run.toml as they are
"""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "recipes"
RUN = "[run]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe.

    Attributes:
        about: what it trains, in a few words.
        model: a Hub id.
        ran: what was run of it, with which weights, and where its curve or result is.
        command: of `splice`, which trains it.
        files: names in `FOLDER` that go next to run.toml.
        text: tables for run.toml.
    """

    name: str
    about: str
    model: str
    ran: str
    command: str
    lora_rank: int
    max_model_len: int | None
    files: tuple[str, ...]
    text: str

    @property
    def head(self) -> str:
        """Comment lines for run.toml."""
        return (
            f"\n# Recipe {self.name}: {self.about}.\n"
            f"# `splice {self.command}` with this file. {self.ran}\n\n"
        )

    def copy_files(self, folder: Path) -> None:
        """Copy the recipe's files.

        Raises:
            ConfigError: one of them is there already.
        """
        for name in self.files:
            if (folder / name).exists():
                raise ConfigError(f"{folder / name} exists; choose another folder")
        for name in self.files:
            shutil.copyfile(FOLDER / name, folder / name)


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> Recipe:
    """Return a recipe.

    Raises:
        ConfigError: there is none of this name; says which there are.
    """
    if name not in names():
        known = "\n".join(f"  {other:<18} {read(other).about}" for other in names())
        raise ConfigError(f"there is no recipe {name!r}; there are\n{known}")
    text = (FOLDER / f"{name}.toml").read_text()
    own = tomllib.loads(text)["recipe"]
    if like := own.pop("like", ""):
        text = (FOLDER / f"{like}.toml").read_text()
        own = tomllib.loads(text)["recipe"] | own
    return Recipe(
        name=name,
        about=own["about"],
        model=own["model"],
        ran=own["ran"],
        command=own.get("command", "train"),
        lora_rank=own["lora_rank"],
        max_model_len=own.get("max_model_len"),
        files=tuple(own.get("files", ())),
        text=text.partition(RUN)[2],
    )
