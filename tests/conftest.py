"""Which tests only `make test-all` runs: the slow ones, where a quicker test covers the same code.

`make test` runs the rest. Each entry is a pattern of test ids (`fnmatch`). Add a test here if it
takes more than about 4 s and another test would fail with it in most cases.

`--slice 3/10` keeps a tenth of what was selected: `.ci/run` runs one, chosen by the commit's time.
"""

from __future__ import annotations

import os
import signal
import zlib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

REPO = str(Path(__file__).resolve().parents[1])
# Processes that splice starts look in no current folder, and some of them import a test's module.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [REPO, os.environ.get("PYTHONPATH")]))
# A shell's job in the background ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

WHOLE = (
    # Wrong versions of the product, each with the tests that must find it: `make mutants`.
    "tests/trainer_node/test_mutants.py::*",
    # The parity matrix: topology x LoRA or all parameters x RL, SFT or GAE. COVERING stays.
    "tests/trainer_node/training/test_parity.py::test_topology_changes_nothing*",
    "tests/trainer_node/training/test_parity_bf16.py::*",
    # Every family of models; a few stay.
    "tests/trainer_node/model/test_families.py::*",
    "tests/trainer_node/training/test_host_inputs.py::test_a_familys_gradients*",
    "tests/trainer_node/tools/test_check_model.py::test_every_family_is_admitted*",
    "tests/trainer_node/tools/test_check_model.py::test_a_model_that_cannot_be_checked*",
    "tests/trainer_node/adapters/test_adapters_families.py::test_adapters_*",
    "tests/trainer_node/training/test_operations.py::test_topology_changes_nothing*",
    "tests/trainer_node/adapters/test_dropout.py::test_steps_resume_cuts_and_recomputation*",
    "tests/trainer_node/training/test_packing.py::test_packs_equal_one_sequence_at_a_time*",
    "tests/trainer_node/training/test_full.py::test_two_steps_equal_transformers*",
    # Whole processes, started, killed and started again.
    "tests/trainer_node/test_node.py::test_a_model_that_only_bridge_can_export*",
    "tests/trainer_node/test_node.py::test_several_ranks_send_in_the_receivers_order*",
    "tests/trainer_node/test_node.py::test_a_dead_rank_ends_the_node",
    "tests/trainer_node/test_node.py::test_a_whole_life*dense*",
    "tests/e2e/test_up.py::test_a_resume_on_other_base_weights*",
    "tests/e2e/test_train.py::test_the_documented_sweep",
    "tests/e2e/test_follow.py::*",
    "tests/trainer_node/test_node.py::test_the_ranks_end_with_a_killed_torchrun",
    "tests/trainer_node/test_node.py::test_a_lost_replica_and_no_joiner",
    "tests/trainer_node/test_node.py::test_bad_topology_is_said_before_anything_is_built",
    "tests/trainer_node/test_node.py::test_ranks_wait_longer_for_the_first_check*",
    "tests/trainer_node/launcher/test_memory.py::*",
    "tests/trainer_node/hf/test_hub.py::test_two_hosts_a_hub_id_and_a_prefix",
    "tests/trainer_node/launcher/test_ranks.py::test_forked_ranks_draw_different_numbers",
    "tests/trainer_node/export/test_wire_export.py::test_the_kernel_interpreted_on_a_real_model",
    "tests/trainer_node/model/test_experts.py::test_kernels_interpreted",
    "tests/trainer_node/files/test_generations.py::test_a_crash_while_mending*",
    "tests/trainer_node/layout/test_probe.py::test_bridges_mappings([12])",
    "tests/trainer_node/training/test_begun.py::test_two_ranks([dtp]p2)",
    "tests/trainer_node/training/test_begun.py::test_one_rank(moe)",
    "tests/trainer_node/training/test_begun.py::test_all_parameters(1)",
    "tests/trainer_node/training/test_full.py::test_topology_changes_nothing(dense_tied)",
    "tests/trainer_node/training/test_valued.py::test_all_parameters",
    "tests/trainer_node/test_failed_requests.py::*(dense_tied)",
    "tests/trainer_node/state/test_behind.py::test_one_rank*again*",
    "tests/trainer_node/state/test_behind.py::test_a_killed_trainer_makes_its_step_again",
    "tests/trainer_node/state/test_behind.py::test_two_ranks*dp2*",
    "tests/trainer_node/state/test_behind.py::test_all_parameters*full_disk*",
    "tests/orchestrator/test_fuzz.py::test_a_peer_that_says_anything_harms_nobody_else*client*",
    "tests/orchestrator/test_trust.py::test_a_trainer_that_never_says_where_it_listens_is_named",
    "tests/orchestrator/test_resume.py::test_killed_at_each_commit_of_a_job",
    "tests/orchestrator/test_reconnect.py::test_a_node_that_was_suspended*",
    "tests/orchestrator/test_replicas.py::test_one_that_never_recovers*",
    "tests/orchestrator/test_replicas.py::test_the_last_one_is_waited_for",
    "tests/orchestrator/test_restarts.py::test_a_prefix_that_stays_a_process*",
    "tests/weight_transfer/test_transfer.py::test_sender_stopped_mid_transfer*",
    "tests/weight_transfer/test_transfer.py::test_a_process_with_a_stuck_send_can_exit",
    "tests/weight_transfer/test_transfer.py::test_a_rank_that_stands_still_while_connecting*",
    "tests/benchmarks/test_benchmarks.py::test_runs_small_on_a_cpu*",
    # More vLLM servers: a third kind of model, several workers or engines, restarts.
    "tests/inference_node/*tied*",
    "tests/inference_node/node/*(moe)",
    "tests/inference_node/server/test_versions.py::test_every_token_under_continuous_swaps(keep_kv)",
    "tests/inference_node/server/test_swap_in_flight.py::test_every_token*(keep_kv-1)",
    "tests/inference_node/server/test_swap_in_flight.py::test_every_token*(keep-64)",
    "tests/inference_node/worker/test_families.py::*",
    "tests/inference_node/worker/test_fp8.py::test_live_bytes_are_those_of_a_cold_load*llama*",
    "tests/inference_node/node/test_data_parallel.py::*",
    "tests/inference_node/node/test_tensor_parallel.py::*",
    "tests/inference_node/node/test_process_end.py::*",
    "tests/inference_node/node/test_dead_engine.py::*",
    "tests/inference_node/node/test_failures.py::test_a_vllm_that_dies_before_it_takes_a_call*",
    "tests/inference_node/node/test_failures.py::test_a_dead_vllm_is_restarted*",
    "tests/e2e/*",
    "tests/tinker/test_sdk.py::*",
    "tests/rl/test_real_failures.py::*",
    "tests/rl/test_report.py::test_a_browser_shows_it",
    "tests/rl/test_verifiers.py::*",
    "tests/rl/test_week.py::*",
    "tests/rl/test_openenv.py::*",
    "tests/rl/test_router_replay.py::test_the_trainer_uses_the_experts",
    "tests/rl/test_examples.py::test_rl_starts_from_what_sft_published",
    "tests/rl/test_examples.py::test_a_loss_of_ones_own",
    "tests/rl/test_examples.py::test_the_notebook",
)
COVERING = (
    "*test_every_mutant_applies",
    "*test_parity.py*dense_tied-tp2-lora-rl*",
    "*test_parity.py*dense_tied-pp2-lora-sft*",
    "*test_parity.py*dense_tied-dp2-full-rl*",
    "*test_parity.py*dense_tied-cp2-full-sft*",
    "*test_parity.py*dense_tied-tp2-lora-gae*",
    "*test_parity.py*dense_untied-tp2pp2-full-gae*",
    "*test_parity.py*moe-tp2ep2-cp2-full-gae*",
    "*test_parity.py*dense_untied-tp2pp2-full-rl*",
    "*test_parity.py*moe-ep2-lora-sft*",
    "*test_parity.py*moe-tp2ep2-cp2-lora-rl*",
    "*test_parity.py*moe-dp2ep2-etp2-full-sft*",
    "*test_operations.py*dp2*",
    "*test_check_model.py::test_every_family_is_admitted*llama3_rope*",
    "*test_families.py::test_a_family_is_what_transformers_has*llama*",
    "*test_families.py::test_a_family_is_what_transformers_has*gpt_oss*",
    "*test_families.py::test_a_family_is_what_transformers_has*deepseek_v3*",
    "*test_families.py::test_a_model_that_sees_is_published_with_its_tower",
    "*test_families.py::test_published_versions*(deepseek_v3)",
    "*test_families.py::test_published_versions*(gemma3)",
    "*test_families.py::test_published_versions*(gpt_oss)",
    "*test_adapters_families.py::*pefts(llama-all*",
    "*test_adapters_families.py::*pefts(gemma3-*",
    "*test_adapters_families.py::*pefts(deepseek_v2-*",
    "*test_adapters_families.py::*pefts(qwen3_5_moe-all*",
    "*test_adapters_families.py::*pefts(gpt_oss-q_proj*",
    "*test_adapters_families.py::*ranks(llama-tp2)",
    "*test_adapters_families.py::*ranks(deepseek_v2-tp2)",
    "*test_adapters_families.py::*ranks(qwen3_5_moe-tp2)",
    "tests/e2e/test_smoke.py::test_from_checkpoint_to_version_two*qwen3_moe*",
    "tests/e2e/test_smoke.py::test_bad_input_starts_nothing*",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="I/N", help="only the tests of slice I of N, from 0")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_one_of(item, WHOLE) and not _is_one_of(item, COVERING):
            item.add_marker(pytest.mark.whole)
    if wanted := config.getoption("--slice"):
        index, count = map(int, wanted.split("/"))
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == index]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--slice") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # a part may have nothing in a slice


def _is_one_of(item: pytest.Item, patterns: tuple[str, ...]) -> bool:
    node_id = item.nodeid.replace("[", "(").replace("]", ")")  # fnmatch takes [ for a set
    return any(fnmatchcase(node_id, pattern) for pattern in patterns)
