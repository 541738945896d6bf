"""Wrong versions of the production code, and for each the check that must fail on it. A mutant that
survives fails this suite.

A mutant is one replacement in one source file of a copy of the repository; its killer is a test
that passes on the unmutated copy. The copies' tests run in forks of one process
(`mutantserver.py`), two at a time.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_node import mutantserver
from tests.trainer_node.conftest import REPO, cpu_env

LOSSES, PURE = "tests/trainer_node/test_losses.py", "tests/trainer_node/test_pure.py"
PACKING = "tests/trainer_node/test_packing.py"
GENERATIONS, OPERATIONS = (
    "tests/trainer_node/test_generations.py",
    "tests/trainer_node/test_operations.py",
)
DROPOUT = "tests/trainer_node/test_dropout.py"
GATHER = "tests/trainer_node/test_gather.py"
ROUNDING = "tests/trainer_node/test_rounding.py"
SERVED = "tests/trainer_node/test_served_weights.py::test_the_trainer_computes_with_what_is_served"
PEFT = "tests/trainer_node/test_peft_io.py"
EXTRAS = "tests/trainer_node/test_extras.py::test_extras"
FUSED = "tests/trainer_node/test_fp8_export.py::test_the_fused_kernels_interpreted"
BLOCKS = "tests/trainer_node/test_fp8_blocks.py"
READAPTED = "tests/trainer_node/test_readapted.py::test_a_new_adapter_is_one_from_the_start"
PROBE = "tests/trainer_node/test_probe.py"
KERNELS = "tests/trainer_node/test_kernels.py::test_attention_kernels_are_checked[gemma3]"
BEGUN = "tests/trainer_node/test_begun.py::test_one_rank[dense_tied]"
ONE_RANK = f"{OPERATIONS}::test_one_rank_equals_transformers_and_peft[dense_untied]"
FULL_ONE_RANK = "tests/trainer_node/test_full.py::test_two_steps_equal_transformers[moe]"
UNMUTATED = "the repository as it is"
RUN_TIMEOUT_S = 200.0


def reference(cell: str) -> str:
    """A cell of the parity matrix on one rank, against transformers, PEFT and torch.optim."""
    return f"tests/trainer_node/test_parity.py::test_one_rank_equals_the_reference[{cell}]"


def family(name: str) -> str:
    """A family on one rank, against transformers."""
    return f"tests/trainer_node/test_families.py::test_a_family_is_what_transformers_has[{name}]"


def without_sequence(name: str) -> str:
    """A family over tensor ranks without sequence parallelism, against transformers."""
    test = "test_a_family_over_tensor_ranks_that_share_no_sequence"
    return f"tests/trainer_node/test_families.py::{test}[{name}]"


def over_ranks(cell: str) -> str:
    """A family over tensor ranks, against transformers."""
    return f"tests/trainer_node/test_families.py::test_a_family_over_several_ranks[{cell}]"


def adapters(name: str) -> str:
    """A family's adapters on one rank, against PEFT."""
    test = "test_adapters_are_pefts"
    return f"tests/trainer_node/test_adapters_families.py::{test}[{name}-all-linear]"


def over_adapters(cell: str) -> str:
    """A family's adapters over several ranks, against PEFT."""
    test = "test_adapters_over_several_ranks"
    return f"tests/trainer_node/test_adapters_families.py::{test}[{cell}]"


def admitted(name: str) -> str:
    """`splice check` on a family, by the trainer's own passes."""
    return f"tests/trainer_node/test_check_model.py::test_every_family_is_admitted[{name}]"


def behind(what: str) -> str:
    """Checks of the moments that are written behind."""
    return f"tests/trainer_node/test_behind.py::test_one_rank[{what}]"


def parity(cell: str) -> str:
    """A cell of the parity matrix, against one rank."""
    return f"tests/trainer_node/test_parity.py::test_topology_changes_nothing[{cell}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`old` stands exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    killer: str

    @property
    def applies(self) -> bool:
        """False: the source has changed under it."""
        return (REPO / self.file).read_text().count(self.old) == 1


