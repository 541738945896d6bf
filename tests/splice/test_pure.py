"""Pure parts: batches, advantages, the proof's judge, preflight."""

from __future__ import annotations

import array
import io
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator.errors import ConfigError
from orchestrator.protocol.config import InferenceConfig, ParallelConfig, TrainerConfig
from orchestrator.publication.config import PublicationConfig
from splice.client.advantages import group_advantages
from splice.client.batches import Completion, grpo_batch
from splice.client.run_file import RunFile, build, set_value
from splice.cluster import preflight, up
from splice.cluster.roles import before_trainer
from splice.smoke import config as smoke_config
from splice.smoke.config import SmokeConfig, smoke_run
from splice.smoke.display import Display
from splice.smoke.proof import judge, judge_sensitivity
from splice.smoke.rollouts import mean_reward
from splice.smoke.served import max_difference


def test_batch_by_hand():
    one, two = (
        Completion(prompt_ids=(7, 8), answer_ids=ids, logprobs=logprobs, temperature=temperature)
        for ids, logprobs, temperature in (((1,), (-0.5,), 0.5), ((2, 3), (-1.0, -2.0), 2.0))
    )
    group = [(one, 1.0), (two, 0.0)]
    batch = grpo_batch([group])
    tokens, lengths, mask, advantages, logprobs, temperatures = batch.buffers
    assert array.array("i", tokens).tolist() == [7, 8, 1, 7, 8, 2, 3]
    assert array.array("i", lengths).tolist() == [3, 4]
    assert array.array("f", mask).tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert array.array("f", logprobs).tolist() == [0, 0, -0.5, 0, 0, -1.0, -2.0]
    assert array.array("f", advantages).tolist() == pytest.approx([0, 0, 1, 0, 0, -1, -1], abs=1e-5)
    assert array.array("f", temperatures).tolist() == [0.5, 2.0]
    assert mean_reward([group]) == 0.5 and [s.shape for s in batch.specs] == [
        (7,),
        (2,),
        (7,),
        (7,),
        (7,),
        (2,),
    ]
    assert group_advantages([1.0, 1.0]) == [0.0, 0.0]
    assert group_advantages([1.0, 0.8], divides_by_std=False) == pytest.approx([0.1, -0.1])


def test_max_difference_never_hides_a_bad_value():
    assert (
        max_difference([[0.0, -1.0]], [[9.0, -1.5]]) == 0.5
    )  # the first token of a sequence has no log-prob
    assert max_difference([[0.0, math.nan]], [[0.0, -1.0]]) == math.inf
    assert max_difference([[0.0, -1.0]], [[0.0]]) == math.inf
    assert max_difference([[0.0]], [[0.0]]) == math.inf  # nothing compared is not agreement


def test_the_judge_fails_what_it_must():
    reference = {"0": [[0.0, -1.0]], "1": [[0.0, -2.0]]}
    good = judge(tau=1e-4, served={0: [[0.0, -1.00001]], 1: [[0.0, -2.0]]}, reference=reference)
    assert good.failures == []
    stale = judge(tau=1e-4, served={0: [[0.0, -1.0]], 1: [[0.0, -1.0]]}, reference=reference)
    assert len(stale.failures) == 2
    judge_sensitivity(good, {"q": 1e-2, "norm": 1.5e-4}, sharp=True)
    assert len(good.failures) == 1 and "norm" in good.failures[0]
    empty = judge(tau=1e-4, served={0: [[0.0, -1.0]]}, reference=reference)
    judge_sensitivity(empty, {}, sharp=True)
    assert empty.failures


@pytest.fixture
def model(tmp_path):
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_experts": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": []})
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_preflight_names_what_is_wrong(model, tmp_path):
    assert preflight.check_model(model, needs_weights=True)["vocab_size"] == 10
    with pytest.raises(ConfigError, match="no model at"):
        preflight.check_model(tmp_path / "nowhere", needs_weights=True)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"trainer\.init = "):
        preflight.check_model(model, needs_weights=True)
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 10}}}))
    with pytest.raises(ConfigError, match="wrong tokenizer"):
        preflight.check_model(model, needs_weights=False)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        preflight.check_model(model, needs_weights=False)


