"""The endpoints of Tinker's SDK. `tinker.types` of the SDK are the requests' schemas."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ValidationError
from tinker import types

from splice.tinker import adapters, losses
from splice.tinker.books import json_result
from splice.tinker.checks import check_name, check_ttl
from splice.tinker.refused import Refused, malformed, unsupported
from splice.tinker.service import Service, checkpoint_of, new_session_id
from splice.tinker.training import optim_params
from splice.tinker.wire import decompressed, parsed_pass, read_pass

log = logging.getLogger("splice.tinker")
router = APIRouter(prefix="/api/v1")


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Here = Annotated[Service, Depends(_service)]
Json = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)
Row = TypeVar("Row")


def parsed(model: type[Model], body: bytes) -> Model:
    """Return the request's body as one of the SDK's types.

    Raises:
        Refused: names the first wrong field.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise malformed(f"{where}: {first['msg']}") from error


# ---------------------------------------------------------------- what only Tinker has

REFUSED: dict[tuple[str, str], str] = {
    ("POST", "/retrieve_futures"): "one poll for all samples; `client/config` turns it off",
    ("POST", "/join_sampling_session"): "numbers for copies of a sampler; `client/config` turns it "
    "off",
    ("POST", "/create_custom_loss"): "losses that run on the server; the SDK runs them itself "
    "(forward_backward_custom)",
    ("POST", "/save_weights_external"): "an export for other servers; use `splice` (export_hf)",
    ("GET", "/training_runs/{model_id}/checkpoints/{checkpoint_id:path}/external_weights_urls"): (
        "downloads of weights; the run's folder has them"
    ),
    ("POST", "/training_runs/{model_id}/checkpoints/{checkpoint_id:path}/publish"): (
        "public checkpoints"
    ),
    ("DELETE", "/training_runs/{model_id}/checkpoints/{checkpoint_id:path}/publish"): (
        "public checkpoints"
    ),
    ("POST", "/copy_weights"): "copies between projects",
    ("PUT", "/sessions/{session_id}/project"): "projects",
    ("POST", "/sessions/search"): "search; GET /api/v1/sessions lists them",
    ("GET", "/sessions/{session_id}/trace_export"): "traces",
    ("POST", "/auth/token"): "tokens in place of the API key",
    ("GET", "/audit"): "an audit log",
    ("GET", "/billing/usage/events"): "bills",
    ("GET", "/billing/usage/checkpoints/current"): "bills",
}
"""Endpoints of the SDK that this server refuses by name, and what they are."""


def _refusal(path: str, what: str) -> Any:
    async def refuse() -> Json:
        raise unsupported(f"{path} is not supported: {what}")

    return refuse


# Before the others, because a checkpoint's id may end in anything.
for (_method, _path), _what in REFUSED.items():
    router.add_api_route(_path, _refusal(_path, _what), methods=[_method])


# ---------------------------------------------------------------- the service


@router.get("/healthz")
async def healthz() -> Json:
    """Answer without a key."""
    return {"status": "ok"}


@router.post("/client/config")
async def client_config() -> Json:
    """How the SDK cuts batches: one job of the orchestrator holds many data."""
    return {
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        "fwdbwd_max_chunk_len": 4096,
        "fwdbwd_max_chunk_bytes_count": 2**24,
    }


@router.post("/client/dynamic_config")
async def dynamic_config() -> Json:
    """Cancelled samples end at vLLM too."""
    return {"sample_cancel_enabled": True}


@router.post("/telemetry")
async def telemetry() -> Json:
    """Accept and drop what the SDK tells about itself."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities")
async def capabilities(here: Here) -> Json:
    """The one model, under each of its names."""
    facts = {
        "max_context_length": await here.sampling.context_length(),
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [{"model_name": name, **facts} for name in here.base_models]}


# ---------------------------------------------------------------- sessions


@router.post("/create_session")
async def create_session(request: Request, here: Here) -> Json:
    """Make a session."""
    asked = parsed(types.CreateSessionRequest, await request.body())
    session_id = new_session_id()
    facts = {"user_metadata": asked.user_metadata, "display_name": asked.display_name}
    here.books.add_session(session_id, facts)
    log.info("session %s begins", session_id)
    return {"type": "create_session", "session_id": session_id}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, here: Here) -> Json:
    """Note that a session's client lives."""
    here.books.see(parsed(types.SessionHeartbeatRequest, await request.body()).session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, request: Request, here: Here) -> Response:
    """End a session and its model."""
    asked = await _object(request)
    reason = asked.get("reason")
    why = str(reason.get("type")) if isinstance(reason, dict) else "ended"
    here.books.finish(session_id, why)
    log.info("session %s has finished (%s)", session_id, why)
    return Response(status_code=204)


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, here: Here) -> Json:
    """A session's models and samplers."""
    session = here.books.session(session_id)
    models = [m["model_id"] for m in here.books.models() if m["session_id"] == session_id]
    samplers = here.books.samplers_of(session_id)
    return {"training_run_ids": models, "sampler_ids": samplers, **session["facts"]}


