"""The server on a real orchestrator with fake nodes, spoken to over its HTTP interface.

Real nodes are in test_sdk.py.
"""

from __future__ import annotations

import contextlib
import json

import httpx

from splice.tinker.config import TinkerConfig
from splice.tinker.server import make_app
from splice.tinker.service import running
from tests.orchestrator.run import TOKEN, Run

KEY = "tml-test"


@contextlib.contextmanager
def fake_run(tmp_path, monkeypatch):
    """A run whose trainer counts; yields (run, trainer, replica)."""
    monkeypatch.setenv("SPLICE_RUN_TOKEN", TOKEN)
    with Run(tmp_path) as run:
        trainer = run.trainer()
        replica = run.replica(trainer)
        settings = {"model": "/models/tiny", "lora": {"rank": 4}}
        (run.dir / "trainer.json").write_text(json.dumps(settings))
        yield run, trainer, replica


class Caller:
    """Calls the server's endpoints."""

    def __init__(self, service, http: httpx.AsyncClient) -> None:
        self.service, self.http, self.session, self.model = service, http, "", ""

    async def post(self, path: str, body=None, *, code: int = 200, **more):
        """The answer's JSON, which must have this status."""
        given = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        answer = await self.http.post(f"/api/v1/{path}", **given, **more)
        assert answer.status_code == code, answer.text
        return answer.json() if answer.content else None

    async def refused(self, path: str, body=None, **more) -> str:
        """Why it is refused, with a 4xx."""
        given = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        answer = await self.http.post(f"/api/v1/{path}", **given, **more)
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
        return answer.json()["detail"]

    async def new_session(self) -> str:
        """Its own session for the calls that follow."""
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        self.session = (await self.post("create_session", body))["session_id"]
        return self.session

    async def new_model(self, number: int = 0) -> str:
        """A model in this session."""
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "m"}
        body["lora_config"] = {"rank": 4}
        made = await self.post("create_model", body)
        self.model = made["model_id"]
        assert (await self.result(made))["model_id"] == self.model
        return self.model

    async def step(self, seq_id: int, **more):
        """Submit an optimizer step."""
        adam = {"learning_rate": 0.1}
        body = {"adam_params": adam, "model_id": self.model, "seq_id": seq_id, **more}
        return await self.post("optim_step", body)

    async def result(self, future):
        """A future's result: JSON, or the bytes of a protobuf message."""
        while True:
            answer = await self.http.post(
                "/api/v1/retrieve_future", json={"request_id": future["request_id"]}
            )
            assert answer.status_code == 200, answer.text
            if "protobuf" in answer.headers["content-type"]:
                return answer.content
            if answer.json().get("type") != "try_again":
                return answer.json()


@contextlib.asynccontextmanager
async def serving(run_dir, **settings):
    """A server of the run, as one process's life."""
    config = TinkerConfig(run_dir=run_dir, api_key=KEY, **{"poll_s": 2.0, **settings})
    async with running(config) as service:
        transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
        headers = {"x-api-key": KEY}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://tinker", headers=headers, timeout=60
        ) as http:
            yield Caller(service, http)
        assert service.lane.cancelled() or not service.lane.done(), "the training lane failed"