MUTANTS = [
    # First, because it mostly waits.
    Mutant(
        name="a step is asked for twice by an orchestrator that was restarted",
        file="orchestrator/trainer_requests.py",
        old='own_id = f"{request.request_id}-{incarnation[:12]}"',
        new='own_id = new_id("again")',
        killer="tests/orchestrator/test_resume.py::test_killed_while_idle_and_in_the_step",
    ),
    Mutant(
        name="a batch that was begun is used for any other",
        file="trainer_node/training/ahead.py",
        old="if not _are_same(announced, self._buffers, message, buffers):",
        new="if False:",
        killer=BEGUN,
    ),
    Mutant(
        name="the loss of a batch that was begun does not matter",
        file="trainer_node/training/ahead.py",
        old='if name != "optim"]',
        new='if name not in ("optim", "loss")]',
        killer=BEGUN,
    ),
    Mutant(
        name="gradients of a forgotten batch stay",
        file="trainer_node/training/trainer.py",
        old="if self.begun is not None:\n            self.drop_pending()",
        new="self.begun = None",
        killer=BEGUN,
    ),
    Mutant(
        name="a batch that was begun outlives its weights",
        file="trainer_node/training/trainer.py",
        old="self.pending, self.begun = Pending(), None\n        for p",
        new="self.pending = Pending()\n        for p",
        killer=BEGUN,
    ),
    Mutant(
        name="a batch is begun after its job",
        file="trainer_node/training/ahead.py",
        old="                link.next_batch = None\n        begun",
        new="                pass\n        begun",
        killer=BEGUN,
    ),
    Mutant(
        name="packs are begun however little of the write is left",
        file="trainer_node/training/ahead.py",
        old="LEAST_SHARE = 0.5",
        new="LEAST_SHARE = 0.0",
        killer=BEGUN,
    ),
    Mutant(
        name="thresholds are counted from the piece",
        file="trainer_node/adapters/rounding.py",
        old="rows = (rows + self.row)",
        new="rows = (rows + 0)",
        killer=f"{ROUNDING}::test_a_piece_has_the_bits_of_the_whole",
    ),
    Mutant(
        name="thresholds are taken off",
        file="trainer_node/adapters/rounding.py",
        old="sum_HW.view(torch.int32) + h16_HW *",
        new="sum_HW.view(torch.int32) - h16_HW *",
        killer=f"{ROUNDING}::test_every_bit_of_a_threshold_counts",
    ),
    Mutant(
        name="thresholds have one bit less",
        file="trainer_node/adapters/rounding.py",
        old="shifted(x_H[:, None] * y_W, 16)",
        new="shifted(x_H[:, None] * y_W, 17)",
        killer=f"{ROUNDING}::test_thresholds_are_uniform_and_unrelated",
    ),
    Mutant(
        name="a threshold is one too large",
        file="trainer_node/adapters/rounding.py",
        old="sum_HW.abs() < BF16_TOP)",
        new="sum_HW.abs() < BF16_TOP) + 1",
        killer=f"{ROUNDING}::test_every_bit_of_a_threshold_counts",
    ),
    Mutant(
        name="the merge rounds to nearest",
        file="trainer_node/adapters/rounding.py",
        old='if rounding.mode == "stochastic" and',
        new="if False and",
        killer=f"{ROUNDING}::test_bf16_equals_the_integers_of_the_reference[shape1]",
    ),
    Mutant(
        name="a tie of two roundings stays",
        file="trainer_node/adapters/rounding.py",
        old="        single_HW[row, column] = _once_rounded",
        new="        _ = _once_rounded",
        killer=f"{ROUNDING}::test_a_tie_of_two_roundings_is_decided_by_the_first_ones_error",
    ),
    Mutant(
        name="a tie below the normal numbers stays",
        file="trainer_node/adapters/rounding.py",
        old="if not is_plain:",
        new="if False:",
        killer=f"{ROUNDING}::test_sums_below_the_normal_numbers",
    ),
    Mutant(
        name="no delta changes a negative zero",
        file="trainer_node/adapters/rounding.py",
        old="torch.where(delta == 0, weight, found)",
        new="found",
        killer=f"{ROUNDING}::test_no_delta_copies_the_bits[rounding0-dtype0]",
    ),
    Mutant(
        name="finite weights become infinite",
        file="trainer_node/adapters/rounding.py",
        old="h16_HW * (sum_HW.abs() < BF16_TOP)",
        new="h16_HW",
        killer=f"{ROUNDING}::test_finite_stays_finite_and_infinity_infinite[dtype0]",
    ),
    Mutant(
        name="an adapter's product is rounded away",
        file="trainer_node/adapters/products.py",
        old="into.copy_(sum_of(one, other))",
        new="torch.add(one, other, out=into)",
        killer="tests/trainer_node/test_small_update.py::test_what_is_added_to_rounded_numbers_is_added_in_the_mean",
    ),
    Mutant(
        name="the experts' products are rounded away",
        file="trainer_node/model/experts.py",
        old="keeps_all=True",
        new="keeps_all=False",
        killer="tests/trainer_node/test_small_update.py::test_a_small_update_is_in_the_forward_pass[moe]",
    ),
    Mutant(
        name="a loaded version is merged as the config says",
        file="trainer_node/state/checkpoint.py",
        old="    model.adapters.rounding = _rounding(trainer, meta)\n",
        new="",
        killer="tests/trainer_node/test_small_update.py::test_a_small_update_is_in_the_forward_pass[moe]",
    ),
    Mutant(
        name="pieces of other ranks have thresholds of their own",
        file="trainer_node/export/wire_export.py",
        old="corner=Corner(tensor.name, placed.box.first_row, placed.box.first_column)",
        new="corner=Corner(tensor.name)",
        killer=f"{GATHER}::test_bytes_equal_the_export[moe-tp2ep2]",
    ),
    Mutant(
        name="a tile counts its columns from 0",
        file="trainer_node/adapters/rounding_kernels.py",
        old="(first_i + (word >> 32))",
        new="(word >> 32)",
        killer="tests/trainer_node/test_wire_export.py::test_the_kernel_interpreted",
    ),
    Mutant(
        name="magnitudes of an earlier fill stay",
        file="trainer_node/export/fp8_fused.py",
        old="chunk.largest_S.zero_()",
        new="pass",
        killer=FUSED,
    ),
    Mutant(
        name="magnitudes of other weights are used",
        file="trainer_node/export/fp8_fused.py",
        old="if state == chunk.measured:",
        new="if chunk.measured is not None:",
        killer=FUSED,
    ),
    Mutant(
        name="magnitudes are not forgotten",
        file="trainer_node/export/fp8_fused.py",
        old="            chunk.measured = None\n",
        new="            pass\n",
        killer=FUSED,
    ),
    Mutant(
        name="all groups share a scale",
        file="trainer_node/export/fp8_fused.py",
        old='        slots += batch.kind == "per_tensor"\n',
        new="",
        killer=FUSED,
    ),
    Mutant(
        name="a group of zeros has no scale to divide by",
        file="trainer_node/export/fp8_fused_kernels.py",
        old="tl.where(of_group == 0.0, 0.0, tl.div_rn(1.0, of_group))",
        new="tl.div_rn(1.0, of_group)",
        killer=FUSED,
    ),
    Mutant(
        name="blocks of a checkpoint are read by each other's scales",
        file="trainer_node/hf/fp8_blocks.py",
        old="scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)",
        new="scales.float().flip(0).repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)",
        killer=f"{BLOCKS}::test_a_weight_is_its_codes_times_its_block_s_scale",
    ),
    Mutant(
        name="three matrices that are chunks alone do not fit the ring",
        file="weight_transfer/chunks.py",
        old="sorted(sizes, reverse=True)[min(at_once, len(sizes)) - 1]",
        new="sorted(sizes)[0]",
        killer="tests/weight_transfer/test_chunks.py"
        "::test_a_ring_has_room_for_three_matrices_that_are_chunks_alone",
    ),
    Mutant(
        name="token normalisation per batch, then a mean of means",
        file="trainer_node/training/sums.py",
        old="num_tokens=self.num_tokens + other.num_tokens",
        new="num_tokens=max(self.num_tokens, other.num_tokens)",
        killer=f"{PURE}::TestSums::test_batches_add_up_and_are_divided_once",
    ),
    Mutant(
        name="sequences without loss counted",
        file="trainer_node/training/batch.py",
        old="reduceat(self.loss_mask_T.numpy() != 0, starts)",
        new="reduceat(self.loss_mask_T.numpy() >= 0, starts)",
        killer=f"{PURE}::TestSums::test_sequences_without_loss_do_not_count",
    ),
    Mutant(
        name="tokens that are only scored carry loss",
        file="trainer_node/training/batch.py",
        old="values_N if self.loss_N is None else values_N.index_select(0, self.loss_N)",
        new="values_N",
        killer=ONE_RANK,
    ),
    Mutant(
        name="the gradient of the learned positions lands on others",
        file="trainer_node/training/losses.py",
        old="others_NH.index_copy_(0, whole.learned_N, grad_hidden_NH)",
        new="others_NH.index_copy_(0, whole.learned_N - 1, grad_hidden_NH)",
        killer=f"{LOSSES}::test_the_backward_pass_leaves_out_what_is_not_learned",
    ),
    Mutant(
        name="weights of the linear loss without their sign",
        file="trainer_node/training/losses.py",
        old="-(advantages_N * log_probs_N).sum()",
        new="-(advantages_N.abs() * log_probs_N).sum()",
        killer=f"{LOSSES}::TestByHand::test_linear",
    ),
    Mutant(
        name="a partial update keeps the deltas of the adapter before",
        file="trainer_node/export/merged.py",
        old="self._ever |= targets",
        new="self._ever = set(targets)",
        killer=f"{READAPTED}[dense_tied-1-sizes0]",
    ),
    Mutant(
        name="off-by-one log-prob shift",
        file="trainer_node/training/batch.py",
        old="targets_N=of(batch.tokens_T)",
        new="targets_N=torch.from_numpy(batch.tokens_T.numpy()[loss_rows_N - 1])",
        killer=f"{PACKING}::test_by_hand",
    ),
    Mutant(
        name="positions run on over the sequences of a pack",
        file="trainer_node/training/batch.py",
        old="np.concatenate([np.arange(n) for n in pieces])",
        new="np.arange(sum(pieces))",
        killer=f"{PACKING}::test_by_hand",
    ),
    Mutant(
        name="attention over the sequences of a pack",
        file="trainer_node/training/passes.py",
        old="        cu_seqlens_q=micro.cu_seqlens,\n",
        new="        cu_seqlens_q=micro.cu_seqlens[[0, -1]],\n",
        killer=reference("dense_tied-lora-sft"),
    ),
    Mutant(
        name="copies averaged under sequence parallelism",
        file="trainer_node/training/gradients.py",
        old="copies_of_tokens = 1 if sequence_parallel else group.size()",
        new="copies_of_tokens = group.size()",
        killer=parity("moe-tp2-lora-sft"),
    ),
    Mutant(
        name="forward results returned a row early",
        file="trainer_node/training/passes.py",
        old="result_RT[:, one.rows_N] = value_RN",
        new="result_RT[:, one.rows_N - 1] = value_RN",
        killer=reference("dense_tied-lora-sft"),
    ),
    Mutant(
        name="a number that does not divide is rounded",
        file="trainer_node/training/batch.py",
        old="if wanted < 1 or wanted % dp_size:",
        new="if wanted < 1:",
        killer=f"{PURE}::TestAccumulation::test_a_number_that_does_not_divide",
    ),
    Mutant(
        name="infinite log-probs let through",
        file="trainer_node/training/batch.py",
        old="~np.isfinite(arrays[name])",
        new="np.isnan(arrays[name])",
        killer=f"{PURE}::TestBatch::test_refusals",
    ),
    Mutant(
        name="dual clip for positive advantages too",
        file="trainer_node/training/losses.py",
        old="torch.where(advantages_N < 0, bounded_N, surrogate_N)",
        new="bounded_N",
        killer=f"{LOSSES}::TestByHand::test_ppo_with_dual_clip",
    ),
    Mutant(
        name="CISPO's weight differentiated",
        file="trainer_node/training/losses.py",
        old="_ratio(log_probs_N.detach(), sampler_logprobs_N, old_logprobs_N)",
        new="_ratio(log_probs_N, sampler_logprobs_N, old_logprobs_N)",
        killer=f"{LOSSES}::test_gradients_equal_autograd_of_the_plain_formula",
    ),
    Mutant(
        name="GSPO without the length",
        file="trainer_node/training/losses.py",
        old="log_probs_N - old_N) / divisor_S).exp()",
        new="log_probs_N - old_N)).exp()",
        killer=f"{LOSSES}::TestByHand::test_gspo",
    ),
    Mutant(
        name="importance weight not truncated",
        file="trainer_node/training/losses.py",
        old="weight_N = untruncated_N.clamp(max=ratio_cap)",
        new="weight_N = untruncated_N",
        killer=f"{LOSSES}::TestByHand::test_truncated_without_old",
    ),
    Mutant(
        name="k3 with p and reference exchanged",
        file="trainer_node/training/losses.py",
        old="d_N = reference_logprobs_N - log_probs_N",
        new="d_N = log_probs_N - reference_logprobs_N",
        killer=f"{LOSSES}::TestByHand::test_kl",
    ),
    Mutant(
        name="vocabulary padding in the entropy",
        file="trainer_node/training/losses.py",
        old="valid_V = ids_V < vocab_size",
        new="valid_V = ids_V < vocab_size + 1",
        killer=f"{LOSSES}::test_log_probs_and_entropy_with_gradients",
    ),
    Mutant(
        name="the policy's log-probs at temperature 1",
        file="trainer_node/training/losses.py",
        old="            logits.div_(self.temperatures_N1[chunk])\n",
        new="            pass\n",
        killer=reference("dense_tied-lora-rl"),
    ),
    Mutant(
        name="the gradient without the temperature's factor",
        file="trainer_node/training/losses.py",
        old="else grad_N1 / self.temperatures_N1",
        new="else grad_N1",
        killer=reference("dense_tied-lora-rl"),
    ),
    Mutant(
        name="the policy's temperatures lost on the way to the micro-batch",
        file="trainer_node/training/batch.py",
        old="        temperatures_N=None if batch.temperatures_T is None else of(batch.temperatures_T),\n",
        new="",
        killer=f"{PACKING}::test_optional_tensors_go_along[temperatures]",
    ),
    Mutant(
        name="the reference's log-probs at temperature 1",
        file="trainer_node/training/trainer.py",
        old="replace(batch, scored_T=None)",
        new="replace(batch, scored_T=None, temperatures_T=None)",
        killer=ONE_RANK,
    ),
    Mutant(
        name="a forward request's log-probs at temperature 1",
        file="trainer_node/training/batch.py",
        old='temperatures_T=torch.from_numpy(arrays["temperatures"]) if optional else None,',
        new="temperatures_T=None,",
        killer=f"{PURE}::TestForward::test_temperatures",
    ),
    Mutant(
        name="each context rank has the first tokens' temperatures",
        file="trainer_node/training/passes.py",
        old="temperatures_M[micro.here_M]",
        new="temperatures_M[: len(micro.here_M)]",
        killer=parity("dense_tied-cp2-lora-rl"),
    ),
    Mutant(
        name="temperatures of sequences taken in the order of tokens",
        file="trainer_node/training/batch.py",
        old="np.repeat(given, lengths)",
        new="np.resize(given, lengths.sum())",
        killer=f"{PURE}::TestBatch::test_one_temperature_for_each_sequence_is_one_for_each_of_its_tokens",
    ),
    Mutant(
        name="a job's bound on the log-prob gap is not held",
        file="trainer_node/training/trainer.py",
        old="            gap.check(sums, loss)\n",
        new="",
        killer=ONE_RANK,
    ),
    Mutant(
        name="the bound on the log-prob gap holds for off-policy steps too",
        file="trainer_node/training/steps.py",
        old='update={"max_logprob_gap": None}',
        new="update={}",
        killer=ONE_RANK,
    ),
    Mutant(
        name="the log-prob gap averaged over tokens that have none",
        file="trainer_node/training/sums.py",
        old="self.logprob_gap / self.gap_tokens if",
        new="self.logprob_gap / self.num_tokens if",
        killer=f"{PURE}::TestGap::test_only_losses_that_take_the_samplers_log_probs_count",
    ),
    Mutant(
        name="a kernel whose gradient is NaN passes",
        file="trainer_node/model/kernel_check.py",
        old="if not difference <= BOUND:",
        new="if difference > BOUND:",
        killer=KERNELS,
    ),
    Mutant(
        name="a kernel's backward pass is not compared",
        file="trainer_node/model/kernel_check.py",
        old="for x in (output, *gradients)",
        new="for x in (output, *leaves)",
        killer=KERNELS,
    ),
    Mutant(
        name="the parts of a cuDNN from several folders",
        file="trainer_node/backends/cudnn.py",
        old="front.parent.glob",
        new="front.parent.parent.rglob",
        killer="tests/trainer_node/test_cudnn.py::test_the_users_cudnn_is_loaded_whole[CUDNN_HOME]",
    ),
    Mutant(
        name="a whole generation that was not yet in its place is forgotten",
        file="trainer_node/files/generations.py",
        old="    if is_whole(temp):\n",
        new="    if folder.exists() and is_whole(temp):\n",
        killer=f"{GENERATIONS}::test_a_crash_at_every_operation",
    ),
    Mutant(
        name="marked before the files are flushed and moved",
        file="trainer_node/files/generations.py",
        old="    write_file(temp / MARKER, lambda path: path.write_text(json.dumps(marker)), disk=disk)\n    disk.unlink(temp / BEGUN)\n"
        "    _replace(folder, temp, disk=disk)\n",
        new="    _replace(folder, temp, disk=disk)\n    write_file(folder / MARKER, lambda path: path.write_text(json.dumps(marker)), disk=disk)\n",
        killer=f"{GENERATIONS}::test_a_crash_at_every_operation",
    ),
    Mutant(
        name="a file that has changed is loaded",
        file="trainer_node/files/generations.py",
        old="        if found != wanted.get(name):\n",
        new="        if not found:\n",
        killer=f"{GENERATIONS}::test_a_changed_an_extra_and_a_missing_file_are_named",
    ),
    Mutant(
        name="each rank checks the same files",
        file="trainer_node/files/generations.py",
        old="if number % parts == part\n",
        new="if number % parts == 0\n",
        killer=f"{GENERATIONS}::test_ranks_share_the_reading",
    ),
    Mutant(
        name="half removed it is nobody's",
        file="trainer_node/files/generations.py",
        old="        disk.rename(folder / MARKER, folder / BEGUN)\n",
        new="        disk.unlink(folder / MARKER)\n",
        killer=f"{GENERATIONS}::test_a_crash_at_every_operation",
    ),
    Mutant(
        name="files not flushed before the marker",
        file="trainer_node/files/generations.py",
        old="    disk.write(temp, write)\n    disk.flush(temp)\n",
        new="    disk.write(temp, write)\n",
        killer=f"{GENERATIONS}::test_a_crash_at_every_operation",
    ),
    Mutant(
        name="double finalisation: divided on every call and at the step",
        file="trainer_node/training/passes.py",
        old="    total = terms.total * weight\n",
        new="    total = terms.total * weight / count\n",
        killer=reference("dense_tied-lora-sft"),
    ),
    Mutant(
        name="the reference is the policy itself",
        file="trainer_node/adapters/lora.py",
        old="before, self.mode = self.mode, mode",
        new='before, self.mode = self.mode, "adapters"',
        killer=ONE_RANK,
    ),
    Mutant(
        name="trained on the served weights, the input gets the adapter's gradient twice",
        file="trainer_node/adapters/dense_lora.py",
        old="_Learn.apply(out, self(x.detach()), ",
        new="_Learn.apply(out, self(x), ",
        killer=f"{SERVED}[dense]",
    ),
    Mutant(
        name="the same of experts",
        file="trainer_node/model/experts.py",
        old="added1, added2 = (None, None) if ctx.is_served else (fc1, fc2)",
        new="added1, added2 = fc1, fc2",
        killer=f"{SERVED}[moe]",
    ),
    Mutant(
        name="served weights of the step before",
        file="trainer_node/training/trainer.py",
        old="return served.all() if numerics",
        new="return served.all(anew=False) if numerics",
        killer=f"{SERVED}[dense]",
    ),
    Mutant(
        name="a layer of experts shares the buffer of its shared experts",
        file="trainer_node/training/served_weights.py",
        old="return type(self.module), self.dtype",
        new="return nn.Module, self.dtype",
        killer="tests/trainer_node/test_adapters_families.py::test_adapters_are_pefts"
        "[qwen3_5_moe-all-linear]",
    ),
    Mutant(
        name="entropy bonus with the wrong sign",
        file="trainer_node/training/losses.py",
        old="total = total - spec.entropy_bonus * entropy",
        new="total = total + spec.entropy_bonus * entropy",
        killer=reference("dense_tied-lora-rl"),
    ),
    Mutant(
        name="adapter scale forgotten",
        file="trainer_node/adapters/dense_lora.py",
        old="        return h * self.scale",
        new="        return h",
        killer=reference("dense_tied-lora-sft"),
    ),
    Mutant(
        name="sums not reduced over data-parallel ranks",
        file="trainer_node/training/passes.py",
        old="    dist.all_reduce(total)\n    dist.all_reduce(worst",
        new="    dist.all_reduce(worst",
        killer=parity("dense_tied-dp2-lora-sft"),
    ),
    Mutant(
        name="gradients not reduced over data-parallel ranks",
        file="trainer_node/training/gradients.py",
        old="dense, parallel_state.get_data_parallel_group(with_context_parallel=True), 1 / denominator",
        new="dense, tensor_group, 1 / denominator",
        killer=parity("dense_tied-dp2-lora-sft"),
    ),
    Mutant(
        name="a tied embedding's two gradients not added",
        file="trainer_node/training/gradients.py",
        old="        all_reduce_flat(tied, parallel_state.get_embedding_group(), 1.0)\n",
        new="        pass\n",
        killer=parity("dense_tied-pp2-full-sft"),
    ),
    Mutant(
        name="the q and k norms' partial gradients averaged",
        file="trainer_node/model/parameters.py",
        old="partial=not split and _sees_own_heads(bare, config),",
        new="partial=False,",
        killer=parity("dense_tied-tp2-no-sequence-full-sft"),
    ),
    Mutant(
        name="a step does not wait for the copy of the moments",
        file="trainer_node/training/trainer.py",
        old="        self.behind.may_step()\n",
        new="",
        killer=behind("waits"),
    ),
    Mutant(
        name="moments of another save taken",
        file="trainer_node/state/checkpoint.py",
        old='if marker.get("save") != meta["save"]:',
        new="if False:",
        killer=behind("mixtures"),
    ),
    Mutant(
        name="a save in the background that failed is forgotten",
        file="trainer_node/state/checkpoint.py",
        old="    return not why\n",
        new="    return True\n",
        killer=behind("full_disk"),
    ),
    Mutant(
        name="a step without a checkpoint to begin at is saved behind",
        file="trainer_node/state/checkpoint.py",
        old="if found is None or trainer.pending.num_batches:",
        new="if found is None:",
        killer=behind("no_base"),
    ),
    Mutant(
        name="the repeated step's weights not compared",
        file="trainer_node/state/remake.py",
        old="        if count := int(differs.sum()):",
        new="        if count := 0 * int(differs.sum()):",
        killer=behind("lost"),
    ),
    Mutant(
        name="the repeated step's weights kept",
        file="trainer_node/state/remake.py",
        old="    loaded = checkpoint.load(trainer, folder, with_moments=False)\n    found",
        new="    loaded = checkpoint.Loaded(version=2, client_state={}, dropped_batches=0, rng_restored=True)\n    found",
        killer=behind("lost"),
    ),
    Mutant(
        name="the step made again from whatever has the base's name",
        file="trainer_node/state/checkpoint.py",
        old="if only_save is not None and",
        new="if only_save is None and",
        killer=behind("lost"),
    ),
    Mutant(
        name="sharded tensor dropped on save",
        file="trainer_node/state/checkpoint.py",
        old="            for piece in p.pieces:\n                shard = ",
        new="            for piece in p.pieces[:1]:\n                shard = ",
        killer=FULL_ONE_RANK,
    ),
    Mutant(
        name="bf16 weights stepped without a master",
        file="trainer_node/training/optimizer.py",
        old="p.param.detach().float()",
        new="p.param.detach()",
        killer=FULL_ONE_RANK,
    ),
    Mutant(
        name="norms decay",
        file="trainer_node/training/optimizer.py",
        old='optim.weight_decay if group["decays"] else 0.0',
        new="optim.weight_decay",
        killer=reference("dense_tied-full-sft"),
    ),
    Mutant(
        name="owners keep their step to themselves",
        file="trainer_node/training/optimizer.py",
        old="        for partition in self._partitions:\n            partition.broadcast()\n",
        new="        pass\n",
        killer=parity("dense_tied-dp2-full-sft"),
    ),
    Mutant(
        name="the output layer's adapter is not used",
        file="trainer_node/adapters/lora.py",
        old='return weight_VH if self._head is None or self.mode == "base" else self._head.sum()',
        new="return weight_VH",
        killer="tests/trainer_node/test_topologies.py"
        "::test_two_steps_equal_transformers_and_peft[dense_untied_head]",
    ),
    Mutant(
        name="without sequence parallelism, each tensor rank keeps its part of the head's gradient",
        file="trainer_node/adapters/dense_lora.py",
        old='self.has_partial_a = linear.place.split == "rows"',
        new="self.has_partial_a = False",
        killer="tests/trainer_node/test_adapters_families.py"
        "::test_adapters_over_several_ranks[llama-lm_head-tp2-no-sequence]",
    ),
    Mutant(
        name="the reference adapter is the policy's own",
        file="trainer_node/training/trainer.py",
        old="with self.references.in_place(loss.kl.adapter_dir):",
        new="with self.references.in_place(None):",
        killer=ONE_RANK,
    ),
    Mutant(
        name="gradients stay where they were when the rest is offloaded",
        file="trainer_node/training/trainer.py",
        old="yield param.grad\n            yield from module.buffers()",
        new="pass\n            yield from module.buffers()",
        killer=ONE_RANK,
    ),
    Mutant(
        name="what is missing in an adapter keeps its values",
        file="trainer_node/adapters/peft_io.py",
        old="missing = [_stored_name(k) for k in expected if k not in found]",
        new="missing: list[str] = []",
        killer=f"{PEFT}::test_tensors",
    ),
    Mutant(
        name="an adapter of another alpha is taken",
        file="trainer_node/adapters/peft_io.py",
        old='(("r", lora.rank), ("lora_alpha", lora.alpha))',
        new='(("r", lora.rank),)',
        killer=f"{PEFT}::test_settings",
    ),
    Mutant(
        name="dropout without its scale",
        file="trainer_node/adapters/dropout.py",
        old="x / (1.0 - self.p)",
        new="x",
        killer=f"{DROPOUT}::test_one_rank_equals_peft_with_the_same_masks",
    ),
    Mutant(
        name="tensor ranks drop the same of their different features",
        file="trainer_node/adapters/dropout.py",
        old="first = self._rank * x.shape[-1] if sharded else 0",
        new="first = 0",
        killer=f"{DROPOUT}::test_every_topology_draws_the_same_masks[tp2]",
    ),
    Mutant(
        name="tokens counted per rank",
        file="trainer_node/training/passes.py",
        old="        num_tokens=batch.num_loss_tokens,\n",
        new="        num_tokens=sum(report.numel() > 0 for report in reports),\n",
        killer=parity("dense_tied-dp2-lora-sft"),
    ),
    Mutant(
        name="gradients of adapters that tensor ranks have copies of not reduced",
        file="trainer_node/training/gradients.py",
        old="        all_reduce_flat(parts, group, 1.0)\n",
        new="        pass\n",
        killer=parity("dense_tied-tp2-lora-sft"),
    ),
    Mutant(
        name="a column-parallel adapter's hidden gradient not reduced over tensor ranks",
        file="trainer_node/adapters/dense_lora.py",
        old="else copy_to_tensor_model_parallel_region\n            )",
        new="else lambda h, group: h\n            )",
        killer=parity("dense_tied-tp2-no-sequence-lora-sft"),
    ),
    Mutant(
        name="a stale adapter is exported",
        file="trainer_node/model/whole_adapters.py",
        old="def gather_deltas(model",
        new="_KEPT = []\n\n\n@lambda f: lambda model: (_KEPT or _KEPT.append(f(model))) and _KEPT[0] or _KEPT[0]\ndef gather_deltas(model",
        killer=parity("dense_tied-tp2-no-sequence-lora-sft"),
    ),
    Mutant(
        name="gate and up swapped",
        file="trainer_node/adapters/dense_lora.py",
        old="self.names = [linear.name for linear in linears]",
        new="self.names = [linear.name for linear in reversed(linears)]",
        killer=reference("dense_tied-lora-sft"),
    ),
    Mutant(
        name="every HF tensor begins where the parameter does",
        file="trainer_node/layout/strides.py",
        old="tensor.storage_offset() + self.offset)",
        new="tensor.storage_offset())",
        killer=reference("dense_tied-full-sft"),
    ),
    Mutant(
        name="q, k and v of an adapter not interleaved by query group",
        file="trainer_node/adapters/dense_lora.py",
        old="self._groups = _num_groups(rows, out_features)",
        new="self._groups = 1",
        killer=reference("dense_tied-lora-sft"),
    ),
    Mutant(
        name="q, k and v of the parameters taken as if they were one query group",
        file="trainer_node/layout/strides.py",
        old="            self.rows.outer_stride,\n            self.rows.inner_stride,\n",
        new="            self.rows.inner * self.rows.inner_stride,\n            self.rows.inner_stride,\n",
        killer=reference("dense_tied-full-sft"),
    ),
    Mutant(
        name="every expert-parallel rank has the first experts",
        file="trainer_node/adapters/lora.py",
        old="[int(first), 0, 0]",
        new="[0, 0, 0]",
        killer=parity("moe-ep2-lora-sft"),
    ),
    Mutant(
        name="padded rows counted",
        file="trainer_node/training/batch.py",
        old="    scored_R = np.flatnonzero(scored_T.numpy()[rows_R])\n    places_N, rows_N = places_R[scored_R], rows_R[scored_R]\n    owners_R = np.repeat(np.arange(len(sequences)), np.array(sizes, dtype=np.int64))\n",
        new="    scored_R = np.flatnonzero(np.resize(scored_T.numpy()[rows_R], length))\n    places_N, rows_N = scored_R, np.resize(rows_R, length)[scored_R]\n    owners_R = np.resize(np.repeat(np.arange(len(sequences)), sizes), length)\n",
        killer=parity("dense_tied-pp2-lora-sft"),
    ),
    Mutant(
        name="gate and up swapped in the stacked experts",
        file="trainer_node/model/grouped.py",
        old="    gate, up = y.chunk(2, dim=1)\n",
        new="    up, gate = y.chunk(2, dim=1)\n",
        killer=reference("moe-lora-sft"),
    ),
    Mutant(
        name="routing weights not brought into the order of the experts' rows",
        file="trainer_node/model/experts.py",
        old="probs.flatten().index_select(0, rows.choice_N)",
        new="probs.flatten()",
        killer=reference("moe-lora-sft"),
    ),
    Mutant(
        name="gate's gradient of A given to up as well",
        file="trainer_node/model/experts.py",
        old="found.append(grad_A_EQI[:, i * padded : i * padded + rank].to",
        new="found.append(grad_A_EQI[:, :rank].to",
        killer=reference("moe-lora-rl"),
    ),
    Mutant(
        name="the next-token shift within a context rank's chunks",
        file="trainer_node/training/batch.py",
        old="predictors_N = local[pack.predictors_N.numpy()]",
        new="predictors_N = local[pack.predictors_N.numpy() + 1] - 1",
        killer=parity("dense_tied-cp2-lora-sft"),
    ),
    Mutant(
        name="gradients not summed over context ranks",
        file="trainer_node/training/gradients.py",
        old="get_data_parallel_group(with_context_parallel=True), 1 / denominator",
        new="get_data_parallel_group(with_context_parallel=False), 1 / denominator",
        killer=parity("dense_tied-cp2-lora-sft"),
    ),
    Mutant(
        name="gradients of adapters that expert-tensor ranks have copies of not reduced",
        file="trainer_node/training/gradients.py",
        old="[p.grad for p in params if p.expert and not p.split], tensor_group(expert=True), 1.0\n",
        new="[], tensor_group(expert=True), 1.0\n",
        killer=parity("moe-tp2-etp2-lora-sft"),
    ),
    Mutant(
        name="every mini-batch has the first one's tokens",
        file="trainer_node/training/steps.py",
        old="slice(ends[first], ends[last])",
        new="slice(0, ends[last] - ends[first])",
        killer=f"{OPERATIONS}::test_topology_changes_nothing[dp2]",
    ),
    Mutant(
        name="a piece that two ranks have is sent twice",
        file="trainer_node/export/gather_plan.py",
        old="            if one.overlaps(box):",
        new="            if False:",
        killer=f"{GATHER}::test_pieces_that_are_not_the_tensor",
    ),
    Mutant(
        name="a piece that no rank has is left out",
        file="trainer_node/export/gather_plan.py",
        old="    if missing:\n",
        new="    if False:\n",
        killer=f"{GATHER}::test_pieces_that_are_not_the_tensor",
    ),
    Mutant(
        name="a row-parallel piece is placed as if it were contiguous",
        file="trainer_node/export/gather_plan.py",
        old="offset=at, row_stride=width)",
        new="offset=at, row_stride=box.columns)",
        killer=f"{GATHER}::test_bytes_equal_the_export[tp2]",
    ),
    Mutant(
        name="a sequence-level loss of each context rank's part",
        file="trainer_node/training/losses.py",
        old="        dist.all_reduce(whole_PN, group=group)\n",
        new="        pass\n",
        killer=f"{OPERATIONS}::test_topology_changes_nothing[pp2cp2]",
    ),
    Mutant(
        name="a checkpoint without one of the model's tensors is loaded",
        file="trainer_node/model/build.py",
        old="        checkpoint.check_names(set().union(*names))\n",
        new="",
        killer=EXTRAS,
    ),
    Mutant(
        name="another boundary of YaRN's ramp than transformers'",
        file="trainer_node/model/providers.py",
        old='rope.get("beta_fast") or 32.0',
        new='rope.get("beta_fast") or 16.0',
        killer=EXTRAS,
    ),
    Mutant(
        name="the indices of both probes are the same",
        file="trainer_node/layout/layouts.py",
        old="CODE = 0x15555555",
        new="CODE = 0",
        killer=f"{PROBE}::test_bridges_mappings[1]",
    ),
    Mutant(
        name="the other tensor ranks' shards are taken for this one's",
        file="trainer_node/layout/layouts.py",
        old="((tensor ^ code) + rank * numel) ^ code",
        new="(tensor + rank * 0)",
        killer=f"{PROBE}::test_bridges_mappings[2]",
    ),
    Mutant(
        name="a probe leaves its answer in Bridge's mapping",
        file="trainer_node/layout/layouts.py",
        old="    twin = copy.copy(mapping)\n",
        new="    return mapping\n    twin = copy.copy(mapping)\n",
        killer=f"{PROBE}::test_bridges_mappings[1]",
    ),
    Mutant(
        name="each piece of a tensor gets the adapter's first rows",
        file="trainer_node/export/wire_export.py",
        old="box=tensor.within(placed.box))",
        new="box=replace(placed.box, first_row=0, first_column=0))",
        killer=f"{PROBE}::test_an_adapter_is_cut_to_the_pieces",
    ),
    Mutant(
        name="pieces are not compared with the indices",
        file="trainer_node/layout/strides.py",
        old="    for piece in layout.pieces:\n        box = piece.box\n",
        new="    for piece in ():\n        box = piece.box\n",
        killer=f"{PROBE}::test_what_the_pieces_are_not",
    ),
    Mutant(
        name="the experts' probabilities normalised where HF does not",
        file="trainer_node/model/providers.py",
        old="provider.moe_router_pre_softmax = not normalises",
        new="provider.moe_router_pre_softmax = normalises",
        killer=family("olmoe"),
    ),
    Mutant(
        name="windows in the other layers",
        file="trainer_node/model/providers.py",
        old="[int(w) for w in is_window]",
        new="[int(not w) for w in is_window]",
        killer=family("gpt_oss"),
    ),
    Mutant(
        name="norms keep TransformerEngine's epsilon",
        file="trainer_node/model/providers.py",
        old="            module.eps = provider.layernorm_epsilon\n",
        new="            pass\n",
        killer=family("gemma3"),
    ),
    Mutant(
        name="multi-latent attention's plain queries get a norm",
        file="trainer_node/model/providers.py",
        old="    _plain_query_projections()\n    # On",
        new="    # On",
        killer=family("deepseek_v2_lite"),
    ),
    Mutant(
        name="a norm over all heads without the other ranks' part of its gradient",
        file="trainer_node/model/providers.py",
        old="            module.forward = functools.partial(_norm_over_ranks, module)\n",
        new="            pass\n",
        killer=over_ranks("minimax_m2-2-1-1-1"),
    ),
    Mutant(
        name="the delta rule's norm has its own heads' gradient only",
        file="trainer_node/model/parameters.py",
        old='return name.endswith("out_norm.weight") or (',
        new="return False or (",
        killer=without_sequence("qwen3_5_moe"),
    ),
    Mutant(
        name="a language part under its own names",
        file="trainer_node/hf/language_part.py",
        old="return own + name.removeprefix(theirs)",
        new="return name",
        killer="tests/trainer_node/test_language_part.py::test_a_model_that_sees[gemma3-1]",
    ),
    Mutant(
        name="a tower stays at home",
        file="trainer_node/hf/language_part.py",
        old="            for name in kept:\n",
        new="            for name in ():\n",
        killer="tests/trainer_node/test_language_part.py::test_a_model_that_sees[gemma3-1]",
    ),
    Mutant(
        name="heads of further tokens pass for a tower",
        file="trainer_node/hf/language_part.py",
        old="        and not _FURTHER.match(name)\n",
        new="",
        killer="tests/trainer_node/test_language_part.py::test_a_model_that_sees[qwen3_5_moe-2]",
    ),
    Mutant(
        name="an image's token is a word",
        file="trainer_node/training/batch.py",
        old="    if tower_tokens and len(places):\n",
        new="    if False:\n",
        killer="tests/trainer_node/test_language_part.py::test_a_model_that_sees[gemma3-1]",
    ),
    Mutant(
        name="stacked experts merged as if HF stored them like linears",
        file="trainer_node/adapters/linears.py",
        old="transposed=True)",
        new="transposed=False)",
        killer="tests/trainer_node/test_adapters_families.py::test_adapters_are_pefts"
        "[gpt_oss-experts.down_proj]",
    ),
    Mutant(
        name="splice check allows any log-prob",
        file="trainer_node/tools/check_model.py",
        old='Row("log-probs", apart <= bound,',
        new='Row("log-probs", True,',
        killer="tests/trainer_node/test_check_model.py::test_a_window_that_is_off_by_one_is_found",
    ),
]

