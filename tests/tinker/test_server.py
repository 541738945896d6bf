"""The server over a real orchestrator with fake nodes: order, replays, restarts, sessions, fuzz."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial

import httpx
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError, ErrorCode, JobFailed
from splice.tinker.endpoints import REFUSED, router
from splice.tinker.sampling import NotServed
from splice.tinker.server import api_key, check_address
from splice.tinker.wire import Samples
from tests.tinker.messages import TARGETS, datum, passing, sft
from tests.tinker.serving import KEY, fake_run, serving

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(tmp_path, monkeypatch):
    with fake_run(tmp_path, monkeypatch) as (run, trainer, _):
        run.fake_trainer = trainer
        yield run


def kinds(run) -> list[str]:
    """What the trainer did."""
    names = {"ForwardBackward", "OptimStep", "Forward", "SaveCheckpoint", "LoadCheckpoint"}
    return [kind for kind in run.fake_trainer.log if kind in names]


async def with_model(caller) -> None:
    await caller.new_session()
    await caller.new_model()


# ---------------------------------------------------------------- order and futures


def test_requests_run_in_the_order_of_their_numbers(run):
    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            done = len(kinds(run))
            step = await caller.step(3)
            second = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=2))
            await asyncio.sleep(0.3)
            assert len(kinds(run)) == done, "nothing runs before the first one"
            first = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
            for future in (first, second):
                assert isinstance(await caller.result(future), bytes)
            assert (await caller.result(step))["metrics"] == {"loss": 1.0}
            return kinds(run)[done:]

    assert asyncio.run(go()) == ["ForwardBackward"] * 2 + ["OptimStep"]


def test_a_repeated_request_is_the_first_one(run):
    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            weights = list(run.fake_trainer.weights)
            body = sft(model_id=caller.model, seq_id=1)
            packed = zstandard.ZstdCompressor().compress(body)
            first = await caller.post("forward_backward", body)
            again = await caller.post(
                "forward_backward", packed, headers={"content-encoding": "zstd"}
            )
            steps = [await caller.step(2) for _ in range(3)]
            assert first == again and steps[0] == steps[1] == steps[2]
            assert await caller.result(first) == await caller.result(again)
            await caller.result(steps[0])
            assert run.fake_trainer.weights == [w + 1 for w in weights], "one step, on one batch"
            other = {"adam_params": {"learning_rate": 0.5}, "model_id": caller.model, "seq_id": 2}
            assert "was another one" in await caller.refused("optim_step", other)
            late = sft(model_id=caller.model, seq_id=2)
            assert "was another one" in await caller.refused("forward_backward", late)

    asyncio.run(go())


def test_a_refused_request_takes_its_number(run):
    """The SDK continues with the next number."""

    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            future = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=3))
            for seq_id in (2, 1):
                for bad, why in (
                    (sft(model_id=caller.model, seq_id=seq_id, loss="dro"), "loss_fn 'dro'"),
                    (passing(NO_TOKENS, model_id=caller.model, seq_id=seq_id), "has no tokens"),
                ):
                    assert why in await caller.refused("forward_backward", bad)
            assert isinstance(await caller.result(future), bytes)

    asyncio.run(go())


def test_policy_losses_train_the_policy_at_the_servers_temperature(run, caplog):
    async def go():
        async with serving(run.dir, temperature=0.5) as caller:
            await with_model(caller)
            rl = {"logprobs": [0.0, 0.0, -1.0, -1.0], "advantages": [0.0, 0.0, 1.0, 1.0]}
            data = datum(target_tokens=TARGETS, **rl)
            named = []
            for seq_id, make in ((1, sft), (2, partial(passing, data, loss="ppo"))):
                body = make(model_id=caller.model, seq_id=seq_id)
                await caller.result(await caller.post("forward_backward", body))
                named.append([spec.name for spec in run.fake_trainer.messages[-1].tensors])
            assert "temperatures" not in named[0] and named[1][-1] == "temperatures"
            made = {"session_id": caller.session, "sampling_session_seq_id": 9, "base_model": "m"}
            sampler = (await caller.post("create_sampling_session", made))["sampling_session_id"]
            for seq_id, temperature in enumerate((0.5, 0.0, 1.0, 1.0)):
                params = {"max_tokens": 4, "temperature": temperature}
                body = {**SAMPLE, "sampling_session_id": sampler, "sampling_params": params}
                await caller.post("asample", {**body, "seq_id": seq_id})

    asyncio.run(go())
    said = [r.getMessage() for r in caplog.records if "--temperature" in r.getMessage()]
    assert (
        len(said) == 1
        and "at temperature 1.0, and policy losses train the policy at 0.5" in (said[0])
    )


def test_a_request_waits_for_an_earlier_one_only_so_long(run):
    async def go():
        async with serving(run.dir, gap_timeout_s=0.4) as caller:
            await with_model(caller)
            futures = [await caller.step(seq_id) for seq_id in (5, 7)]
            for result in [await caller.result(future) for future in futures]:
                assert result["category"] == "user" and "request 1 of" in result["error"]
            future = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=8))
            assert isinstance(await caller.result(future), bytes), "the model trains on"
            result = await caller.result(await caller.step(9))
            assert "request 1) was refused or failed" in result["error"]
            assert "is over" in await caller.refused(
                "forward_backward", sft(model_id=caller.model, seq_id=1)
            )

    asyncio.run(go())


def test_futures_survive_the_servers_restart(run):
    """A server that ends with requests in its lane leaves them to the next one; no job runs twice.

    The trainer is held in the first batch, so the first server sees no result at all.
    """

    async def first():
        async with serving(run.dir) as caller:
            await with_model(caller)
            held = run.fake_trainer.script
            held["ForwardBackward"] = lambda message: (time.sleep(1.5), make(message))
            make = run.fake_trainer.on_ForwardBackward
            done = len(kinds(run))
            futures = [
                await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1)),
                await caller.step(2),
            ]
            while "ForwardBackward" not in kinds(run)[done:]:
                await asyncio.sleep(0.02)
            caller.service.lane.cancel()
            return caller.session, caller.model, futures, done

    async def second(session, model, futures, done):
        async with serving(run.dir) as caller:
            assert isinstance(await caller.result(futures[0]), bytes)
            assert (await caller.result(futures[1]))["metrics"] == {"loss": 1.0}
            caller.session, caller.model = session, model
            assert await caller.step(2) == futures[1], "a replay after the restart is one too"
            await caller.post("session_heartbeat", {"session_id": session})
            gone = await caller.http.post(
                "/api/v1/retrieve_future", json={"request_id": f"{session}:sample:0:0"}
            )
            assert gone.status_code == 410, "the SDK samples again"
            return kinds(run)[done:]

    state = asyncio.run(first())
    assert asyncio.run(second(*state)) == ["ForwardBackward", "OptimStep"]


def test_a_slow_client_holds_up_nobody(run):
    """It polls for a result that takes long; another session's calls answer meanwhile."""

    async def go():
        async with serving(run.dir, poll_s=0.2) as caller:
            await with_model(caller)
            make = run.fake_trainer.on_ForwardBackward
            run.fake_trainer.script["ForwardBackward"] = lambda m: (time.sleep(1.5), make(m))
            future = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
            polls = [asyncio.ensure_future(caller.result(future)) for _ in range(20)]
            began = time.monotonic()
            for _ in range(10):
                await caller.new_session()
                await caller.post("session_heartbeat", {"session_id": caller.session})
            assert time.monotonic() - began < 1.0
            results = await asyncio.gather(*polls)
            assert len(set(results)) == 1 and isinstance(results[0], bytes)

    asyncio.run(go())