@router.get("/sessions")
async def list_sessions(here: Here, limit: int = 20, offset: int = 0) -> Json:
    """The ids of all sessions, newest first."""
    found = [session["session_id"] for session in here.books.sessions()]
    return {"sessions": _page(found, limit, offset)}


# ---------------------------------------------------------------- models


@router.post("/create_model")
async def create_model(request: Request, here: Here) -> Json:
    """Start from the run's first state."""
    body = await request.body()
    asked = parsed(types.CreateModelRequest, body)
    here.check_base_model(asked.base_model)
    found = here.checks.check_model(asked.lora_config, asked.optimizer_config.type)
    for text in found["warnings"]:
        log.warning("%s", text)
    facts = {
        "base_model": asked.base_model,
        "user_metadata": asked.user_metadata,
        **found,
    }
    model_id = await here.new_model(asked.session_id, asked.model_seq_id, facts)
    request_id = here.accept("create_model", model_id, 0, body, first=0)
    return {"request_id": request_id, "model_id": model_id}


@router.post("/get_info")
async def get_info(request: Request, here: Here) -> Json:
    """What a model is."""
    model = here.books.model(parsed(types.GetInfoRequest, await request.body()).model_id)
    name = model["facts"]["base_model"]
    return {
        "type": "get_info",
        "model_id": model["model_id"],
        "is_lora": here.lora_of(model) is not None,
        "lora_rank": adapters.info(here.lora_of(model))["lora_rank"],
        "model_name": name,
        "model_data": {"model_name": name, "tokenizer_id": str(here.trainer.model)},
    }


@router.post("/unload_model")
async def unload_model(request: Request, here: Here) -> Json:
    """End a model; another one may then train."""
    model_id = parsed(types.UnloadModelRequest, await request.body()).model_id
    here.books.model(model_id)
    here.books.end_model(model_id, "it was unloaded")
    return {"type": "unload_model", "model_id": model_id}


# ---------------------------------------------------------------- training


@router.post("/forward_backward")
async def forward_backward(request: Request, here: Here) -> Json:
    """Log-probs, and gradients unless `forward_only`."""
    encoding, limit = request.headers.get("content-encoding", ""), here.config.max_body_bytes
    sent = await request.body()
    # A large batch takes a while, which must not hold up other clients.
    body = await asyncio.to_thread(decompressed, sent, encoding=encoding, max_bytes=limit)
    message = await asyncio.to_thread(parsed_pass, body)
    # What is wrong with all passes of a batch leaves no part of it.
    is_part = not message.forward_only and message.loss_fn in losses.INPUTS
    with here.numbered(message.model_id, message.seq_id, is_part=is_part):
        await asyncio.to_thread(lambda: losses.plan(read_pass(message)))
        return _future(here.accept("forward_backward", message.model_id, message.seq_id, body))


@router.post("/optim_step")
async def optim_step(request: Request, here: Here) -> Json:
    """One AdamW step."""
    body = await request.body()
    asked = parsed(types.OptimStepRequest, body)
    with here.numbered(asked.model_id, asked.seq_id):
        optim_params(asked.optim_params)
        return _future(here.accept("optim_step", asked.model_id, asked.seq_id, body))


@router.post("/save_weights")
async def save_weights(request: Request, here: Here) -> Json:
    """The trainer's state to disk."""
    body = await request.body()
    asked = parsed(types.SaveWeightsRequest, body)
    if known := here.repeated("save_weights", asked.model_id, asked.seq_id, body):
        return _future(known)
    with here.numbered(asked.model_id, asked.seq_id):
        here.checks.check_save(asked.model_id, asked)
        return _future(here.accept("save_weights", asked.model_id, asked.seq_id, body))


@router.post("/load_weights")
async def load_weights(request: Request, here: Here) -> Json:
    """A saved state into a model, or into a new one."""
    body = await request.body()
    asked = parsed(types.LoadWeightsRequest, body)
    model_id, seq_id, first = asked.model_id, asked.seq_id, 1
    with here.numbered(model_id, seq_id):
        here.checks.check_load(asked.path, model_id)
    if asked.session_id is not None and asked.model_seq_id is not None:
        source = here.model_of(asked.path)["facts"]["base_model"]
        base_model = asked.base_model or source
        here.check_base_model(base_model)
        lora = here.model_of(asked.path)["facts"].get("lora")
        facts = {"base_model": base_model, "user_metadata": asked.user_metadata, "lora": lora}
        model_id = await here.new_model(asked.session_id, asked.model_seq_id, facts)
        seq_id = first = 0
    if model_id is None:
        raise malformed("send model_id and seq_id, or session_id and model_seq_id")
    return _future(here.accept("load_weights", model_id, seq_id, body, first=first))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, here: Here) -> Json:
    """Publish the trainer's weights, if no served version has them, and name the version."""
    body = await request.body()
    asked = parsed(types.SaveWeightsForSamplerRequest, body)
    with here.numbered(asked.model_id, asked.seq_id):
        check_name(asked.path)
        check_ttl(asked.ttl_seconds)
        if asked.path is None and asked.sampling_session_seq_id is None:
            raise malformed("send path or sampling_session_seq_id")
        return _future(here.accept("save_weights_for_sampler", asked.model_id, asked.seq_id, body))