ELSEWHERE = {
    "attention over the sequences of a pack": admitted("deepseek_v3"),
    "off-by-one log-prob shift": family("gpt_oss"),
    "forward results returned a row early": admitted("gpt_oss"),
    "adapter scale forgotten": adapters("gpt_oss"),
    "gate and up swapped": adapters("glm4_moe"),
    "q, k and v of an adapter not interleaved by query group": adapters("glm4_moe"),
    "gate and up swapped in the stacked experts": adapters("deepseek_v3"),
    "routing weights not brought into the order of the experts' rows": adapters("deepseek_v3"),
    "gate's gradient of A given to up as well": adapters("olmoe"),
    "every expert-parallel rank has the first experts": over_adapters("deepseek_v2-ep2"),
    "gradients not summed over context ranks": over_adapters("deepseek_v2-cp2"),
    "gradients of adapters that tensor ranks have copies of not reduced": over_adapters(
        "deepseek_v2-tp2"
    ),
}
"""Mutants that tests of Qwen3 kill -> the test of another family that has to kill them too."""
MUTANTS += [
    replace(mutant, name=f"{mutant.name}, elsewhere", killer=ELSEWHERE[mutant.name])
    for mutant in MUTANTS
    if mutant.name in ELSEWHERE
]
assert sum(m.name.endswith(", elsewhere") for m in MUTANTS) == len(ELSEWHERE)