# ---------------------------------------------------------------- sessions and models


def test_one_model_at_a_time(run):
    async def go():
        async with serving(run.dir, session_timeout_s=1.0) as caller:
            await with_model(caller)
            first = caller.session
            future = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
            await caller.result(future)
            assert run.fake_trainer.pending == 1
            body = {"session_id": first, "model_seq_id": 1, "base_model": "m"}
            why = await caller.refused("create_model", body)
            assert "several models at once" in why and "not saved" in why

            second = await caller.new_session()
            body = {"session_id": second, "model_seq_id": 0, "base_model": "m"}
            asked = asyncio.ensure_future(caller.refused("create_model", body))
            await asyncio.sleep(0.4)
            await caller.post("session_heartbeat", {"session_id": first})
            assert f"session {first} trains" in await asked, "the first one lives"

            old = caller.model
            await caller.new_model()  # the first session sends no heartbeat any more
            assert run.fake_trainer.pending == 0, "a dead session's gradients are dropped"
            why = await caller.refused("forward_backward", sft(model_id=old, seq_id=2))
            assert "does not train any more: its session sent no heartbeat" in why
            assert isinstance(
                await caller.result(
                    await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
                ),
                bytes,
            )

    asyncio.run(go())


@pytest.mark.parametrize("how", ["refused", "failed", "forward only"])
def test_no_step_is_made_on_a_part_of_a_batch(run, how):
    """The SDK sends a batch in several passes, and the step before it has their answers."""

    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            weights = list(run.fake_trainer.weights)
            bad = sft(model_id=caller.model, seq_id=2)
            if how == "failed":
                run.fake_trainer.script["ForwardBackward"] = lambda m: run.fake_trainer.refuse(
                    m, code=ErrorCode.BAD_INPUT
                )
            else:
                only = how == "forward only"
                bad = passing(NO_TOKENS, model_id=caller.model, seq_id=2, forward_only=only)
            if how == "failed":
                second = await caller.post("forward_backward", bad)
                first = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
                assert (await caller.result(first))["category"] == "user"
                assert isinstance(await caller.result(second), bytes)
            else:
                assert "no tokens" in await caller.refused("forward_backward", bad)
                first = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
                assert isinstance(await caller.result(first), bytes)
            result = await caller.result(await caller.step(3))
            if how == "forward only":
                assert result["metrics"], "it leaves no gradients"
                return
            assert result["category"] == "user" and "send the whole batch again" in result["error"]
            assert run.fake_trainer.weights == weights and run.fake_trainer.pending == 0
            again = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=4))
            await caller.result(again)
            assert (await caller.result(await caller.step(5)))["metrics"]
            assert run.fake_trainer.weights != weights

    asyncio.run(go())