def _future(request_id: str) -> Json:
    return {"request_id": request_id}


# ---------------------------------------------------------------- sampling


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, here: Here) -> Json:
    """Make a sampler."""
    asked = parsed(types.CreateSamplingSessionRequest, await request.body())
    sampler_id = here.new_sampler(asked)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, here: Here) -> Json:
    """What a sampler samples from."""
    sampler = here.books.sampler(sampler_id)
    base = here.base_models[0]
    return {"sampler_id": sampler_id, "base_model": base, "model_path": sampler["model_path"]}


@router.post("/asample")
async def asample(request: Request, here: Here) -> Json:
    """Start a sample request."""
    body = await request.body()
    asked = parsed(types.SampleRequest, body)
    future_id, sequence_ids = here.sampling.accept(asked, body)
    return {"request_id": future_id, "sample_sequence_ids": sequence_ids}


# ---------------------------------------------------------------- futures


@router.post("/retrieve_future")
async def retrieve_future(request: Request, here: Here) -> Response:
    """Wait for a result, for a while."""
    asked = parsed(types.FutureRetrieveRequest, await request.body())
    is_sample = here.sampling.has(asked.request_id)
    source = here.sampling if is_sample else here.turns
    result = await source.result(asked.request_id, timeout_s=here.config.poll_s)
    if result is None:
        again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
        result = json_result(**again)
    headers = {"x-splice-versions": result.versions} if result.versions else {}
    return Response(result.body, media_type=result.media, headers=headers)


@router.post("/cancel_future")
async def cancel_future(request: Request, here: Here) -> Response:
    """End a sample request that nobody waits for."""
    here.sampling.cancel(str((await _object(request)).get("request_id")))
    return Response(status_code=204)


# ---------------------------------------------------------------- REST


@router.get("/training_runs")
async def list_training_runs(here: Here, limit: int = 20, offset: int = 0) -> Json:
    """All models, newest first."""
    models = [model["model_id"] for model in here.books.models()]
    runs = [here.training_run(model_id) for model_id in _page(models, limit, offset)]
    return {"training_runs": runs, "cursor": _cursor(models, limit, offset)}


@router.get("/training_runs/{model_id}")
async def get_training_run(model_id: str, here: Here) -> Json:
    """One model."""
    return here.training_run(model_id)


@router.get("/training_runs/{model_id}/checkpoints")
async def list_checkpoints(model_id: str, here: Here) -> Json:
    """A model's checkpoints."""
    here.books.model(model_id)
    return {"checkpoints": [checkpoint_of(row) for row in here.books.checkpoints(model_id)]}


@router.put("/training_runs/{model_id}/checkpoints/{checkpoint_id:path}/ttl")
async def set_ttl(model_id: str, checkpoint_id: str, request: Request, here: Here) -> Response:
    """When a checkpoint expires."""
    ttl_s = (await _object(request)).get("ttl_seconds")
    check_ttl(ttl_s)
    path = f"tinker://{model_id}/{checkpoint_id}"
    here.books.checkpoint(path)
    here.books.expire(path, ttl_s)
    return Response(status_code=204)


@router.delete("/training_runs/{model_id}/checkpoints/{checkpoint_id:path}")
async def delete_checkpoint(model_id: str, checkpoint_id: str, here: Here) -> Response:
    """Forget a checkpoint."""
    here.delete_checkpoint(f"tinker://{model_id}/{checkpoint_id}")
    return Response(status_code=204)


@router.get("/checkpoints")
async def list_all_checkpoints(here: Here, limit: int = 100, offset: int = 0) -> Json:
    """All checkpoints, newest first."""
    rows = here.books.checkpoints()
    found = [checkpoint_of(row) for row in _page(rows, limit, offset)]
    return {"checkpoints": found, "cursor": _cursor(rows, limit, offset)}


@router.post("/weights_info")
async def weights_info(request: Request, here: Here) -> Json:
    """What a checkpoint's model is."""
    model = here.model_of(str((await _object(request)).get("tinker_path")))
    return {"base_model": model["facts"]["base_model"], **adapters.info(here.lora_of(model))}


async def _object(request: Request) -> Json:
    try:
        found = await request.json()
    except ValueError as error:
        raise malformed(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise malformed("the body is no JSON object")
    return found


def _page(rows: list[Row], limit: int, offset: int) -> list[Row]:
    if limit < 0 or offset < 0:
        raise Refused(400, "limit and offset must not be negative")
    return rows[offset : offset + limit]


def _cursor(rows: list[Any], limit: int, offset: int) -> Json:
    return {"offset": offset, "limit": limit, "total_count": len(rows)}
