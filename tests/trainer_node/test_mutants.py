"""Wrong versions of the production code, and for each the check that must fail on it. A mutant that survives fails this suite.

A mutant is one replacement in one source file of a copy of the repository; its killer is a test that passes on the unmutated copy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trainer_node.conftest import REPO, child_env

LOSSES, PURE = "tests/trainer_node/test_losses.py", "tests/trainer_node/test_pure.py"
PACKING = "tests/trainer_node/test_packing.py"
GENERATIONS, OPERATIONS = "tests/trainer_node/test_generations.py", "tests/trainer_node/test_operations.py"
PEFT = "tests/trainer_node/test_peft_io.py"
ONE_RANK = f"{OPERATIONS}::test_one_rank_equals_transformers_and_peft[dense_untied]"
FULL = "tests/trainer_node/test_full.py"
FULL_ONE_RANK = f"{FULL}::test_two_steps_equal_transformers[dense_tied]"
FULL_TOPOLOGIES = f"{FULL}::test_topology_changes_nothing[dense_tied]"
TWO_RANKS = f"{OPERATIONS}::test_topology_changes_nothing[dp2]"

pytestmark = pytest.mark.mutants


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`old` stands exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    killer: str


MUTANTS = [
    Mutant(
        name="token normalisation per batch, then a mean of means",
        file="trainer_node/sums.py",
        old="num_tokens=self.num_tokens + other.num_tokens",
        new="num_tokens=max(self.num_tokens, other.num_tokens)",
        killer=f"{PURE}::TestSums::test_batches_add_up_and_are_divided_once",
    ),
    Mutant(
        name="sequences without loss counted",
        file="trainer_node/batch.py",
        old="return sum(bool(part.any()) for part",
        new="return sum(True for part",
        killer=f"{PURE}::TestSums::test_sequences_without_loss_do_not_count",
    ),
    Mutant(
        name="off-by-one log-prob shift",
        file="trainer_node/batch.py",
        old="targets_N=batch.tokens_T[rows_N]",
        new="targets_N=batch.tokens_T[rows_N - 1]",
        killer=f"{PACKING}::test_by_hand",
    ),
    Mutant(
        name="positions run on over the sequences of a pack",
        file="trainer_node/batch.py",
        old="np.concatenate([np.arange(n) for n in pieces])",
        new="np.arange(sum(pieces))",
        killer=f"{PACKING}::test_by_hand",
    ),
    Mutant(
        name="attention over the sequences of a pack",
        file="trainer_node/cpu_layers.py",
        old="packed_seq_params.cu_seqlens_q.tolist()",
        new="packed_seq_params.cu_seqlens_q[[0, -1]].tolist()",
        killer=ONE_RANK,
    ),
    Mutant(
        name="copies averaged under sequence parallelism",
        file="trainer_node/runtime.py",
        old="repeats = 1 if self.provider.sequence_parallel else tensor_size",
        new="repeats = tensor_size",
        killer=f"{OPERATIONS}::test_topology_changes_nothing[tp2pp2]",
    ),
    Mutant(
        name="forward results returned a row early",
        file="trainer_node/runtime.py",
        old="result_2T[:, one.rows_N] = value_2N",
        new="result_2T[:, one.rows_N - 1] = value_2N",
        killer=ONE_RANK,
    ),
    Mutant(
        name="a number that does not divide is rounded",
        file="trainer_node/batch.py",
        old="if wanted < 1 or wanted % dp_size:",
        new="if wanted < 1:",
        killer=f"{PURE}::TestAccumulation::test_a_number_that_does_not_divide",
    ),
    Mutant(
        name="infinite log-probs let through",
        file="trainer_node/batch.py",
        old="~np.isfinite(arrays[name])",
        new="np.isnan(arrays[name])",
        killer=f"{PURE}::TestBatch::test_refusals",
    ),
    Mutant(
        name="dual clip for positive advantages too",
        file="trainer_node/losses.py",
        old="torch.where(advantages_N < 0, bounded_N, surrogate_N)",
        new="bounded_N",
        killer=f"{LOSSES}::TestByHand::test_ppo_with_dual_clip",
    ),
    Mutant(
        name="CISPO's weight differentiated",
        file="trainer_node/losses.py",
        old="_ratio(log_probs_N.detach(), sampler_logprobs_N, old_logprobs_N)",
        new="_ratio(log_probs_N, sampler_logprobs_N, old_logprobs_N)",
        killer=f"{LOSSES}::test_gradients_equal_autograd_of_the_plain_formula",
    ),
    Mutant(
        name="GSPO without the length",
        file="trainer_node/losses.py",
        old="log_probs_N - old_N) / divisor_S).exp()",
        new="log_probs_N - old_N)).exp()",
        killer=f"{LOSSES}::TestByHand::test_gspo",
    ),
    Mutant(
        name="importance weight not truncated",
        file="trainer_node/losses.py",
        old="weight_N = untruncated_N.clamp(max=ratio_cap)",
        new="weight_N = untruncated_N",
        killer=f"{LOSSES}::TestByHand::test_truncated_without_old",
    ),
    Mutant(
        name="k3 with p and reference exchanged",
        file="trainer_node/losses.py",
        old="d_N = reference_logprobs_N - log_probs_N",
        new="d_N = log_probs_N - reference_logprobs_N",
        killer=f"{LOSSES}::TestByHand::test_kl",
    ),
    Mutant(
        name="vocabulary padding in the entropy",
        file="trainer_node/losses.py",
        old="valid_V = ids_V < vocab_size",
        new="valid_V = ids_V < vocab_size + 1",
        killer=f"{LOSSES}::test_log_probs_and_entropy_with_gradients",
    ),
    Mutant(
        name="a whole generation that was not yet in its place is forgotten",
        file="trainer_node/generations.py",
        old="    if is_whole(temp):\n",
        new="    if folder.exists() and is_whole(temp):\n",
        killer=f"{GENERATIONS}::test_a_crash_at_every_operation",
    ),
    Mutant(
        name="marked before the files are flushed and moved",
        file="trainer_node/generations.py",
        old="    write_file(temp / MARKER, lambda path: path.write_text(marker), disk=disk)\n    _replace(folder, temp, disk=disk)\n",
        new="    _replace(folder, temp, disk=disk)\n    write_file(folder / MARKER, lambda path: path.write_text(marker), disk=disk)\n",
        killer=f"{GENERATIONS}::test_a_crash_at_every_operation",
    ),
    Mutant(
        name="files not flushed before the marker",
        file="trainer_node/generations.py",
        old="    disk.write(temp, write)\n    disk.flush(temp)\n",
        new="    disk.write(temp, write)\n",
        killer=f"{GENERATIONS}::test_a_crash_at_every_operation",
    ),
    Mutant(
        name="double finalisation: divided on every call and at the step",
        file="trainer_node/runtime.py",
        old="        total = terms.total * weight\n",
        new="        total = terms.total * weight / count\n",
        killer=ONE_RANK,
    ),
    Mutant(
        name="the reference is the policy itself",
        file="trainer_node/lora.py",
        old="before, self._on = self._on, on",
        new="before, self._on = self._on, True",
        killer=ONE_RANK,
    ),
    Mutant(
        name="entropy bonus with the wrong sign",
        file="trainer_node/losses.py",
        old="total = total - spec.entropy_bonus * entropy",
        new="total = total + spec.entropy_bonus * entropy",
        killer=ONE_RANK,
    ),
    Mutant(
        name="adapter scale forgotten",
        file="trainer_node/lora.py",
        old="h = self._exchange(h, group=self._group) * self.scale",
        new="h = self._exchange(h, group=self._group)",
        killer=ONE_RANK,
    ),
    Mutant(
        name="sums not reduced over data-parallel ranks",
        file="trainer_node/runtime.py",
        old="        dist.all_reduce(total)\n        dist.all_reduce(worst",
        new="        dist.all_reduce(worst",
        killer=TWO_RANKS,
    ),
    Mutant(
        name="gradients not reduced over data-parallel ranks",
        file="trainer_node/parameters.py",
        old="all_reduce_flat(dense, parallel_state.get_data_parallel_group(with_context_parallel=True), 1 / denominator)",
        new="all_reduce_flat(dense, tensor_group, 1 / denominator)",
        killer=TWO_RANKS,
    ),
    Mutant(
        name="a tied embedding's two gradients not added",
        file="trainer_node/parameters.py",
        old="        all_reduce_flat(tied, parallel_state.get_embedding_group(), 1.0)\n",
        new="        pass\n",
        killer=FULL_TOPOLOGIES,
    ),
    Mutant(
        name="the q and k norms' partial gradients averaged",
        file="trainer_node/parameters.py",
        old='partial=bare.endswith(("q_layernorm.weight", "k_layernorm.weight")),',
        new="partial=False,",
        killer=FULL_TOPOLOGIES,
    ),
    Mutant(
        name="sharded tensor dropped on save",
        file="trainer_node/checkpoint.py",
        old="            for piece in p.pieces:\n                box = ",
        new="            for piece in p.pieces[:1]:\n                box = ",
        killer=FULL_ONE_RANK,
    ),
    Mutant(
        name="bf16 weights stepped without a master",
        file="trainer_node/optimizer.py",
        old="p.param.detach().float()",
        new="p.param.detach()",
        killer=FULL_ONE_RANK,
    ),
    Mutant(
        name="norms decay",
        file="trainer_node/optimizer.py",
        old='optim.weight_decay if group["decays"] else 0.0',
        new="optim.weight_decay",
        killer=FULL_ONE_RANK,
    ),
    Mutant(
        name="owners keep their step to themselves",
        file="trainer_node/optimizer.py",
        old="        for share in self._shares:\n            share.broadcast()\n",
        new="        pass\n",
        killer=f"{FULL}::test_topology_changes_nothing[moe]",
    ),
    Mutant(
        name="the reference adapter is the policy's own",
        file="trainer_node/runtime.py",
        old="with self.reference_in_place(loss.kl.adapter_dir):",
        new="with self.reference_in_place(None):",
        killer=ONE_RANK,
    ),
    Mutant(
        name="gradients stay where they were when the rest is offloaded",
        file="trainer_node/offload.py",
        old="yield param.grad\n        yield from module.buffers()",
        new="pass\n        yield from module.buffers()",
        killer=ONE_RANK,
    ),
    Mutant(
        name="what is missing in an adapter keeps its values",
        file="trainer_node/peft_io.py",
        old="missing = [_stored_name(k) for k in expected if k not in found]",
        new="missing: list[str] = []",
        killer=f"{PEFT}::test_tensors",
    ),
    Mutant(
        name="an adapter of another alpha is taken",
        file="trainer_node/peft_io.py",
        old='(("r", lora.rank), ("lora_alpha", lora.alpha))',
        new='(("r", lora.rank),)',
        killer=f"{PEFT}::test_settings",
    ),
    Mutant(
        name="a step is asked for twice by an orchestrator that was restarted",
        file="orchestrator/trainer_requests.py",
        old="        if key is not None:",
        new="        if False:",
        killer="tests/orchestrator/test_resume.py::test_killed_while_idle_and_in_the_step",
    ),
]


def copy_of_the_repository(folder: Path) -> Path:
    """What the killers need."""
    for package in ("orchestrator", "trainer_node", "weight_transfer", "tests"):
        shutil.copytree(REPO / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", folder)
    return folder


def run_killers(folder: Path, killers: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *killers]
    environment = {**child_env(), "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_the_killers_pass_without_a_mutation(tmp_path: Path) -> None:
    ran = run_killers(copy_of_the_repository(tmp_path), sorted({m.killer for m in MUTANTS}))
    assert ran.returncode == 0, ran.stdout[-4000:]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    folder = copy_of_the_repository(tmp_path)
    path = folder / mutant.file
    source = path.read_text()
    assert source.count(mutant.old) == 1, f"{mutant.file} has changed: the mutant {mutant.name!r} does not apply"
    path.write_text(source.replace(mutant.old, mutant.new))
    ran = run_killers(folder, [mutant.killer])
    assert ran.returncode == 1, f"{mutant.name!r} survived {mutant.killer}:\n{ran.stdout[-3000:]}"