def test_one_server_for_a_run(run):
    async def go():
        async with serving(run.dir):
            with pytest.raises(ConfigError, match="another `splice tinker` serves the run"):
                async with serving(run.dir):
                    pass

    asyncio.run(go())


def test_a_server_that_was_away_ends_no_model(run):
    """It has missed heartbeats; the session gets its time again."""

    async def go():
        async with serving(run.dir, session_timeout_s=3.0) as caller:
            await with_model(caller)
            first, model = caller.session, caller.model
        await asyncio.sleep(3.2)
        async with serving(run.dir, session_timeout_s=3.0) as caller:
            body = {"session_id": await caller.new_session(), "model_seq_id": 0, "base_model": "m"}
            asked = asyncio.ensure_future(caller.refused("create_model", body))
            await asyncio.sleep(0.3)
            await caller.post("session_heartbeat", {"session_id": first})
            assert f"session {first} trains" in await asked
            assert caller.service.books.model(model)["ended"] is None

    asyncio.run(go())


def test_a_step_of_the_clock_ends_no_model(run, monkeypatch):
    async def go():
        async with serving(run.dir, session_timeout_s=1.0) as caller:
            await with_model(caller)
            first, now = caller.session, time.time
            monkeypatch.setattr(time, "time", lambda: now() + 3600)
            body = {"session_id": await caller.new_session(), "model_seq_id": 0, "base_model": "m"}
            asked = asyncio.ensure_future(caller.refused("create_model", body))
            await asyncio.sleep(0.3)
            await caller.post("session_heartbeat", {"session_id": first})
            assert f"session {first} trains" in await asked

    asyncio.run(go())


