"""The URL of the OpenAI API that a node hands out, and the environment of its vLLM."""

from __future__ import annotations

import pytest

from inference_node.node.vllm_process import VllmProcess, bind, environment, first_error
from orchestrator.processes import interfaces
from orchestrator.protocol.config import InferenceConfig


@pytest.mark.parametrize(
    ("host", "advertised", "url"),
    [
        ("0.0.0.0", "", "http://192.0.2.77"),
        ("0.0.0.0", "gpu-7", "http://gpu-7"),
        ("127.0.0.1", "", "http://127.0.0.1"),
    ],
)
def test_the_url_is_one_that_others_reach(host, advertised, url, monkeypatch, tmp_path):
    monkeypatch.setattr(interfaces, "address_towards", lambda _: "192.0.2.77")
    config = InferenceConfig(model=tmp_path, name="m", host=host, advertised_host=advertised)
    with bind(host, 0) as listener:
        port = listener.getsockname()[1]
        process = VllmProcess(config, listener=listener, watchdog_endpoint="")
        assert process.base_url == f"{url}:{port}"
        process.close()


def test_variables_for_the_world_outside_do_not_reach_its_client(monkeypatch, tmp_path):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    config = InferenceConfig(model=tmp_path, name="m")
    with bind("127.0.0.1", 0) as listener:
        VllmProcess(config, listener=listener, watchdog_endpoint="").close()


@pytest.mark.parametrize(
    ("device", "user", "found"), [("cuda", None, "0"), ("cuda", "1", "1"), ("cpu", None, None)]
)
def test_a_gpu_samples_as_in_the_measured_runs(device, user, found, monkeypatch, tmp_path):
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    if user is not None:
        monkeypatch.setenv(name, user)
    config = InferenceConfig(model=tmp_path, name="m", device=device)
    assert environment(config, secret="", watchdog_endpoint="").get(name) == found


def test_vllms_first_error_is_the_cause() -> None:
    log = (
        "INFO 11-25 [x.py:1] fine\n"
        "(EngineCore pid=7) ERROR 11-25 22:00:01 [core.py:1] EngineCore failed to start.\n"
        "(EngineCore pid=7) ERROR 11-25 22:00:01 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-25 22:00:01 [core.py:1] RuntimeError: _C::scaled() failed\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert first_error(log) == "RuntimeError: _C::scaled() failed"
    assert first_error("INFO fine\n") is None
