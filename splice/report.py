"""`splice report`: a loop as one HTML page that needs neither network nor script.

The loop's log has the numbers, its samples the texts. matplotlib draws the plots as SVG, which the
page contains.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import io
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from orchestrator.errors import ConfigError
from splice.rl import browse, checker, decisions, samples
from splice.rl.balance import Balance
from splice.verdicts import verdict

TIMELINE_STEPS = 20
"""Steps in the timeline, the newest."""
POINTS = 500
"""Most points of a line; more are averaged."""
FONT = 11
"""Size of a plot's texts, in points: a phone shows a plot with nine tenths of a pixel a point."""
SHOWN = 4
"""Best and worst samples of the newest step, and of the first one."""
_TRAINER, _SAMPLER, _PAUSE, _BODY, _MORE = "#2a6fbb", "#2f9e6e", "#d64545", "#b9a03b", "#8458b3"
_PARTS = "rewards/"
"""Begins the metric of a reward's part."""
_COLORS = (_TRAINER, _PAUSE, _SAMPLER, _MORE, _BODY)
PLOTS: dict[str, tuple[str, ...]] = {
    "Reward": ("reward_mean", "reward_std"),
    "Loss": ("loss",),
    "Entropy (nats)": ("entropy_mean",),
    "KL (nats)": ("kl_mean", "kl_sampler_mean"),
    "Log-prob gap, sampler to trainer (nats)": ("logprob_gap_mean", "logprob_gap_max"),
    "Staleness (versions)": ("staleness_mean", "staleness_max"),
    "Answers (tokens)": ("answer_tokens",),
    "Answers cut off (share)": ("truncated",),
    "Groups whose rewards are all equal (share)": ("groups_without_signal",),
    "Gradient norm": ("grad_norm",),
    "Clipped tokens (share)": ("clip_fraction",),
    "Update by the weights' size": ("update_ratio",),
    "Update in the served weights (share)": ("served_share",),
    "Weights that differ from the base (share)": ("changed_share",),
    "Trainer (tokens/s)": ("tokens_per_s",),
}
"""Title of a plot -> the metrics in it. One without numbers is left out."""
PHASES = {
    "training": _TRAINER,
    "saving": _MORE,
    "publishing": _SAMPLER,
    "waiting": _PAUSE,
    "loop's body": _BODY,
}
"""What the trainer's side does in a step (`phases_of`) -> its colour."""