def copy_of_the_repository(folder: Path) -> Path:
    """What the killers need; compiled modules too, which are as old as their sources still."""
    for package in mutantserver.OURS:
        shutil.copytree(REPO / package, folder / package)
    shutil.copy(REPO / "pyproject.toml", folder)
    return folder


def mutated_copy(mutant: Mutant, folder: Path) -> Path:
    path = copy_of_the_repository(folder) / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    return folder


class Runs:
    """What became of the killers on each copy; all that were asked for run from the start, two at a
    time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._results = folder, dict[str, dict[str, Any]]()
        self._requests, self._told = dict[str, bytes](), set[str]()
        self._asked, self._rest = 0, b""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_node.mutantserver"],
            cwd=REPO,
            env=cpu_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def ask(self, name: str, copy: Path, tests: list[str]) -> None:
        request = {
            "name": name,
            "folder": str(copy),
            "tests": tests,
            "log": str(self.log(name)),
            "timeout_s": RUN_TIMEOUT_S,
        }
        self._requests[name] = json.dumps(request).encode() + b"\n"
        self._send(name)

    def _send(self, name: str) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(self._requests[name])
        self._server.stdin.flush()
        self._asked += 1

    def log(self, name: str) -> Path:
        return self._folder / f"{name.replace('/', ' ')}.log"

    def result(self, name: str) -> tuple[int | None, str]:
        """Pytest's exit code and output; None: it did not end."""
        if name in self._told:  # asked for again, by the test's second run
            self._results.pop(name)
            self._send(name)
        self._told.add(name)
        deadline = time.monotonic() + RUN_TIMEOUT_S + 30.0 * self._asked
        assert self._server.stdout is not None
        while name not in self._results:
            left = deadline - time.monotonic()
            assert left > 0, f"no answer for {name!r}"
            if select.select([self._server.stdout], [], [], left)[0]:
                read = os.read(self._server.stdout.fileno(), 1 << 16)
                assert read, "the server has ended"
                *lines, self._rest = (self._rest + read).split(b"\n")
                self._results |= {answer["name"]: answer for answer in map(json.loads, lines)}
        return self._results[name]["code"], self.log(name).read_text()[-4000:]

    def close(self) -> None:
        self._server.terminate()  # which ends its runs
        self._server.wait(timeout=30)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Everything that this session has chosen is under way."""
    runs = Runs(tmp_path_factory.mktemp("runs"))
    try:
        params = [
            item.callspec.params for item in request.session.items if hasattr(item, "callspec")
        ]
        chosen = [p["mutant"] for p in params if "mutant" in p]
        if test_the_killers_pass_without_a_mutation in (
            getattr(item, "function", None) for item in request.session.items
        ):
            killers = sorted(
                {m.killer.partition("::")[0]: m.killer for m in reversed(MUTANTS)}.values()
            )
            runs.ask(
                UNMUTATED, copy_of_the_repository(tmp_path_factory.mktemp("unmutated")), killers
            )
        for n, mutant in enumerate(m for m in chosen if m.applies):
            runs.ask(
                mutant.name,
                mutated_copy(mutant, tmp_path_factory.mktemp(f"copy_{n}")),
                [mutant.killer],
            )
        yield runs
    finally:
        runs.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed(mutant: Mutant, runs: Runs) -> None:
    assert mutant.applies, f"{mutant.file} has changed: the mutant {mutant.name!r} does not apply"
    code, output = runs.result(mutant.name)
    assert code == 1, (
        f"{mutant.name!r} survived {mutant.killer} (exit code {code}; null: it did not "
        f"end):\n{output}"
    )


def test_the_killers_pass_without_a_mutation(runs: Runs) -> None:
    """One of each file: that a copy and a fork alone make nothing fail. The suite itself runs all
    of them.
    """
    code, output = runs.result(UNMUTATED)
    assert code == 0, output
