"""run.toml: one file for all roles, with mistakes that are named, and sizes that fit."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.errors import ConfigError
from orchestrator.processes.restarts import EXIT_CONFIG
from splice import cli, run_cli
from splice.cli import app
from splice.client.clients import SpliceClient
from splice.client.run_file import RunFile, load
from splice.cluster import Cluster, machine, up
from splice.cluster.doctor import Gpu
from splice.reference import markdown
from tests import forked
from tests.forked import Forked
from tests.orchestrator.fake_nodes import soon
from tests.orchestrator.run import TOKEN
from tests.orchestrator.serving import REPO, endpoint_in

SMALL = """
name = "tiny"
model = "model"
[trainer]
[inference]
"""
GIB = 2**30


def written(folder: Path, text: str = SMALL) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("overrides", "has_router"),
    [
        ([], False),
        (["inference.replicas=2"], True),
        (["inference.replicas=2", "router.enabled=false"], False),
        (["router.enabled=true"], True),
    ],
)
def test_several_replicas_have_a_router_unless_one_says_otherwise(tmp_path, overrides, has_router):
    assert load(written(tmp_path), overrides).has_router == has_router


def test_roles_take_what_they_share_from_the_top(tmp_path):
    overrides = ["trainer.seed=7", "publication.mode=shadow", "device=cuda"]
    overrides += ["inference.gpus=[2, 3, 4, 5]", "inference.replicas=2"]
    overrides += ["inference.tensor_parallel=2", "inference.port=8000"]
    run = load(written(tmp_path), overrides)
    assert run.model == run.trainer.model == tmp_path / "model", "relative to the file"
    assert run.run_dir == tmp_path / "run"
    trainer, second = run.trainer_config(), run.inference_config(1)
    assert (trainer.seed, trainer.device, trainer.transport) == (7, "cuda", "nccl")
    assert (second.name, second.gpus, second.port) == ("tiny", (4, 5), 8001)
    orchestrator = run.orchestrator_config(run_token="t", resume=False)
    assert (orchestrator.replicas, orchestrator.publication.mode) == (2, "shadow")
    assert orchestrator.publication.transport == "nccl"
    with pytest.raises(ConfigError, match="inference node 2 is not one of the 2"):
        run.inference_config(2)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("cpu", "float32", "tcp", 512, 64, True)),
        (["device=cuda", "inference.gpus=[1]"], ("cuda", "bfloat16", "nccl", "auto", 256, False)),
        (
            ["trainer.gpus=[0]", "inference.gpus=[1]", "dtype=float32"],
            ("cuda", "float32", "nccl", "auto", 256, False),
        ),
        (
            ["inference.gpus=[1]", "inference.max_model_len=99", "inference.enforce_eager=true"],
            ("cuda", "bfloat16", "nccl", 99, 256, True),
        ),
    ],
)
def test_defaults_are_the_devices(overrides, expected, tmp_path):
    """A file that says nothing on them, with the GPUs of the machine in it or not."""
    run = load(written(tmp_path), overrides)
    trainer, inference = run.trainer_config(), run.inference_config(0)
    for node in (run, trainer, inference):
        assert (node.device, node.dtype) == expected[:2]
    assert trainer.transport == inference.transport == expected[2]
    chosen = (inference.max_model_len, inference.max_num_seqs, inference.enforce_eager)
    assert chosen == expected[3:]


@pytest.mark.parametrize("table", ["publication", "trainer"])
def test_the_rounding_is_one_for_both_tables(table, tmp_path):
    run = load(written(tmp_path), [f"{table}.rounding=nearest"])
    assert run.publication.rounding == run.trainer_config().rounding == "nearest"
    assert load(written(tmp_path)).trainer_config().rounding == "stochastic"
    with pytest.raises(ConfigError, match=r"give only publication\.rounding"):
        load(written(tmp_path), ["trainer.rounding=stochastic", "publication.rounding=nearest"])
    with pytest.raises(ConfigError, match="publication"):
        load(written(tmp_path), ["publication=rounding"])


@pytest.mark.parametrize("table", ["publication", "trainer", "inference"])
def test_one_transport_is_enough(table, tmp_path):
    overrides = ["device=cuda", "inference.gpus=[1]", f"{table}.transport=tcp"]
    run = load(written(tmp_path), overrides)
    assert {t.transport for t in (run.publication, run.trainer, run.inference)} == {"tcp"}
    with pytest.raises(ConfigError, match=r"give only trainer\.transport"):
        load(written(tmp_path), ["trainer.transport=tcp", "publication.transport=nccl"])


def test_a_cluster_reads_what_it_writes_whatever_the_paths(tmp_path, monkeypatch):
    """Relative ones are relative to the working folder, not to the run's."""
    monkeypatch.chdir(tmp_path)
    given = RunFile(name="m", model=Path("m"), run_dir=Path("runs/x"), trainer={}, inference={})
    cluster = Cluster(given)
    cluster.file.parent.mkdir(parents=True)
    cluster.file.write_text(cluster.run.model_dump_json())
    assert load(cluster.file) == cluster.run
    assert cluster.run.run_dir == tmp_path / "runs/x" and cluster.run.model == tmp_path / "m"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_shown_reads_back(device, tmp_path):
    run = load(written(tmp_path), [] if device == "cpu" else ["inference.gpus=[1]"])
    shown = tmp_path / "shown.json"
    shown.write_text(run.model_dump_json())
    assert load(shown) == run


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.lora.rnk=4", "trainer.lora.rnk: unknown key; did you mean 'rank'? Known keys: "),
        ("publication.mode=shadw", "publication.mode: got 'shadw'; allowed: in_place, shadow; did"),
        ("inference.port=70000", "inference.port: should be less than or equal to 65535"),
        ("trainer.host='0.0.0.0'", "trainer.host: 0.0.0.0 means all of this host's addresses"),
        (
            "publication.attempts=0",
            "publication.attempts: should be greater than or",
        ),
        (
            "publication.transfer_timeout_s=-5",
            "publication.transfer_timeout_s: should be",
        ),
        ("publication.drain_s=500", "publication: drain_s is 500.0; it must be from 0 to 75"),
        (
            "publication.full_every=0",
            "publication.full_every: should be greater than or",
        ),
        (
            "publication.shadow_bytes=-1",
            "publication.shadow_bytes: should be greater than or",
        ),
        ("orchestrator.keep_versions=1", "orchestrator.keep_versions: 1 is too few; keep 2 (the"),
        ("publicaton.mode=shadow", "publicaton: unknown key; did you mean 'publication'?"),
        ("name=a@b", "name: 'a@b' cannot be the served name"),
        ("device=cuda", "inference.gpus has 0 GPUs; 1 replicas of tensor_parallel 1 need 1"),
    ],
)
def test_a_mistake_names_file_key_and_the_nearest_right_one(override, said, tmp_path):
    path = written(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(path, [override])
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and said in text
    assert "pydantic" not in text and "http" not in text


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="`splice init DIR` makes one"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"run.toml cannot be read: .*line 1"):
        load(written(tmp_path, "name = \n"))
    for override in ("trainer", "=3", "name.x=3"):
        with pytest.raises(ConfigError, match="--set"):
            load(written(tmp_path), [override])


