"""What `splice train` refuses before anything starts."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from orchestrator.errors import ConfigError
from splice.client.batches import Completion
from splice.client.run_file import load, load_as
from splice.train.command import Plan, plan, step_text
from splice.train.sections import TrainFile

ROWS = [{"question": "1 + 1", "answer": "2"}, {"question": "2 + 3", "answer": "5"}]
REWARDS = """
import asyncio

def right(row, completion):
    return float(row["answer"] in completion.text)

def brief(completions, **kwargs):
    return [1.0 - len(text) / 10 for text in completions]

async def judged(row, completion):
    await asyncio.sleep(0)
    return 0.5

def number(row, completion):
    return int(completion.text)

def parts(row, completion):
    return {"right": 1.0, "brief": None}

def nothing(row, completion):
    return {}

def other_column(row, completion):
    return row["solution"]

def endless(row, completion):
    return float("inf")
"""
FILE = """
name = "tiny"
model = "model"
[trainer]
[inference]
[data]
path = "rows.jsonl"
prompt = "{question} ="
[loop]
reward = "rewards.py:right"
groups_per_step = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(FILE)
    return tmp_path


def planned(folder: Path, *overrides: str) -> Plan:
    return plan(load_as(TrainFile, folder / "run.toml", overrides), folder)


def answer(text: str) -> Completion:
    return Completion(prompt_ids=(1,), answer_ids=(1,), logprobs=(0.0,), text=text)


def test_rows_become_prompts_and_steps_are_one_pass(folder: Path) -> None:
    made = planned(folder)
    assert [row["prompt"] for row in made.rows] == ["1 + 1 =", "2 + 3 ="]
    assert made.rows[0]["answer"] == "2" and made.steps == 1
    assert made.run.loss.name == "truncated_importance_sampling"
    assert made.reward is not None and made.reward(made.rows[0], answer("it is 2")) == 1.0


def test_passes_over_the_rows(folder: Path) -> None:
    assert planned(folder, "loop.passes=3").steps == 3
    assert planned(folder, "loop.passes=3", "loop.steps=2").steps == 2
    said = step_text(planned(folder, "sampling.max_tokens=100"))
    assert said == (
        "2 rows, 1 steps of 2 prompts with 8 answers each: 16 sequences in a step, with at most "
        "100 tokens in an answer, and 1,600 in a step"
    )


@pytest.mark.parametrize("reward", ["right", "brief", "judged"])
def test_an_answer_that_is_cut_off_costs(folder: Path, reward: str) -> None:
    plain = planned(folder, f"loop.reward=rewards.py:{reward}")
    made = planned(folder, f"loop.reward=rewards.py:{reward}", "loop.overlong_penalty=0.25")
    whole = asyncio.run(_of(plain))
    assert asyncio.run(_of(made)) == whole
    assert asyncio.run(_of(made, finish_reason="length")) == whole - 0.25


def test_a_run_without_training_reads_the_same_file(folder: Path) -> None:
    assert load(folder / "run.toml").name == "tiny"


def test_gae_gives_the_trainer_a_value_head(folder: Path) -> None:
    """Also in a run that is brought up by itself."""
    file, gae = folder / "run.toml", "loop.advantages=gae"
    assert not load(file).trainer.value_head and load(file, [gae]).trainer.value_head
    made = planned(folder, gae, "loss.value.lam=0.9", "optim.value_lr=0.5", "optim.lr=0.25")
    assert made.run.trainer.value_head and made.run.loss.value is not None
    assert made.run.loss.name == "truncated_importance_sampling" and made.run.loss.value.lam == 0.9
    assert (made.optim(1).lr, made.optim(1).value_lr) == (0.25, 0.5)
    half = planned(folder, gae, "optim.value_lr=0.5", "optim.schedule=linear", "loop.steps=2")
    assert half.optim(2).value_lr == pytest.approx(0.5 * half.optim(2).lr / half.optim(1).lr)
    assert planned(folder, gae).optim(1).value_lr is None
    with pytest.raises(ConfigError, match=r'loss\.value makes .*set loop\.advantages = "gae"'):
        planned(folder, "loss.value.lam=0.9")
    with pytest.raises(ConfigError, match=r"needs trainer\.value_head; leave that key out"):
        planned(folder, gae, "trainer.value_head=false")


def test_a_system_prompt_makes_a_chat(folder: Path) -> None:
    made = planned(folder, "data.system=Be brief.")
    assert made.rows[1] == ROWS[1] | {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 3 ="},
        ]
    }


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_other_files(folder: Path, suffix: str) -> None:
    path = folder / f"rows.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(ROWS))
    elif suffix == "csv":
        path.write_text("question,answer\n1 + 1,2\n2 + 3,5\n")
    else:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert planned(folder, f"data.path=rows.{suffix}").rows == planned(folder).rows