def test_folders_of_checkpoints_go_when_nothing_needs_them(run):
    """Neither a replaced one nor the newest, which a restarted trainer loads, is left or missed."""

    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)

            def folders() -> int:
                return len(list((run.dir / "tinker").glob("tinker-*")))

            async def save(seq_id: int, name: str):
                body = {"model_id": caller.model, "path": name, "seq_id": seq_id}
                return await caller.post("save_weights", {**body, "overwrite": seq_id < 4})

            for seq_id in (1, 2, 3):
                future = await save(seq_id, "latest")
                path = (await caller.result(future))["path"]
                assert folders() == 1
            assert await save(3, "latest") == future, "a repeated request has the same future"
            where = path.removeprefix("tinker://").replace("/weights/", "/checkpoints/weights/")
            assert (await caller.http.delete(f"/api/v1/training_runs/{where}")).status_code == 204
            assert folders() == 1, "the trainer may need it"
            await caller.result(await save(4, "other"))
            assert folders() == 1
            ttl = {"model_id": caller.model, "path": "x", "seq_id": 5, "ttl_seconds": 10**18}
            assert "ttl_seconds" in await caller.refused("save_weights", ttl)

    asyncio.run(go())


def test_a_repeated_create_model_is_one_model(run):
    async def go():
        async with serving(run.dir, session_timeout_s=1.0) as caller:
            await with_model(caller)
            body = {"session_id": await caller.new_session(), "model_seq_id": 0, "base_model": "m"}
            one, two = await asyncio.gather(*(caller.post("create_model", body) for _ in "12"))
            assert one == two and (await caller.result(one))["model_id"] == one["model_id"]
            assert caller.service.books.open_model()["model_id"] == one["model_id"]

    asyncio.run(go())


def test_a_sample_that_fails_says_so_once(run, monkeypatch):
    async def go():
        async with serving(run.dir) as caller:
            await caller.new_session()
            body = {"session_id": caller.session, "sampling_session_seq_id": 0, "base_model": "m"}
            sampler = (await caller.post("create_sampling_session", body))["sampling_session_id"]
            sampling = caller.service.sampling

            async def fails(*_, **__):
                raise KeyError("x")

            async def is_gone(*_, **__):
                raise NotServed("gone")

            async def scored(_):
                return Samples(sequences=())

            monkeypatch.setattr(sampling, "_completions", fails)
            body = {**SAMPLE, "sampling_session_id": sampler}
            result = await caller.result(await caller.post("asample", body))
            assert result["category"] == "server" and "a defect of the server" in result["error"]
            for name, value in (("temperature", float("nan")), ("max_tokens", 0)):
                bad = {**body, "seq_id": 2, "sampling_params": {"max_tokens": 1, name: value}}
                assert name in await caller.refused("asample", json.dumps(bad).encode())

            monkeypatch.setattr(sampling, "_completions", is_gone)
            monkeypatch.setattr(sampling, "_score_base", scored)
            body = {**body, "seq_id": 3, "prompt_logprobs": True}
            assert isinstance(await caller.result(await caller.post("asample", body)), bytes)

    asyncio.run(go())


@pytest.mark.parametrize("how", ["defect", "lost"])
def test_a_step_that_fails_ends_no_server_and_no_version_passes_for_it(run, how, monkeypatch):
    """Nobody knows what the trainer holds then, so a sampler gets a new version."""

    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            served = caller.service.books.fact("served")["version"]
            await caller.result(
                await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
            )

            def fails(*_):
                if how == "defect":
                    raise KeyError("x")
                lost = {"code": "work_lost", "node": "orchestrator", "phase": "job"}
                raise JobFailed(**lost, message="the trainer was restarted", remedy="none")

            with monkeypatch.context() as patch:
                patch.setattr(caller.service.training._jobs, "step", fails)
                result = await caller.result(await caller.step(2))
            assert result["category"] == "server"
            assert ("a defect of" if how == "defect" else "load_state") in result["error"]
            assert caller.service.books.fact("pending") is (how == "defect")
            body = {"model_id": caller.model, "sampling_session_seq_id": 0, "seq_id": 3}
            await caller.result(await caller.post("save_weights_for_sampler", body))
            assert caller.service.books.fact("served")["version"] == served + 1

    asyncio.run(go())


def test_a_finished_session_and_an_unloaded_model_train_no_more(run):
    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            await caller.post("unload_model", {"model_id": caller.model})
            body = {"adam_params": {}, "model_id": caller.model, "seq_id": 1}
            assert "it was unloaded" in await caller.refused("optim_step", body)
            await caller.new_model(1)
            reason = {"reason": {"type": "success"}, "detail": None}
            await caller.post(f"sessions/{caller.session}/finish", reason, code=204)
            gone = await caller.http.post(
                "/api/v1/session_heartbeat", json={"session_id": caller.session}
            )
            assert gone.status_code == 410, "the SDK ends its heartbeat"

    asyncio.run(go())