def test_the_schema_describes_every_table():
    schema = RunFile.model_json_schema()
    assert {"orchestrator", "publication", "trainer", "inference"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


def test_the_page_of_all_keys_is_the_models():
    page = (REPO / "docs/configuration.md").read_text()
    assert page == markdown(), "run `python -m splice.reference > docs/configuration.md`"
    assert page.count("|  |") == 0, "a key without a meaning"


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("gigabytes", "num_gpus", "chosen"),
    [
        (16, 1, ((0,), (0,), 1, 1)),  # shared, to try splice
        (16, 2, ((0,), (1,), 1, 1)),  # 8B on two H200s
        (16, 4, ((0, 1), (2, 3), 1, 1)),
        (90, 8, ((0, 1, 2, 3), (4, 5, 6, 7), 2, 2)),
    ],
)
def test_sizes_fit_the_gpus(gigabytes, num_gpus, chosen):
    config = {"num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = machine.choose_sizes(
        config, weight_bytes=gigabytes * GIB, gpus=range(num_gpus), memory_bytes=140 * GIB
    )
    assert chosen == (
        sizes.trainer_gpus, sizes.inference_gpus, sizes.trainer_tensor, sizes.inference_tensor,
    )  # fmt: skip  # one row


def test_a_mistake_that_all_roles_share_is_said_once(tmp_path):
    path = written(tmp_path, SMALL.replace('model = "model"', 'dtype = "bf16"'))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path}: model: missing; this key must be set; {path}: dtype: got 'bf16'; allowed: "
        "float32, bfloat16; did you mean 'bfloat16'?"
    )