def test_text_that_spreadsheets_and_dumps_write(folder: Path) -> None:
    odd = [{"prompt": "a\u2028b"}, {"prompt": "two\nlines"}]
    (folder / "odd.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in odd))
    (folder / "odd.csv").write_text('\ufeffprompt\na\u2028b\n"two\nlines"\n')
    reward = "loop.reward=rewards.py:judged"
    for name in ("odd.jsonl", "odd.csv"):
        assert planned(folder, f"data.path={name}", "data.prompt={prompt}", reward).rows == odd


def test_files_that_are_no_rows(folder: Path) -> None:
    (folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt":\n')
    with pytest.raises(ConfigError, match=r"broken.jsonl, line 2, is not JSON"):
        planned(folder, "data.path=broken.jsonl")
    (folder / "other.csv").write_bytes(b"\xff\xfep")
    with pytest.raises(ConfigError, match=r"other.csv is not UTF-8 text"):
        planned(folder, "data.path=other.csv")


def test_a_penalty_runs_in_processes(folder: Path) -> None:
    made = planned(
        folder, 'loop={reward="rewards.py:right", overlong_penalty=0.5, reward_processes=2}'
    )
    copy = pickle.loads(pickle.dumps(made.reward))
    cut_off = replace(answer("2"), finish_reason="length")
    assert copy(made.rows[0], cut_off) == 0.5


def test_rows_of_a_function(folder: Path) -> None:
    (folder / "rewards.py").write_text(f"{REWARDS}\ndef rows(): return iter({ROWS})")
    assert planned(folder, "data.path=rewards.py:rows").rows == planned(folder).rows


def test_datasets_by_folder_and_split(folder: Path) -> None:
    made = datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)})
    made["test"].save_to_disk(folder / "saved")
    (folder / "hub").mkdir()
    made["test"].to_parquet(folder / "hub" / "test-00000.parquet")
    expected = planned(folder).rows
    assert planned(folder, "data.path=saved").rows == expected
    assert planned(folder, "data.path=hub", "data.split=test").rows == expected
    with pytest.raises(ConfigError, match=r"dataset hub .*split train.*cannot be loaded"):
        planned(folder, "data.path=hub")


async def _of(made: Plan, *, finish_reason: str = "stop") -> float:
    assert made.reward is not None
    given = made.reward(made.rows[0], replace(answer("2"), finish_reason=finish_reason))
    return float(given if isinstance(given, float) else await given)


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        ('"rewards.py:brief"', 0.9),
        ('{"rewards.py:right" = 1.0, "rewards.py:brief" = 0.5}', 1.45),
        ('{"rewards.py:right" = 1.0, "rewards.py:judged" = 2.0}', 2.0),
    ],
)
def test_rewards_of_trl_coroutines_and_sums(folder: Path, reward: str, value: float) -> None:
    assert asyncio.run(_of(planned(folder, f"loop.reward={reward}"))) == pytest.approx(value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=absent.jsonl", "cannot read .*absent.jsonl: No such file"),
        ("data.prompt={questoin}", r"row 1 does not fit prompt.*questoin.*'answer', 'question'"),
        ("data.path=rows.toml", "is no file of .jsonl.*datasets|cannot be loaded"),
        ("data.path=rewards.py:absent", "no such function"),
        ("data.path=rewards.py:right", "rewards.py:right gives no rows: TypeError"),
        ("data.pth=x", "data.pth.*did you mean.*path"),
        ("loop.reward=rewards.py", 'write "file.py:function"'),
        ("loop.reward=reward.py:right", "there is no file .*reward.py"),
        ("loop.reward=rewards.py:wright", "no such function; the module has .*right"),
        ("loop.reward=rewards.py:number", "first row and an empty answer: ValueError"),
        ("loop.reward=rewards.py:parts", "the reward's part 'brief' is None, which is no number"),
        ("loop.reward=rewards.py:nothing", "nothing: {} has no part, so it is no number"),
        (
            "loop.reward=rewards.py:other_column",
            r"for 'solution'; the row has .*'answer', 'prompt'",
        ),
        ('loop={reward="rewards.py:judged", reward_processes=2}', "a coroutine runs in the loop"),
        ("loop.dynamic_sampling=true", "number of prompts, such as 4"),
        ("loss.name=cross_entropy", "ignores rewards. Use `splice sft`"),
        ("loop.reward=rewards.py:endless", "gives inf for the first row"),
        ('loop.reward=["rewards.py:right", "rewards.py:brief"]', 'write reward = { "rewards.py:ri'),
        ("loop.learning_rate=1e-5", "loop.learning_rate.*optim"),
        ("reward=x", "reward: unknown key; did you mean loop.reward"),
        ("sampling.top_p=0.9", "has it as sampling.extra.top_p in run.toml"),
        ("loop.grup_size=4", "loop.grup_size.*did you mean.*group_size"),
        ("optim.schedule=cosin", "optim.schedule.*cosine"),
        ("sampling.max_new_tokens=4", "sampling.max_new_tokens.*max_tokens"),
        ("loss.name=gppo", "no loss .gppo.; did you mean"),
        ("sampling.max_tokens=512", "leave no room for a prompt: inference.max_model_len is 512"),
        ("evl.every=3", "evl.*did you mean.*eval"),
        ('loop={reward="rewards.py:right", overlong="mask", overlong_penalty=1.0}', "choose one"),
    ],
)
def test_mistakes_are_named(folder: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        planned(folder, override)


def test_a_file_without_training_says_what_it_lacks(folder: Path) -> None:
    (folder / "run.toml").write_text(FILE[: FILE.index("[data]")])
    with pytest.raises(ConfigError, match=r"data.*missing|data.*required"):
        planned(folder)


def test_a_reward_may_not_hide_a_module(folder: Path) -> None:
    (folder / "json.py").write_text(REWARDS)
    with pytest.raises(ConfigError, match=r"module name json belongs to .*rename the file"):
        planned(folder, "loop.reward=json.py:right")