def test_states_and_snapshots(run):
    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            body = {"model_id": caller.model, "path": "a", "seq_id": 1}
            path = (await caller.result(await caller.post("save_weights", body)))["path"]
            assert path == f"tinker://{caller.model}/weights/a"
            assert "exists; pass overwrite" in await caller.refused(
                "save_weights", {**body, "seq_id": 2}
            )
            served = [caller.service.books.fact("served")["version"]]
            for seq_id, name in ((3, "x"), (4, "y")):
                body = {"model_id": caller.model, "path": name, "seq_id": seq_id}
                found = await caller.result(await caller.post("save_weights_for_sampler", body))
                assert found["path"].endswith(f"/sampler_weights/{name}")
                served.append(caller.service.books.fact("served")["version"])
            assert served == [0, 0, 0], "a state that is served is not published again"
            future = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=5))
            await caller.result(future)
            await caller.result(await caller.step(6))
            body = {"model_id": caller.model, "sampling_session_seq_id": 0, "seq_id": 7}
            made = await caller.result(await caller.post("save_weights_for_sampler", body))
            sampler = caller.service.books.sampler(made["sampling_session_id"])
            assert (sampler["kind"], sampler["version"]) == ("snapshot", 1)
            load = {"model_id": caller.model, "path": found["path"], "optimizer": True, "seq_id": 8}
            assert "holds no trainer state" in await caller.refused("load_weights", load)
            load = {**load, "path": path, "seq_id": 9}
            await caller.result(await caller.post("load_weights", load))
            listed = await caller.http.get(f"/api/v1/training_runs/{caller.model}/checkpoints")
            ids = {c["checkpoint_id"] for c in listed.json()["checkpoints"]}
            assert ids == {"weights/a", "sampler_weights/x", "sampler_weights/y"}
            where = f"/api/v1/training_runs/{caller.model}/checkpoints/weights/a"
            assert (
                await caller.http.put(f"{where}/ttl", json={"ttl_seconds": 1})
            ).status_code == 204
            assert (await caller.http.delete(where)).status_code == 204
            assert "no checkpoint" in await caller.refused("load_weights", load)

    asyncio.run(go())


def test_a_model_chooses_its_adapter(run):
    """Another rank is a job; a checkpoint of it comes back with it, and into no other model."""

    async def go():
        async with serving(run.dir) as caller:
            await caller.new_session()
            body = {"session_id": caller.session, "model_seq_id": 0, "base_model": "m"}
            lora = {"rank": 7, "train_mlp": False, "seed": 3}
            made = await caller.post("create_model", {**body, "lora_config": lora})
            await caller.result(made)
            asked = run.fake_trainer.messages[-1]
            assert (asked.rank, asked.alpha, asked.seed) == (7, 16.0, 3)
            assert asked.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
            save = {"model_id": made["model_id"], "path": "a", "seq_id": 1}
            path = (await caller.result(await caller.post("save_weights", save)))["path"]
            info = await caller.post("weights_info", {"tinker_path": path})
            assert (info["lora_rank"], info["train_attn"], info["train_mlp"]) == (7, True, False)

            await caller.new_model(1)  # rank 4, the run's
            assert (await caller.post("get_info", {"model_id": caller.model}))["lora_rank"] == 4
            assert run.fake_trainer.log[-1] == "LoadCheckpoint", "the first state has that adapter"
            load = {"model_id": caller.model, "path": path, "optimizer": True, "seq_id": 1}
            why = await caller.refused("load_weights", load)
            assert "rank 7 on q_proj, k_proj, v_proj, o_proj" in why and "of rank 4" in why
            body = {"session_id": caller.session, "model_seq_id": 2, "path": path}
            run.fake_trainer.script["LoadAdapter"] = lambda m: run.fake_trainer.link.complete(
                m.request_id, result={}
            )
            again = await caller.post("load_weights", {**body, "optimizer": False})
            assert (await caller.result(again))["path"] == path
            assert run.fake_trainer.log[-2:] == ["NewAdapter", "LoadAdapter"]
            run.fake_trainer.script["NewAdapter"] = lambda m: run.fake_trainer.refuse(
                m, code=ErrorCode.BAD_INPUT
            )
            body = {"session_id": caller.session, "model_seq_id": 3, "base_model": "m"}
            bad = await caller.post("create_model", {**body, "lora_config": {"rank": 9}})
            assert (await caller.result(bad))["category"] == "user"
            step = {"adam_params": {}, "model_id": bad["model_id"], "seq_id": 1}
            assert "it was not made" in await caller.refused("optim_step", step)

    asyncio.run(go())