def test_what_fits_no_gpus_is_refused():
    config = {"num_attention_heads": 32, "num_key_value_heads": 8}
    with pytest.raises(ConfigError, match="do not fit twice on one GPU"):
        machine.choose_sizes(config, weight_bytes=60 * GIB, gpus=[0], memory_bytes=140 * GIB)
    with pytest.raises(ConfigError, match="do not fit 1 GPUs of 150 GB for the trainer"):
        machine.choose_sizes(config, weight_bytes=200 * GIB, gpus=[0, 1], memory_bytes=140 * GIB)


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_the_written_file_is_one(num_gpus, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    own = {"num_attention_heads": 4, "max_position_embeddings": 40960}
    config = {"text_config": own} if num_gpus else own  # as models that see have it
    (model / "config.json").write_text(json.dumps(config))
    gpus = [
        Gpu(index=i, name="NVIDIA H200", memory_mib=143771, driver="d") for i in range(num_gpus)
    ]
    path, said = machine.write_run_file(
        tmp_path / "mine",
        model=model,
        name='a"b',
        gpus=gpus,
        trainer_python=Path(sys.executable),
        inference_python=Path(sys.executable),
    )
    run = load(path)
    assert run.name == 'a"b' and run.model == model
    chosen = (
        ("cpu", "float32", "tcp", (), (), 512, True),
        ("cuda", "bfloat16", "tcp", (0,), (0,), "auto", False),
        ("cuda", "bfloat16", "nccl", (0,), (1,), "auto", False),
    )
    assert chosen[num_gpus] == (
        run.device, run.dtype, run.trainer.transport, run.trainer.gpus, run.inference.gpus,
        run.inference.max_model_len, run.inference.enforce_eager,
    )  # fmt: skip  # one row
    assert run.inference.transport == run.trainer.transport
    assert ("GPUs [0]" in said) is (num_gpus == 2) and ("share GPU 0" in said) is (num_gpus == 1)


def test_init_writes_nothing_that_it_refuses(tmp_path):
    """A name that no alias can have, and a model of which the file's own check says no."""
    argv = ["init", str(tmp_path / "mine"), "--gpus", "", "--inference-python", sys.executable]
    argv += ["--name", "Qwen/Tiny", "--model", "Qwen/Tiny-1B"]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == EXIT_CONFIG, done.output
    assert "--name: 'Qwen/Tiny' cannot be the served name" in " ".join(done.output.split())
    assert not (tmp_path / "mine").exists(), "not even a download was tried"

    (tmp_path / "model").mkdir()
    config = {"vocab_size": 8, "num_attention_heads": 2, "max_position_embeddings": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, [*argv[:6], "--model", str(tmp_path / "model")])
    assert done.exit_code == EXIT_CONFIG and "max_model_len" in done.output, done.output
    assert not (tmp_path / "mine" / "run.toml").exists()


def test_init_on_a_login_node_asks_for_the_jobs_gpus(tmp_path, monkeypatch):
    """A host that reaches Slurm, without a GPU: the file is not one for its CPU, unless it is asked
    for. A host that has Slurm's programs and no cluster is an ordinary one."""
    for folder, code in (("bin", 0), ("no_cluster", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sinfo").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / folder / "sinfo").chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    config = {"vocab_size": 8, "num_attention_heads": 8, "max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(run_cli, "list_gpus", lambda: ())
    monkeypatch.setenv("PATH", str(tmp_path / "no_cluster"))
    argv = ["init", str(tmp_path / "a"), "--model", str(model)]
    argv += ["--inference-python", sys.executable]

    def said(*more: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*argv, *more])
        assert done.exit_code == code, done.output
        return " ".join(done.output.split())

    assert "next: splice up" in said(), "a host of which nothing is known"
    assert load(tmp_path / "a").device == "cpu"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    argv[1] = str(tmp_path / "b")
    assert "such as --job-gpus 16x80; for this host's CPU, --gpus ''" in said(code=EXIT_CONFIG)
    assert "got '16'" in said("--job-gpus", "16", code=EXIT_CONFIG)
    assert "choose one" in said("--job-gpus", "16x80", "--gpus", "0", code=EXIT_CONFIG)
    assert not (tmp_path / "b").exists()
    file = tmp_path / "b" / "run.toml"
    assert f"next: splice up {file} --on slurm" in said("--job-gpus", "16x80")
    run = load(file)
    assert run.trainer.gpus == tuple(range(8)) and run.inference.gpus == tuple(range(8, 16))
    assert run.device == "cuda" and run.trainer.parallel.world_size == 8
    argv[1] = str(tmp_path / "c")
    said("--gpus", "")
    assert load(tmp_path / "c").device == "cpu"


def test_weights_that_nobody_reads_are_refused_before_a_start(tmp_path):
    path = written(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "pytorch_model-00001-of-00002.bin").touch()
    says = r"has its weights in pytorch_model-00001-of-00002\.bin, and splice reads \*\.safetens"
    with pytest.raises(ConfigError, match=says):
        up.check(load(path))


# ---------------------------------------------------------------- logs


def test_logs_are_followed(tmp_path):
    """The last lines of each role first, then what comes; a role's own logs without a prefix."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (tmp_path / "endpoint").touch()
    for name in ("trainer", "inference-0", "inference-0.vllm"):
        (folder / f"{name}.log").write_text(f"{name} 1\n{name} 2\n")
    done = forked.run("logs", "inference", "--run", tmp_path, "-n", "1")
    assert done.stdout == (
        "inference-0      | inference-0 2\ninference-0.vllm | inference-0.vllm 2\n"
    )
    done = forked.run("logs", tmp_path, "-n", "1")
    assert len(done.stdout.splitlines()) == 3, "a run in the place of a role: all roles"
    out = tmp_path / "out"
    process = Forked("logs", "trainer", "--run", tmp_path, "-n", "0", "-f", out=out)
    try:

        def has_come() -> bool:
            with (folder / "trainer.log").open("a") as log:
                log.write("new\nhal")
                log.flush()
                time.sleep(0.3)
                log.write("f\n")
            return out.exists() and "new\nhalf\n" in out.read_text()

        assert soon(has_come, 60)
        assert "trainer 2" not in out.read_text()
    finally:
        process.kill()
        process.wait(10)
    assert set(out.read_text().split("\n")) == {"new", "half", ""}
    done = forked.run("logs", "trainr", "--run", tmp_path)
    assert done.returncode == EXIT_CONFIG and "there are inference-0, trainer" in done.stderr


# ---------------------------------------------------------------- on this host


@pytest.mark.parametrize("endpoint", ["localhost", "tcp://127.0.0.1:x", "tcp://0.0.0.0:401"])
def test_an_endpoint_that_cannot_be_bound_is_found_by_the_check(endpoint, tmp_path):
    path = written(tmp_path)
    for command in (("config", "check"), ("up",)):
        override = f"orchestrator.endpoint={endpoint}"
        done = CliRunner().invoke(app, [*command, str(path), "--set", override])
        assert done.exit_code == EXIT_CONFIG and endpoint in done.output
        assert "tcp://HOST:PORT" in done.output or "beyond loopback" in done.output


def test_up_prints_the_command_that_stops_this_run(tmp_path, monkeypatch):
    """Also where `--set` gave it a folder that the file does not name."""
    state = {"base_urls": ["http://a"], "replica_urls": ["http://a"]}
    monkeypatch.setattr(up, "start", lambda run, **_: 1)
    monkeypatch.setattr(up, "wait_until_up", lambda *_, **__: state)
    other = tmp_path / "an other"
    other.mkdir()
    (other / "endpoint").write_text("tcp://127.0.0.1:1")
    argv = ["up", str(written(tmp_path)), "--set", f"run_dir={other.name}"]
    printed = CliRunner().invoke(app, argv).stdout
    _, command = printed.rstrip().split("end the run: ")
    stopped = []
    monkeypatch.setattr(up, "stop", lambda run_dir: stopped.append(run_dir) or True)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0 and stopped == [other]


# ---------------------------------------------------------------- roles on several hosts


def splice(*arguments: object, err: object = os.devnull, **environment: str) -> Forked:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPLICE_")}
    return Forked(*arguments, env=inherited | environment, err=str(err))


STUB = """#!/bin/sh
echo "$SPLICE_RUN_TOKEN $@" > {out}
"""


def with_a_stub(folder):
    """A run file whose interpreter is a stub; the file, the stub, and where it writes."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    stub, out = folder / "python", folder / "out"
    stub.write_text(STUB.format(out=out))
    stub.chmod(0o755)
    return written(folder, SMALL + f"python = '{stub}'\n"), stub, out


def test_a_node_starts_again_on_a_full_disk(tmp_path):
    """Its configuration is there. The limit on a file's size stands for the disk."""
    code = (
        "import resource, sys; from pathlib import Path; from splice.client.run_file import load, "
        "node_file\n"
        "run = load(Path(sys.argv[1]))\n"
        "first = node_file(run, 'inference-0', 'text')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "assert node_file(run, 'inference-0', 'text').read_text() == 'text'\n"
    )
    subprocess.run([sys.executable, "-c", code, str(written(tmp_path))], check=True, timeout=60)


def test_every_role_reads_the_same_file(tmp_path):
    """The orchestrator makes the token. Nodes find it, and the endpoint, in the run's folder."""
    path, stub, out = with_a_stub(tmp_path)
    server = splice("serve", path)
    trainer = None
    try:
        endpoint = endpoint_in(tmp_path / "run")
        token_file = tmp_path / "run" / "token"
        token = token_file.read_text()
        assert token_file.stat().st_mode & 0o777 == 0o600 and len(token) == 32
        assert splice("inference", path).wait(60) == 0
        arguments = out.read_text().split()
        assert arguments[:5] == [token, "-P", "-m", "inference_node", "--endpoint"]
        assert arguments[5] == endpoint
        config = json.loads(Path(arguments[-1]).read_text())
        assert (config["name"], config["model"]) == ("tiny", str(tmp_path / "model"))
        trainer = splice("trainer", path, "--set", f"trainer.python={stub}", "--no-template")
        with SpliceClient.of_run(tmp_path) as client:  # the folder of run.toml does as well
            with pytest.raises(ConfigError, match="serves no version yet"):
                client.base_url()
            states = lambda: {n.node_id: n.host for n in client.status().nodes}  # noqa: E731
            assert soon(lambda: "trainer-launcher-0" in states(), 60)
            client.stop_run()
        assert server.wait(20) == 0
    finally:
        for process in (server, trainer):
            if process is not None:
                process.kill()
                process.wait(10)


def test_two_variables_serve_a_host_without_the_folder(tmp_path):
    path, _, out = with_a_stub(tmp_path)
    told = {"SPLICE_ENDPOINT": "tcp://head:401", "SPLICE_RUN_TOKEN": TOKEN}
    assert splice("inference", path, **told).wait(60) == 0
    assert out.read_text().split()[0] == TOKEN and "tcp://head:401" in out.read_text()
    assert splice("inference", path, err=tmp_path / "err").wait(60) == EXIT_CONFIG
    assert "start the orchestrator first" in (tmp_path / "err").read_text()


def test_a_hub_id_and_the_name_of_a_command_are_no_paths(tmp_path):
    """Hosts of the trainer download the one; a container finds the other."""
    overrides = ["trainer.model=org/name", "trainer.python=python", "inference.python=./python"]
    run = load(written(tmp_path), overrides)
    assert str(run.trainer.model) == "org/name" and str(run.trainer.python) == "python"
    assert run.inference.python == tmp_path / "python"
    (tmp_path / "org/name").mkdir(parents=True)
    assert load(written(tmp_path), overrides).trainer.model == tmp_path / "org/name"


def test_as_many_ranks_as_the_sizes_need(tmp_path):
    overrides = ["trainer.parallel.tensor=2", "trainer.parallel.pipeline=2"]
    run = load(written(tmp_path), [*overrides, "trainer.parallel.expert=4"])
    assert run.trainer.parallel.world_size == 8


def test_the_trainers_gpus_are_the_files_and_not_the_shells(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SPLICE_ENDPOINT", "tcp://head:401")
    monkeypatch.setenv("SPLICE_RUN_TOKEN", TOKEN)
    seen = {}
    monkeypatch.setattr(cli, "log_to_stderr", lambda: None)
    monkeypatch.setattr(cli.trainer_host, "run", lambda *_, **__: seen.update(os.environ) or 0)
    overrides = ("device=cuda", "trainer.gpus=[2, 3]", "inference.gpus=[0]")
    overrides += ("trainer.parallel.tensor=2",)
    words = [word for override in overrides for word in ("--set", override)]
    done = CliRunner().invoke(app, ["trainer", str(written(tmp_path)), *words])
    assert done.exit_code == 0, done.output
    assert seen["CUDA_VISIBLE_DEVICES"] == "2,3" and seen["OMP_NUM_THREADS"] == "1"
