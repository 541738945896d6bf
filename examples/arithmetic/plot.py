"""Draw curve.json: held-out accuracy and rewards against time.

    python examples/arithmetic/plot.py runs/arithmetic/curve.json examples/arithmetic/curve.png

It needs matplotlib, which `make dev` installs.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source, target):
    """Write the picture."""
    curve = json.loads(Path(source).read_text())
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps, evaluations = curve["steps"], curve["evaluations"]
    axes.plot(
        [step["seconds"] / 60 for step in steps],
        [step["reward_mean"] for step in steps],
        color="tab:gray",
        alpha=0.6,
        label="reward of the samples",
    )
    axes.plot(
        [e["seconds"] / 60 for e in evaluations],
        [e["accuracy"] for e in evaluations],
        "o-",
        color="tab:blue",
        label="accuracy on held-out problems, greedy",
    )
    axes.axhline(evaluations[0]["accuracy"], color="tab:blue", linestyle=":", label="untrained")
    axes.set(xlabel="minutes", ylim=(0, 1), title="SmolLM2-135M-Instruct, chain_sum, two CPU cores")
    axes.legend(loc="upper left")
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