# ---------------------------------------------------------------- refusals


def test_a_key_is_needed(run):
    async def go():
        async with serving(run.dir) as caller:
            for headers in ({}, {"x-api-key": "tml-other"}, {"x-api-key": ""}):
                http = httpx.AsyncClient(transport=caller.http._transport, base_url="http://t")
                answer = await http.post("/api/v1/create_session", json={}, headers=headers)
                assert answer.status_code == 401 and "API key" in answer.json()["detail"]
                assert (await http.get("/api/v1/healthz")).json() == {"status": "ok"}

    asyncio.run(go())


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path, monkeypatch):
    key, is_own = api_key(tmp_path)
    assert key.startswith("tml-") and len(key) > 40 and not is_own
    assert api_key(tmp_path) == (key, False)
    assert (tmp_path / "tinker" / "api_key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("SPLICE_TINKER_API_KEY", "tml-mine")
    assert api_key(tmp_path) == ("tml-mine", True)


def test_only_loopback_without_a_key_of_ones_own():
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, has_own_key=False)
    for host in ("0.0.0.0", "::", "10.1.2.3", "tinker.example.com"):
        with pytest.raises(ConfigError, match="SPLICE_TINKER_API_KEY"):
            check_address(host, has_own_key=False)
        check_address(host, has_own_key=True)


NO_TOKENS = datum([], target_tokens=np.zeros(0, "i8"), weights=np.zeros(0, "f4"))
CREATE = {"model_seq_id": 7, "base_model": "m"}
SAMPLE = {
    "sampling_session_id": "nobody:sample:0",
    "seq_id": 0,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "sampling_params": {"max_tokens": 1},
}
REFUSALS = {
    "unknown session": ("session_heartbeat", {"session_id": "x"}, "no session 'x'"),
    "unknown session's model": ("create_model", {**CREATE, "session_id": "x"}, "no session 'x'"),
    "unknown model": ("optim_step", {"adam_params": {}, "model_id": "x", "seq_id": 1}, "no model"),
    "unknown sampler": ("asample", SAMPLE, "no sampler 'nobody:sample:0'"),
    "unknown checkpoint": (
        "load_weights",
        {"path": "tinker://x/weights/y", "optimizer": True},
        "no checkpoint",
    ),
    "unknown future": ("retrieve_future", {"request_id": "x"}, "no future 'x'"),
    "another base model": (
        "create_model",
        {**CREATE, "session_id": "x", "base_model": "Qwen/Qwen3-8B"},
        "base_model 'Qwen/Qwen3-8B': this run has m",
    ),
    "no linears": (
        "create_model",
        {
            **CREATE,
            "session_id": "x",
            "lora_config": {"rank": 32, "train_attn": False, "train_mlp": False},
        },
        "train_attn and train_mlp are false",
    ),
    "rank 0": (
        "create_model",
        {**CREATE, "session_id": "x", "lora_config": {"rank": 0}},
        "lora_config: rank is 0: input should be greater than or equal to 1",
    ),
    "a seed": (
        "create_model",
        {**CREATE, "session_id": "x", "lora_config": {"rank": 4, "seed": 2**70}},
        "must fit into 64 bits",
    ),
    "another optimizer": (
        "create_model",
        {**CREATE, "session_id": "x", "optimizer_config": {"type": "dimuon", "version": 1}},
        "'dimuon' is not supported; use adamw",
    ),
    "an image in a prompt": (
        "asample",
        {
            **SAMPLE,
            "prompt": {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]},
        },
        "the prompt has a chunk of image",
    ),
    "alternatives": ("asample", {**SAMPLE, "prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k"),
    "no JSON": ("create_session", b"{", "the body"),
    "an unknown field": ("session_heartbeat", {"session_id": "x", "more": 1}, "more"),
    "a list": ("weights_info", b"[]", "no JSON object"),
}


