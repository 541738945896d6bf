"""A folder like a user's own, with names of packages that a run needs."""

from __future__ import annotations

from pathlib import Path

MODULES = ("orchestrator.py", "json.py", "zmq.py")
PACKAGES = (
    *("splice", "trainer_node", "inference_node", "weight_transfer"),
    *("vllm", "megatron", "torch", "transformers"),
)
HIDES = 'raise SystemExit(f"{__file__} hid an installed package")\n'


def hiding_folder(folder: Path) -> Path:
    """Fill the folder. Each module ends a process that imports it."""
    for name in (*MODULES, *(f"{package}/__init__.py" for package in PACKAGES)):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(HIDES)
    return folder