@pytest.mark.parametrize(
    ("sizes", "tp", "says"),
    [
        ({"tensor": 3, "world_size": 3}, 1, "4 attention heads"),
        ({"tensor": 4, "world_size": 4}, 1, "2 key/value heads"),
        ({"pipeline": 4, "world_size": 4}, 1, "2 layers"),
        ({"expert": 3, "world_size": 3}, 1, "8 experts"),
        (
            {"expert_tensor": 3, "world_size": 3},
            1,
            r"parallel.expert_tensor = 3 does not divide the",
        ),
        ({}, 3, "inference tensor parallel size 3"),
    ],
)
def test_parallel_sizes_must_divide(model, sizes, tp, says):
    trainer = TrainerConfig(model=model, parallel=ParallelConfig(**sizes))
    inference = InferenceConfig(model=model, name="m", tensor_parallel=tp)
    with pytest.raises(ConfigError, match=says):
        preflight.check_parallel(
            preflight.read_model_config(model), trainer=trainer, inference=[inference]
        )


@pytest.mark.parametrize(
    ("options", "quantised", "says"),
    [
        ((), False, None),
        (("--kv-cache-dtype", "auto"), False, None),
        (("--quantization", "fp8_per_channel"), False, "--quantization fp8_per_channel needs"),
        (("--quantization=fp8",), False, "--quantization fp8 needs bfloat16"),
        (("--seed", "3", "--kv-cache-dtype", "fp8"), False, "--kv-cache-dtype fp8 needs"),
        ((), True, r"quantization_config in .*config\.json needs bfloat16"),
    ],
)
def test_quantised_weights_need_bfloat16(model, tmp_path, options, quantised, says):
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8"}} if quantised else {}
    (folder / "config.json").write_text(json.dumps(config))
    inference = InferenceConfig(model=folder, name="m", dtype="float32", extra_args=options)
    preflight.check_quantization(inference.model_copy(update={"dtype": "bfloat16"}))
    if says is None:
        preflight.check_quantization(inference)
        return
    with pytest.raises(ConfigError, match=says):
        preflight.check_quantization(inference)