def test_what_is_refused_harms_nothing(run):
    async def go():
        async with serving(run.dir, max_body_bytes=2**16) as caller:
            await with_model(caller)
            for what, (path, body, why) in REFUSALS.items():
                assert why in await caller.refused(path, body), what
            for path in ("../../etc", "", "a/b", "a" * 200, "..", "-x"):
                body = {"model_id": caller.model, "path": path, "seq_id": 1}
                why = await caller.refused("save_weights", body)
                assert "checkpoint name" in why or "is over" in why
                body["sampling_session_seq_id"] = None
                assert await caller.refused("save_weights_for_sampler", body)
            for rate in (0.0, -1.0):
                body = {"adam_params": {"learning_rate": rate}, "model_id": caller.model}
                why = await caller.refused("optim_step", {**body, "seq_id": 1})
                assert "learning_rate" in why
            assert "more than 65,536 bytes" in await caller.refused("create_session", bytes(2**17))
            future = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=2))
            assert isinstance(await caller.result(future), bytes)

    asyncio.run(go())


def test_a_body_that_trickles_is_cut_off(run):
    async def drip():
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    async def go():
        async with serving(run.dir, body_timeout_s=0.3) as caller:
            answer = await caller.http.post("/api/v1/create_session", content=drip())
            assert answer.status_code == 408

    asyncio.run(go())


POSTS = sorted(
    route.path.removeprefix("/api/v1/")
    for route in router.routes
    if "POST" in route.methods and "{" not in route.path
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["session_id", "model_id", "seq_id", "path", "type", "prompt", "request_id", "x"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


def test_whatever_is_sent_gets_an_answer(run):
    """Random JSON, random bytes, and messages with bytes changed: no 5xx, and the run continues."""
    valid = sft(model_id="m", seq_id=1)

    async def go():
        async with serving(run.dir) as caller:
            await with_model(caller)
            loop = asyncio.get_running_loop()

            async def send(path, body, headers):
                answer = await caller.http.post(f"/api/v1/{path}", content=body, headers=headers)
                assert answer.status_code < 500, (path, body, answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["detail"]

            def both(path, body, headers=None):
                asyncio.run_coroutine_threadsafe(send(path, body, headers or {}), loop).result(30)

            options = {
                "max_examples": 150,
                "deadline": None,
                "derandomize": True,
                "suppress_health_check": list(HealthCheck),
            }

            @settings(**options)
            @given(st.sampled_from(POSTS), JSON)
            def random_json(path, body):
                both(path, json.dumps(body).encode())

            @settings(**options)
            @given(st.sampled_from(POSTS), st.binary(max_size=200))
            def random_bytes(path, body):
                both(path, body)

            @settings(**options)
            @given(st.integers(0, len(valid) - 1), st.binary(min_size=1, max_size=4), st.booleans())
            def changed(at, put, packs):
                body = valid[:at] + put + valid[at + len(put) :]
                if not packs:
                    both("forward_backward", body)
                    return
                packed = zstandard.ZstdCompressor().compress(body)
                cut = packed[: max(1, at % len(packed))]
                both("forward_backward", cut, {"content-encoding": "zstd"})

            for fuzz in (random_json, random_bytes, changed):
                await asyncio.to_thread(fuzz)
            future = await caller.post("forward_backward", sft(model_id=caller.model, seq_id=1))
            assert isinstance(await caller.result(future), bytes)

    asyncio.run(go())


def test_endpoints_that_are_refused_say_so(run):
    async def go():
        async with serving(run.dir) as caller:
            for (method, path), what in REFUSED.items():
                url = path.replace("{checkpoint_id:path}", "weights/a").format(
                    session_id="s", model_id="m"
                )
                answer = await caller.http.request(method, f"/api/v1{url}")
                assert answer.status_code == 422 and what in answer.json()["detail"], path
            assert caller.http.headers["x-api-key"] == KEY

    asyncio.run(go())
