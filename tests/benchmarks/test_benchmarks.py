"""Every benchmark that needs no cluster, small, through its command line: the file, the table, the
plot. No speed is asserted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
from rich.console import Console

from benchmarks import dashboard_picture, harness, memory, stream
from benchmarks.harness import Case, Result
from benchmarks.stock import packed_sizes
from benchmarks.suite import TASKS, Task, run_all

ROOT = Path(__file__).resolve().parents[2]
RESULT_KEYS = {"benchmark", "device", "commit", "packages", "cases"}
CASE_KEYS = {
    "name",
    "metric",
    "unit",
    "value",
    "samples",
    "peer",
    "peer_value",
    "peer_samples",
    "settings",
}
WITHOUT_PEER = {
    "tiny-dense/long/48",
    "tiny-dense/long/mixed",
    "control/empty-job-p99",
    "control/one-commit",
    "save/tiny/adapter",
}
SMALL = {
    "control": {"control/empty-job", "control/empty-job-p99", "control/one-commit"},
    "wire": {"wire/64KiB", "wire/1MiB", "wire/8MiB"},
    "edges": {"tiny/ep2-tp2"},
    "merge": {
        "merge/30b-a3b-experts",
        "merge/30b-a3b-experts-loop",
        "merge/tiny",
        "merge/tiny/host",
        "merge/tiny/fp8_per_block",
        "merge/tiny/send",
        "merge/tiny/send-fp8_per_tensor",
    },
    "experts": {"experts/products-128", "experts/mlp-128"},
    "export": {"export/tiny/wire", "export/tiny/manifest", "export/tiny/plan"},
    "arrival": {"arrival/16x2048"},
    "save": {"save/tiny/checkpoint", "save/tiny/adapter"},
    "long": {"tiny-dense/tree/4x8+32", "tiny-dense/long/48", "tiny-dense/long/mixed"},
    "logits": {"logits/chunked-256", "logits/default-256"},
    "fidelity": {"tiny/matrix/lr0.001/rank8/seed1/step2/stochastic"},
}


def benchmarks(*arguments, timeout=120):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", SMALL)
def test_runs_small_on_a_cpu(name, tmp_path):
    out, png = tmp_path / f"{name}-cpu.json", tmp_path / "plots" / f"{name}.png"
    code, table, errors = benchmarks(name, "--small", "--out", out, "--png", png)
    assert code == 0, errors[-3000:]
    raw = json.loads(out.read_text())
    assert set(raw) == RESULT_KEYS
    assert (
        raw["benchmark"] == name
        and raw["device"].startswith("cpu: ")
        and "torch" in raw["packages"]
    )
    assert SMALL[name] <= {c["name"] for c in raw["cases"]}
    for case in raw["cases"]:
        assert set(case) == CASE_KEYS
        assert case["samples"] and case["value"] == median(case["samples"]) and case["value"] > 0
        if case["peer"] is not None:
            assert case["peer_samples"] and case["peer_value"] == median(case["peer_samples"]) > 0
            assert f"{case['value'] / case['peer_value']:.3f}" in table
        assert case["name"] in table and case["metric"] in table
    assert any(c["peer"] for c in raw["cases"])
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000


def test_without_a_name_all_are_listed_with_a_line_each():
    _, text, _ = benchmarks("--help")
    for name in (
        "control",
        "wire",
        "export",
        "merge",
        "logits",
        "sync",
        "pause",
        "loop",
        "convergence",
        "learning",
        "compare",
        "plot",
        "show",
    ):
        rows = [line for line in text.splitlines() if line.strip("│ ").startswith(name)]
        assert len(rows) == 1 and len(rows[0].split()) > 5, (name, text)


# ------------------------------------------------------------ the harness


def result(*cases, benchmark="wire", commit="0123456789"):
    return Result(
        benchmark=benchmark, device="cpu: 2 cores", commit=commit, packages={}, cases=cases
    )


def case(name="a/b", metric="seconds", samples=(1.0, 3.0, 2.0), **more):
    return Case(name=name, metric=metric, unit="s", samples=samples, **more)


def printed(write, *arguments):
    text = StringIO()
    write(*arguments, Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([10, 10, 10], 20, [30]),  # 20 does not exceed 20: the third crosses and is included
        ([10, 10, 10], 19, [20, 10]),
        ([500, 10, 10], 100, [500, 20]),  # larger than a bucket
        ([10, 10], 19, [20]),  # the last one crosses: no empty bucket behind it
    ],
)
def test_stock_buckets_are_vllms(sizes, limit, expected):
    assert packed_sizes(sizes, limit) == expected


def test_a_file_comes_back_as_it_was(tmp_path):
    one = result(
        case(peer="stock", peer_samples=(4.0,), settings={"bytes": 7}),
        case(metric="requests", samples=(0.0,)),
    )
    one.write(tmp_path / "wire-cpu.json")
    assert harness.load(tmp_path / "wire-cpu.json") == one


def test_a_comparison_says_ratios_zeros_and_what_only_one_has():
    before = result(case(peer="p", peer_samples=(8.0,)), case("lost", samples=(0.0,)), case("gone"))
    after = result(
        case(samples=(1.0,), peer="p", peer_samples=(2.0,)),
        case("lost", samples=(0.0,)),
        case("new"),
    )
    text = printed(harness.print_comparison, before, after)
    row = next(line for line in text.splitlines() if "a/b" in line).split("│")
    assert [cell.strip() for cell in row[4:9]] == ["2", "1", "0.500", "0.250", "0.500"]
    assert "only before: gone seconds" in text and "only after: new seconds" in text
    assert next(line for line in text.splitlines() if "lost" in line).count("0") == 2


def test_results_of_two_benchmarks_are_not_compared():
    with pytest.raises(ValueError, match=r"'wire' and 'sync'.*compare two of one benchmark"):
        printed(harness.print_comparison, result(case()), result(case(), benchmark="sync"))


def test_two_cases_of_one_name_and_metric_are_refused():
    with pytest.raises(ValueError, match="a/b"):
        harness.make_result("wire", [case(), case()])


def test_committed_results_can_be_read_and_drawn(tmp_path):
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    results = [path for path in files if not path.name.startswith("smoke-")]
    assert len(results) >= 3
    for path in results:
        loaded = harness.load(path)
        kind = "train-long" if loaded.benchmark == "long" else loaded.benchmark
        assert path.name.startswith(kind + "-")
        assert printed(harness.print_table, loaded).count("\n") > len(loaded.cases)
    harness.plot(harness.load(results[-1]), tmp_path / "last.png")
    assert (tmp_path / "last.png").stat().st_size > 5000


def test_the_picture_of_the_dashboard(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("no chromium here: apt-get install chromium")
    dashboard_picture.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000


# ------------------------------------------------------------ the suite


def test_the_suite_puts_tasks_on_free_gpus_and_ends_what_is_late(tmp_path):
    def task(name, gpus, code, limit_s=20.0, **more):
        return Task(
            name=name, gpus=gpus, limit_s=limit_s, command=f"{{python}} -c '{code}'", **more
        )

    show = (
        'import os; print(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["SPLICE_BENCH_GPUS"])'
    )
    sleeps = f"time.sleep(60.{os.getpid()})"
    late = f'import subprocess, sys; subprocess.run([sys.executable, "-c", "import time; print(1, flush=True); {sleeps}"])'  # noqa: E501
    tasks = [
        task("pair", 2, show),
        task("numbers", 1, show, by_number=True),
        task("late", 1, late, limit_s=3.0),
        task("red", 1, "raise SystemExit(3)"),
        task("large", 4, show),
    ]
    began = time.monotonic()
    outcomes = run_all(
        tasks, gpus=[4, 5, 6], out=tmp_path, limit_s=60.0, console=Console(file=StringIO())
    )
    assert time.monotonic() - began < 45
    assert [o.said() for o in outcomes] == ["ok", "ok", "over its limit", "exit code 3", "not run"]
    assert (tmp_path / "pair.log").read_text().split() == ["4,5", "4,5"]
    assert (tmp_path / "numbers.log").read_text().split()[1] == "6" and outcomes[1].gpus == (6,)
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if sleeps in " ".join(p.info["cmdline"] or ())
    ]


def test_the_suite_runs_small_tasks_beside_each_other_and_large_ones_alone(tmp_path):
    def task(name, gpus, **more):
        stamp = "import time; print(time.monotonic()); time.sleep(5.0); print(time.monotonic())"
        return Task(name=name, gpus=gpus, limit_s=40.0, command=f"{{python}} -c '{stamp}'", **more)

    tasks = [
        task("a", 2, beside=True),
        task("b", 2, beside=True),
        task("c", 1, beside=True),
        task("alone", 1),
    ]
    outcomes = run_all(
        tasks, gpus=[0, 1], out=tmp_path, limit_s=60.0, console=Console(file=StringIO())
    )
    assert [o.said() for o in outcomes] == ["ok"] * 4
    times = {
        t.name: [float(word) for word in (tmp_path / f"{t.name}.log").read_text().split()]
        for t in tasks
    }
    assert max(times[name][0] for name in "abc") < min(times[name][1] for name in "abc"), times
    assert times["alone"][0] > min(times[name][1] for name in "abc"), times


def test_the_suites_commands_can_be_read():
    names = [task.name for task in TASKS]
    assert len(set(names)) == len(names)
    for task in TASKS:
        command = task.command.format(
            trainer=0, inference=1, out="out.json", python="python", inference_python="python"
        )
        words = command.removeprefix("sh -c '").split()
        assert (
            Path(words[words.index("pytest") + 3]).exists()
            if "pytest" in words
            else words[1] == "-m"
        ), command


def test_memory_of_another_process_is_seen():
    script = "import sys; sys.stdin.readline(); held = bytearray(64 << 20); print(len(held), flush=True); sys.stdin.readline()"  # noqa: E501
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        with memory.watched({"child": memory.process_tree(process.pid)}, poll_s=0.005) as peaks:
            process.stdin.write("go\n")
            process.stdin.flush()
            process.stdout.readline()
            time.sleep(1.0)
        process.stdin.close()
    assert 60 << 20 < peaks["child"].beyond < 80 << 20


# ------------------------------------------------------------ streams


def test_gaps_steps_and_rates_of_streams():
    steady = stream.Request(
        wanted=6, start_s=0.0, times_s=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], tokens=[1] * 6
    )
    paused = stream.Request(
        wanted=9, start_s=0.0, times_s=[1.5, 2.5, 5.0, 5.5], tokens=[1, 1, 2, 1]
    )
    ended = stream.Request(wanted=1, start_s=0.0, times_s=[0.5], tokens=[1])
    requests = [steady, paused, ended]
    assert stream.largest_gap_s(requests, start_s=3.0, end_s=4.0) == 2.5
    assert stream.largest_gap_s(requests, start_s=5.2, end_s=6.0) == 1.0
    assert stream.largest_gap_s([paused], start_s=5.2, end_s=5.4) == 0.5
    assert stream.largest_gap_within_s(requests, start_s=3.0, end_s=4.5) == 1.0
    assert stream.largest_gap_within_s(requests, start_s=4.5, end_s=5.5) == 2.5
    assert stream.step_s([steady], start_s=0.0, end_s=3.0) == 1.0
    assert stream.step_s([paused], start_s=2.0, end_s=5.5) == 3.0 / 3
    assert stream.tokens_per_s(requests, start_s=4.0, end_s=6.0) == (2 + 2 + 1) / 2.0


@pytest.mark.parametrize(
    ("request_", "lost"),
    [
        (stream.Request(wanted=2, start_s=0.0, tokens=[1, 1], ended=True), None),
        (stream.Request(wanted=2, start_s=0.0, tokens=[1], ended=False), None),
        (stream.Request(wanted=2, start_s=0.0, tokens=[1], ended=True), "1 of 2 tokens"),
        (
            stream.Request(wanted=2, start_s=0.0, ended=True, error="HTTP 503"),
            "HTTP 503, after 0 of 2 tokens",
        ),
    ],
)
def test_a_request_is_lost_with_an_error_or_without_all_its_tokens(request_, lost):
    assert request_.lost == lost


def test_what_was_handed_over_before_an_end_is_written(tmp_path, monkeypatch):
    """A benchmark that is killed, or fails, in its second case leaves the first one's result."""
    from benchmarks import wire
    from benchmarks.__main__ import app

    def run(*, device, small):
        yield case()
        raise RuntimeError("the second one")

    monkeypatch.setattr(wire, "run", run)
    with pytest.raises(RuntimeError, match="the second one"):
        app(["wire", "--out", str(tmp_path / "out.json")], standalone_mode=False)
    assert [c.name for c in harness.load(tmp_path / "out.json").cases] == [case().name]


def test_a_step_s_time_by_kinds_of_kernels():
    from benchmarks import kernel_profile

    assert kernel_profile.busy_us([(5, 9), (0, 2), (1, 4), (6, 7)]) == 8
    assert [
        kernel_profile.kind_of(n)
        for n in ("nvjet_sm90_tst", "cudnn_fprop", "_swiglu_backward_kernel", "x")
    ] == ["products", "attention", "experts' own", "other"]
    a = torch.randn(64, 64)
    table = kernel_profile.table_of(lambda: a @ a, "cpu")
    assert table.startswith("wall ") and "products" in table