@pytest.mark.parametrize(
    ("rope", "length", "options", "is_refused"),
    [
        ({}, "auto", (), False),
        ({}, 512, (), False),
        ({}, 513, (), True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 513, (), True),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 513, (), False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 513, (), False),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 513, (), False),
        ({}, 513, ("--hf-overrides", '{"max_position_embeddings": 1024}'), False),
        ({}, 513, ("--max-model-len", "128"), False),
        ({"model_max_length": 1024}, 513, (), False),
        ({"rope_scaling": [2.0]}, 513, (), False),
    ],
)
def test_sequences_fit_the_model(model, tmp_path, rope, length, options, is_refused):
    config = json.loads((model / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_scaling")}
    config |= {"max_position_embeddings": 512, **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    inference = InferenceConfig(model=tmp_path, name="m", max_model_len=length, extra_args=options)
    if not is_refused:
        preflight.check_length(inference)
        return
    with pytest.raises(ConfigError, match=r"max_model_len is 513, but .* at most 512"):
        preflight.check_length(inference)


def test_gpus_have_one_master():
    def check(trainer, inference, available, transport="nccl"):
        preflight.check_gpus(
            trainer_gpus=trainer,
            inference_gpus=inference,
            available=available,
            transport=transport,
        )

    check([0], [[1], [2, 3]], 4)
    check([0], [[0]], 1, "tcp")
    with pytest.raises(ConfigError, match="GPU 1 is assigned to trainer and to inference-0"):
        check([0, 1], [[1]], 2, "tcp")
    with pytest.raises(ConfigError, match="GPU 0 is assigned to trainer and to inference-0"):
        check([0], [[0]], 1)
    with pytest.raises(ConfigError, match="this host has 2"):
        check([0], [[2]], 2)


def test_a_port_in_use_is_found_before_anything_starts():
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(ConfigError, match="in use"):
            preflight.check_port_free("127.0.0.1", held.getsockname()[1])


def test_in_bf16_the_yardstick_is_what_rounding_alone_does():
    reference = {"0": [[0.0, -1.0, -1.0]], "1": [[0.0, -3.0, -3.0]]}
    rounded = {"0": [[0.0, -1.1, -0.9]], "1": [[0.0, -3.1, -2.9]]}
    served = {0: [[0.0, -1.15, -1.0]], 1: [[0.0, -2.9, -3.2]]}
    good = judge(tau=1e-4, served=served, reference=reference, rounded=rounded)
    assert good.failures == [] and good.versions[0].median_rounding_diff == pytest.approx(0.1)
    stale = judge(
        tau=1e-4, served={0: served[0], 1: served[0]}, reference=reference, rounded=rounded
    )
    assert len(stale.failures) == 2 and "came" in stale.failures[1]
    noisy = judge(tau=1e-4, served={0: [[0.0, -1.3, -1.3]]}, reference=reference, rounded=rounded)
    assert len(noisy.failures) == 1


@pytest.mark.parametrize(("size", "is_seen"), [(0.1, True), (0.02, False), (0, False)])
def test_in_bf16_versions_are_told_apart_below_the_rounding_of_a_token(size: float, is_seen: bool):
    rng = random.Random(0)

    def moved(table: list[list[float]], by: float) -> list[list[float]]:
        return [[0.0, *(x + rng.gauss(0, by) for x in table[0][1:])]]

    first = [[0.0, *(rng.uniform(-9, -1) for _ in range(300))]]
    second = moved(first, size)
    twice = [[2 * b - a for a, b in zip(first[0], second[0], strict=True)]]
    bad = [[0.0, math.nan, *second[0][2:]]]

    def failures(is_served: list[list[float]], rounded: list[list[float]]) -> str:
        proof = judge(
            tau=1e-4,
            served={0: moved(first, 0.1), 1: moved(is_served, 0.1)},
            reference={"0": first, "1": second},
            rounded={"0": moved(first, 0.1), "1": rounded},
        )
        return " ".join(proof.failures)

    found = [failures(table, moved(second, 0.1)) for table in (second, first, twice)]
    if is_seen:
        assert found[0] == "" and all("of the way" in text for text in found[1:])
    else:
        assert all("larger --lr" in text for text in found)
    assert "rounding explains only inf" in failures(second, bad)


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_interrupt_that_a_failing_clean_up_hides_is_found(
    interrupted: bool, tmp_path, monkeypatch
) -> None:
    """A run that was interrupted is not reported as failed, whatever fails while it is ended; one
    that only fails is.
    """
    from splice.smoke import run
    from splice.smoke.interrupts import Interrupts

    interrupts = Interrupts()

    class Cluster:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> object:
            interrupts.received = interrupted
            raise OSError("the socket is gone")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(run, "Cluster", Cluster)
    monkeypatch.setattr(run, "check", lambda _: {"vocab_size": 8})
    config = SmokeConfig(
        run=RunFile(name="m", model=tmp_path, run_dir=tmp_path / "run", trainer={}, inference={})
    )
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            run.run_smoke(config, console=Console(quiet=True), check_interrupts=interrupts.check)
    else:
        report = run.run_smoke(
            config, console=Console(quiet=True), check_interrupts=interrupts.check
        )
        assert not report.ok and report.failures == ["OSError: the socket is gone"]


def test_a_signal_is_remembered_where_its_exception_is_lost() -> None:
    """Python prints and forgets what a destructor raises; the next question finds it."""
    code = (
        "import os, signal\n"
        "from splice.smoke.interrupts import Interrupts\n"
        "interrupts = Interrupts()\n"
        "interrupts.install()\n"
        "interrupts.check()\n"
        "class Swallows:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(1000): pass\n"
        "Swallows()\n"
        "try:\n"
        "    interrupts.check()\n"
        "except KeyboardInterrupt:\n"
        "    raise SystemExit(130)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 130 and "Exception ignored" in ran.stderr, ran.stderr


def test_a_smoke_in_a_file_has_no_markup() -> None:
    log = io.StringIO()
    with Display(Console(file=log, width=130)) as display:
        display.phase("waiting for [bold]x")
        display.done("[bold]tiny@2[/bold] is served")
    waiting, served = log.getvalue().splitlines()
    assert waiting.endswith(" s waiting for [bold]x"), "what is no markup stays"
    assert served.endswith(" s tiny@2 is served") and "[" not in served


_TIMEOUTS = [name for name in PublicationConfig.model_fields if "timeout_s" in name]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, bad) for key in _TIMEOUTS for bad in ("0.0", "-5.0", "nan", "inf")),
        *(("attempts", "0"), ("full_every", "0"), ("shadow_bytes", "-1")),
        *(("drain_s", "500.0"), ("drain_s", "nan")),
        *(("transport", "udp"), ("pause_mode", "never"), ("mode", "behind")),
    ],
)
def test_a_bad_publication_setting_is_named(key: str, value: str) -> None:
    values: dict[str, Any] = {"name": "m", "model": "m", "trainer": {}, "inference": {}}
    set_value(values, f"publication.{key}={value}")
    with pytest.raises(ConfigError, match=rf"^run.toml: .*publication.*{key}"):
        build(values, source=Path("run.toml"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.parallel.tensor=x", "trainer.parallel.tensor"),
        ("trainer.gpus=x", "trainer.gpus"),
        ("inference.tensor_parallel=no", "inference.tensor_parallel"),
    ],
)
def test_a_smoke_on_gpus_names_what_is_wrong(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^smoke: .*{says}"):
        smoke_run(None, ("device=cuda", override), tiny=lambda: tmp_path)


def test_a_smoke_on_gpus_uses_the_first_ones(tmp_path: Path) -> None:
    overrides = ("device=cuda", "trainer.parallel.tensor=2", "inference.tensor_parallel=2")
    run = smoke_run(None, overrides, tiny=lambda: tmp_path)
    assert (run.trainer.gpus, run.inference.gpus) == ((0, 1), (2, 3))
    assert run.trainer.transport == run.inference.transport == run.publication.transport == "nccl"
    both = ("device=cuda", "trainer.gpus=[0]", "inference.gpus=[0]")
    shared = smoke_run(None, both, tiny=lambda: tmp_path)
    assert before_trainer(run) == [] and before_trainer(shared) == ["inference-0"]
    assert shared.publication.transport == "tcp" and shared.inference.gpu_memory_utilization == 0.4


def test_a_smoke_of_another_model_trains_and_serves_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'name = "m"\nmodel = "a"\nrun_dir = "r"\n[trainer]\n[inference]\nmodel = "b"\n'
    )
    run = smoke_run(tmp_path / "run.toml", (), model=tmp_path / "c", tiny=lambda: tmp_path)
    assert run.trainer.model == run.inference.model == tmp_path / "c"
    assert run.run_dir.is_relative_to(Path("runs/smoke").absolute())
    assert not run.inference.enforce_eager or run.device == "cpu", "the file's own settings"


def test_a_run_on_gpus_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "list_gpus", tuple)
    run = smoke_run(None, ("device=cuda",), tiny=lambda: tmp_path)
    for check in (up.check, lambda run: smoke_config.check(SmokeConfig(run=run))):
        with pytest.raises(ConfigError, match="NVML lists no GPU on this host"):
            check(run)