@dataclass(slots=True)
class History:
    """What the page is made of.

    Attributes:
        steps: step -> metrics.
        seconds: step -> seconds.
        spans: (step, start, end) of each training, in seconds since the epoch.
        latest: seconds of the last start's steps.
        in_flight: (seconds since the epoch, number of requests) at each change since the newest
            steps of the timeline began.
        notes: name -> step -> the user's own number.
        facts: of the last start's run: model, devices, version, commit.
    """

    config: dict[str, Any] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    starts: int = 0
    began_at: float = 0.0
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    spans: list[tuple[int, float, float]] = field(default_factory=list)
    latest: list[dict[str, float]] = field(default_factory=list)
    in_flight: deque[tuple[float, int]] = field(default_factory=deque)
    notes: dict[str, dict[int, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def warm(self) -> list[dict[str, float]]:
        """The last start's without the first one, which warms everything up."""
        return self.latest[1:]


def read(log: Path) -> History:
    """Read a loop's log.

    Raises:
        ConfigError: there is no log, or no step was trained.
    """
    if not log.exists():
        raise ConfigError(f"no loop has run here: there is no {log}")
    found, reader = History(), _Reader()
    for line in decisions.read(log):
        reader.take(found, line)
    if not found.steps:
        raise ConfigError(f"{log} has no trained step yet; make the report after the first one")
    return found


class _Reader:
    def __init__(self) -> None:
        self._open: set[tuple[int, int]] = set()
        self._sent: dict[str, Any] | None = None

    def take(self, found: History, line: dict[str, Any]) -> None:
        event, at = line["event"], line.get("at", 0.0)
        if event == "start":
            found.config, found.starts = line["config"], found.starts + 1
            found.facts = line.get("facts", {})  # older logs lack them
            found.began_at = found.began_at or at
            self._open.clear()
            found.latest.clear()
            found.in_flight.append((at, 0))
        elif event in ("admit", "finish", "lost", "drop"):
            change = self._open.add if event == "admit" else self._open.discard
            change((line["group"], line["sample"]))
            found.in_flight.append((at, len(self._open)))
        elif event == "train":
            self._sent = line
        elif event == "trained":
            self._trained(found, line, at)
        elif event == "note":
            for name, value in line["metrics"].items():
                found.notes.setdefault(name, {})[line["step"]] = value

    def _trained(self, found: History, line: dict[str, Any], at: float) -> None:
        sent = self._sent or {}
        found.versions.append(line["version"])
        metrics = line.get("metrics") or sent.get("metrics", {})
        found.steps[line["step"]] = found.steps.get(line["step"], {}) | metrics
        if line["seconds"]:
            found.seconds[line["step"]] = line["seconds"]
            found.latest.append(line["seconds"])
        if sent.get("step") == line["step"]:
            found.spans.append((line["step"], sent["at"], at))
            zero = found.spans[-TIMELINE_STEPS:][0][1]
            while len(found.in_flight) > 1 and found.in_flight[1][0] < zero:
                found.in_flight.popleft()
        self._sent = None


# ---------------------------------------------------------------- plots


class Plots:
    """Draws with matplotlib, without a window and without its global state."""

    def __init__(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                f"the report needs matplotlib: {sys.executable} -m pip install matplotlib"
            )
        self._mpl = importlib.import_module("matplotlib")
        self._figure = importlib.import_module("matplotlib.figure").Figure
        self._integers = importlib.import_module("matplotlib.ticker").MaxNLocator

    def figure(self, *, width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
        """Return a figure with its axes. Sizes are in inches."""
        figure = self._figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True)
        for axis in [axes] if rows == 1 else axes:
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(visible=True, color="#e6e8eb", linewidth=0.8)
            axis.set_axisbelow(True)
            axis.tick_params(labelsize=FONT, colors="#4a5360")
            axis.ticklabel_format(useOffset=False)
        return figure, axes

    def svg(self, figure: Any) -> str:
        """Return the figure as an element of a page: text stays text."""
        out = io.StringIO()
        style = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with self._mpl.rc_context(style):
            figure.savefig(out, format="svg", metadata=nothing)
        text = out.getvalue()
        return text[text.index("<svg") :]

    def lines(self, found: dict[str, dict[int, float]], *, dots: bool = False) -> str:
        """Return a plot of numbers over steps."""
        figure, axis = self.figure(width=5.2, height=2.6)
        for (name, values), color in zip(found.items(), _COLORS, strict=False):
            steps, numbers = _thin(sorted(values.items()))
            marker = "o" if dots or len(steps) < 3 else ""
            axis.plot(
                steps, numbers, label=name, color=color, marker=marker, markersize=4, linewidth=1.5
            )
        _set_limits(axis, [value for values in found.values() for value in values.values()])
        axis.xaxis.set_major_locator(self._integers(nbins=6, integer=True))
        axis.set_xlabel("step", fontsize=FONT)
        if len(found) > 1:
            axis.legend(
                frameon=False, fontsize=FONT, ncols=3, loc="lower left", bbox_to_anchor=(0, 1)
            )
        return self.svg(figure)

    def phases(self, seconds: dict[int, dict[str, float]]) -> str:
        """Return each step's seconds on the trainer's side, on top of each other."""
        figure, axis = self.figure(width=5.2, height=2.6)
        columns = {
            name: _thin([(step, phases_of(own)[name]) for step, own in sorted(seconds.items())])
            for name in PHASES
        }
        steps = next(iter(columns.values()))[0]
        axis.stackplot(
            [s + d for s in steps for d in (-0.5, 0.5)] if len(steps) < POINTS else steps,
            *(
                [v for v in values for _ in range(2)] if len(steps) < POINTS else values
                for _, values in columns.values()
            ),
            labels=list(PHASES),
            colors=list(PHASES.values()),
            alpha=0.85,
        )
        axis.xaxis.set_major_locator(self._integers(nbins=6, integer=True))
        axis.set_xlabel("step", fontsize=FONT)
        axis.set_ylabel("seconds", fontsize=FONT)
        axis.margins(x=0)
        axis.legend(frameon=False, fontsize=FONT, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
        return self.svg(figure)

    def timeline(self, history: History) -> str:
        """Return both sides over the time of the newest steps."""
        spans = history.spans[-TIMELINE_STEPS:]
        zero, end = spans[0][1], spans[-1][2]
        figure, (trainer, sampler) = self.figure(width=10.8, height=3.4, rows=2)
        for number, began, done in spans:
            own = history.seconds.get(number, {})
            pause = min(own.get("job.pause", 0.0), done - began)
            trainer.broken_barh([(began - zero, done - began)], (0, 1), facecolors=_TRAINER)
            trainer.broken_barh([(done - pause - zero, pause)], (0, 1), facecolors=_PAUSE)
            middle = (began + done) / 2 - zero
            if done - began > (end - zero) / 60:
                trainer.text(
                    middle, 0.5, number, ha="center", va="center", color="w", fontsize=FONT
                )
        trainer.set_yticks([0.5], ["trainer"])
        trainer.set_ylim(-0.15, 1.15)
        before = [count for at, count in history.in_flight if at < zero][-1:]
        inside = [(at - zero, count) for at, count in history.in_flight if zero <= at <= end]
        points = [(0.0, before[0] if before else 0), *inside]
        points.append((end - zero, points[-1][1]))
        xs, ys = _steps_of(points)
        sampler.fill_between(xs, ys, step="post", color=_SAMPLER, alpha=0.8, linewidth=0)
        sampler.set_ylabel("requests in flight", fontsize=FONT)
        sampler.yaxis.set_major_locator(self._integers(nbins=4, integer=True))
        sampler.set_ylim(bottom=0)
        sampler.set_xlabel("seconds", fontsize=FONT)
        sampler.set_xlim(0, end - zero)
        return self.svg(figure)


def phases_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by what the trainer's side does. Time in which a save begins the next batch
    counts as training. Publishing is the rest of the job."""
    job = seconds.get("training", 0.0)
    train, save = seconds.get("job.train", job), seconds.get("job.save", 0.0)
    ahead = seconds.get("job.ahead", 0.0)
    return {
        "training": train + ahead,
        "saving": max(0.0, save - ahead),
        "publishing": max(0.0, job - train - save),
        "waiting": seconds.get("trainer_waits", 0.0),
        "loop's body": seconds.get("body", 0.0),
    }


def _set_limits(axis: Any, values: Sequence[float]) -> None:
    """Show zero where it is near, and a line that hardly changes as a flat one."""
    low, high = min(values), max(values)
    room = 0.1 * abs(high) or 1.0
    if 0 <= low <= high / 2:
        axis.set_ylim(bottom=0)
    elif high - low < room / 5:
        axis.set_ylim(low - room, high + room)


def _thin(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Return x and y; means of neighbours where there are more than `POINTS`."""
    size = -(-len(points) // POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [fmean(x for x, _ in part) for part in parts], [fmean(y for _, y in p) for p in parts]


def _steps_of(points: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """Return x and y of a staircase, with at most a few thousand of its stairs."""
    kept = points[:: max(1, len(points) // 4000)] + points[-1:]
    return [x for x, _ in kept], [y for _, y in kept]


# ---------------------------------------------------------------- page


def page(loop_dir: Path) -> str:
    """Return the page.

    Raises:
        ConfigError: matplotlib is not installed, or the loop has no trained step.
    """
    history = read(loop_dir / decisions.LOG)
    shown = body(loop_dir, history, Plots())
    return _PAGE.format(title=html.escape(str(loop_dir)), style=STYLE, body=shown)


def body(loop_dir: Path, history: History, plots: Plots) -> str:
    """Return what the page shows of a loop."""
    sections = [
        facts(history, loop_dir),
        *_timeline(plots, history),
        '<div class="grid">' + "".join(_figures(plots, history)) + "</div>",
        *_samples(loop_dir / samples.SAMPLES),
        "<h2>Settings</h2>",
        f"<details><summary>LoopConfig</summary><pre>{_said(history.config)}</pre></details>",
    ]
    return "\n".join(sections)


def _said(value: Any) -> str:
    return html.escape(json.dumps(value, indent=1))


def facts(history: History, loop_dir: Path) -> str:
    """Return the tiles, and what the loop's log says of itself."""
    checked = checker.check(decisions.read(loop_dir / decisions.LOG))
    recent = history.warm[-TIMELINE_STEPS:]
    balance = Balance.of(recent, max_staleness=history.config["max_staleness"])
    tiles = {
        "steps": str(len(history.steps)),
        "served version": f"@{history.versions[-1]}",
        "rollouts trained": f"{checked.trained:,}",
        "tokens trained": f"{checked.tokens:,}",
        "reward, last step": _number(history.steps[max(history.steps)].get("reward_mean")),
        "trainer waits": f"{balance.trainer_waits:.0%}" if recent else "",
        "sampler waits": f"{balance.sampler_waits:.0%}" if recent else "",
        "log's violations": str(len(checked.violations)),
    }
    cells = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in tiles.items()
    )
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(history.began_at))
    again = f", started {history.starts} times" if history.starts > 1 else ""
    said = (
        f"Balance of the last {len(recent)} steps: {balance.advice()}."
        if recent
        else "The balance shows from a start's second step on; the first one warms everything up."
    )
    lines = [f"Began {began}{again}. {said}", *_on_what(history.facts)]
    lines += checked.violations[:5]
    text = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f'<div class="tiles">{cells}</div>{text}'


def _on_what(known: Mapping[str, Any]) -> Iterable[str]:
    """Say what trained, on what."""
    if known:
        devices = [
            f"{role} on {' and '.join(f'{n} x {name}' for name, n in Counter(names).items())}"
            for role, names in known["devices"].items()
            if names
        ]
        commit = known["commit"] and f"at commit {known['commit']}"
        own = " ".join(filter(None, ("splice", known["splice"], commit)))
        parts = [f"model {known['model']}"] * bool(known["model"]) + devices
        yield "; ".join([*parts, own]) + "."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _timeline(plots: Plots, history: History) -> Iterable[str]:
    if not history.spans:
        return
    number = min(len(history.spans), TIMELINE_STEPS)
    yield (
        f"<h2>Both sides, last {number} steps</h2>"
        f'<figure><div class="wide">{plots.timeline(history)}</div><figcaption>'
        f'<i style="background:{_TRAINER}"></i> step on the trainer '
        f'<i style="background:{_PAUSE}"></i> pause of its publication, drawn at its end '
        f'<i style="background:{_SAMPLER}"></i> requests at vLLM</figcaption></figure>'
        "<h2>Steps</h2>"
    )


def _figures(plots: Plots, history: History) -> Iterable[str]:
    for name, values in history.notes.items():
        title = f"{name} (evaluation)"
        yield figure_of(title, plots.lines({name: values}, dots=True), verdict(title, values))
    for title, names in PLOTS.items():
        found = {
            name: {step: own[name] for step, own in history.steps.items() if name in own}
            for name in names
        }
        found = {name: values for name, values in found.items() if values}
        if found:
            said = verdict(title, next(iter(found.values())))
            yield figure_of(title, plots.lines(found), said)
    parts: dict[str, dict[int, float]] = {}
    for step, own in sorted(history.steps.items()):
        for name, value in own.items():
            if name.startswith(_PARTS):
                parts.setdefault(name.removeprefix(_PARTS), {})[step] = value
    for first in range(0, len(parts), len(_COLORS)):
        some = dict(list(parts.items())[first : first + len(_COLORS)])
        said = " ".join(f"{name}: {verdict('', values)}" for name, values in some.items())
        yield figure_of("Parts of the reward", plots.lines(some), said)
    if history.seconds:
        whole = {n: sum(phases_of(s).values()) for n, s in history.seconds.items()}
        said = verdict("", whole)
        yield figure_of("Time of a step (s)", plots.phases(history.seconds), said)
        if pauses := {n: s["job.pause"] for n, s in history.seconds.items() if "job.pause" in s}:
            said, drawn = verdict("", pauses), plots.lines({"pause": pauses})
            yield figure_of("Pause of generation (s)", drawn, said)


def figure_of(title: str, svg: str, said: str = "") -> str:
    """Return a plot with its title, and what is said of it."""
    caption = f"<figcaption>{html.escape(said)}</figcaption>" if said else ""
    return f"<figure><h3>{html.escape(title)}</h3>{svg}{caption}</figure>"


def _samples(folder: Path) -> Iterable[str]:
    steps = samples.steps_of(folder)
    for step in dict.fromkeys(steps[-1:] + steps[:1]):
        ranked = sorted(samples.read(folder, step), key=lambda s: -s["reward"])
        chosen = ranked[:SHOWN] + ranked[SHOWN:][-SHOWN:]
        yield f"<h2>Samples of step {step}: highest and lowest rewards</h2>"
        yield "".join(map(_sample, chosen))


def _sample(sample: dict[str, Any]) -> str:
    facts = " · ".join(f"{name} {value}" for name, value in browse.details_of(sample).items())
    prompt, answer = browse.text_of(sample["prompt"]), browse.answer_of(sample)
    return (
        f"<article><h4>{html.escape(facts)}</h4><pre>{html.escape(prompt)}</pre>"
        f'<pre class="answer">{html.escape(answer)}</pre></article>'
    )


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c232b; background: #f6f7f9; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 22px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 32px 0 8px; }
h3, h4 { font-size: 13px; margin: 0 0 4px; color: #4a5360; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(125px, 1fr)); gap: 10px; }
.tiles div, figure, article, details { background: #fff; border: 1px solid #e3e6ea;
  border-radius: 8px; padding: 10px 12px; }
.tiles b { display: block; font-size: 19px; }
.tiles span { color: #4a5360; font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr));
  gap: 12px; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
.wide svg { min-width: 760px; }
figcaption { font-size: 13px; color: #4a5360; }
figcaption i { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin: 0 2px 0 12px; }
article { margin: 0 0 10px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; color: #4a5360;
  font: 13px/1.45 ui-monospace, monospace; max-height: 22em; overflow: auto; }
.answer { color: #1c232b; font-weight: 600; border-top: 1px dashed #d5d9de; margin-top: 6px;
  padding-top: 6px; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>splice: {title}</title>
<style>
{style}</style>
</head>
<body><main>
<h1>{title}</h1>
{body}
</main></body>
</html>
"""
