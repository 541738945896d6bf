"""Draw curve.json: held-out accuracy and rewards against time.

    python examples/arithmetic/plot.py runs/arithmetic/curve.json examples/arithmetic/curve.png

Of several files it draws all in one picture, asynchronous and strict runs in two colours. It needs
matplotlib, which `make dev` installs.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"asynchronous": "tab:blue", "strict": "tab:orange"}


def main(*paths):
    """Write the picture, the last path."""
    *sources, target = paths
    curves = [json.loads(Path(source).read_text()) for source in sources]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    labelled = set()
    for curve in curves:
        strict = curve["starts"][0]["settings"]["max_staleness"] == "0"
        mode = "strict" if strict else "asynchronous"
        steps, evaluations = curve["steps"], curve["evaluations"]
        axes.plot(
            [step["seconds"] / 60 for step in steps],
            [step["reward_mean"] for step in steps],
            color=COLOURS[mode] if len(curves) > 1 else "tab:gray",
            alpha=0.2 if len(curves) > 1 else 0.6,
        )
        axes.plot(
            [e["seconds"] / 60 for e in evaluations],
            [e["accuracy"] for e in evaluations],
            "o-",
            color=COLOURS[mode],
            label=None if mode in labelled else f"{mode}: accuracy on held-out problems, greedy",
        )
        labelled.add(mode)
    axes.axhline(curves[0]["evaluations"][0]["accuracy"], linestyle=":", label="untrained")
    axes.set(xlabel="minutes", ylim=(0, 1), ylabel="faint: reward of the samples")
    axes.set_title("SmolLM2-135M-Instruct, chain_sum")
    axes.legend(loc="upper left")
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
