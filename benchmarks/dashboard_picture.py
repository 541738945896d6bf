"""docs/dashboard.png: `splice dashboard` in Chromium, over a committed log of a loop.

python -m benchmarks.dashboard_picture docs/dashboard.png
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from splice.dashboard import Dashboard

LOG = Path(__file__).parent / "results" / "report-loop-cpu.jsonl.gz"
"""Thirty steps of the tiny Qwen3 on two CPU cores, which learns to say maybe."""
SIZE = "1160,1095"
"""Of the window, in pixels."""
TIMEOUT_S = 120.0


def picture(out: Path) -> None:
    """Write the page's picture.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        loop = Path(folder) / "maybe"
        loop.mkdir()
        (loop / "decisions.jsonl").write_bytes(gzip.decompress(LOG.read_bytes()))
        with Dashboard([loop]) as board:
            argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            argv += [f"--window-size={SIZE}", f"--user-data-dir={folder}/profile"]
            argv += [f"--screenshot={out.absolute()}", board.url]
            subprocess.run(argv, capture_output=True, timeout=TIMEOUT_S, check=True)


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
