"""Wrong versions of the production code, and for each the check that must fail on it. A mutant that
survives fails this suite.

A mutant is one replacement in one source file of a copy of the repository; its killer is a test
that passes on the unmutated copy. The copies' tests run in forks of one process
(`mutantserver.py`), two at a time.
"""

from __future__ import annotations

import ast
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

LOSSES = "tests/trainer_node/training/test_losses.py"
PACKING = "tests/trainer_node/training/test_packing.py"
GAE = "tests/trainer_node/training/test_gae.py"
PREFIXES = "tests/trainer_node/training/test_prefixes.py"
SHARED = f"{PREFIXES}::test_shared_prefixes_change_nothing[dense_tied-sizes0]"
GENERATIONS, OPERATIONS = (
    "tests/trainer_node/files/test_generations.py",
    "tests/trainer_node/training/test_operations.py",
)
DROPOUT = "tests/trainer_node/adapters/test_dropout.py"
EDGES = "tests/weight_transfer/test_edges.py"
CHANGES = "tests/weight_transfer/test_changes.py"
MERGES = "tests/trainer_node/export/test_changes.py::test_changed_elements_make_what_would_be_sent"
ELEMENTS = "tests/orchestrator/test_elements.py"
RESUMED = f"{ELEMENTS}::test_a_resumed_orchestrator_sends_everything_where_something_is_not_known"
GATHER = "tests/trainer_node/export/test_gather.py"
ROUNDING = "tests/trainer_node/adapters/test_rounding.py"
SERVED = "tests/trainer_node/training/test_served_weights.py::test_the_trainer_computes_with_what_is_served"
PEFT = "tests/trainer_node/adapters/test_peft_io.py"
EXTRAS = "tests/trainer_node/test_extras.py::test_extras"
FUSED = "tests/trainer_node/export/test_fp8_export.py::test_the_fused_kernels_interpreted"
BLOCKS = "tests/trainer_node/hf/test_fp8_blocks.py"
READAPTED = "tests/trainer_node/state/test_readapted.py::test_a_new_adapter_is_one_from_the_start"
PROBE = "tests/trainer_node/layout/test_probe.py"
KERNELS = "tests/trainer_node/model/test_kernels.py::test_attention_kernels_are_checked[gemma3]"
CHAIN = "tests/orchestrator/test_replicas.py::test_in_a_chain_the_trainer_sends_to_the_first_and_a_failure_is_followed_by_none"
BEGUN = "tests/trainer_node/training/test_begun.py::test_one_rank[dense_tied]"
ONE_RANK = f"{OPERATIONS}::test_one_rank_equals_transformers_and_peft[dense_untied]"
FULL_ONE_RANK = "tests/trainer_node/training/test_full.py::test_two_steps_equal_transformers[moe]"
UNMUTATED = "the repository as it is"
RUN_TIMEOUT_S = 200.0


def reference(cell: str) -> str:
    """A cell of the parity matrix on one rank, against transformers, PEFT and torch.optim."""
    return f"tests/trainer_node/training/test_parity.py::test_one_rank_equals_the_reference[{cell}]"


def family(name: str) -> str:
    """A family on one rank, against transformers."""
    return (
        f"tests/trainer_node/model/test_families.py::test_a_family_is_what_transformers_has[{name}]"
    )


def without_sequence(name: str) -> str:
    """A family over tensor ranks without sequence parallelism, against transformers."""
    test = "test_a_family_over_tensor_ranks_that_share_no_sequence"
    return f"tests/trainer_node/model/test_families.py::{test}[{name}]"


def over_ranks(cell: str) -> str:
    """A family over tensor ranks, against transformers."""
    return f"tests/trainer_node/model/test_families.py::test_a_family_over_several_ranks[{cell}]"


def adapters(name: str) -> str:
    """A family's adapters on one rank, against PEFT."""
    test = "test_adapters_are_pefts"
    return f"tests/trainer_node/adapters/test_adapters_families.py::{test}[{name}-all-linear]"


def over_adapters(cell: str) -> str:
    """A family's adapters over several ranks, against PEFT."""
    test = "test_adapters_over_several_ranks"
    return f"tests/trainer_node/adapters/test_adapters_families.py::{test}[{cell}]"


def admitted(name: str) -> str:
    """`splice check` on a family, by the trainer's own passes."""
    return f"tests/trainer_node/tools/test_check_model.py::test_every_family_is_admitted[{name}]"


SENT_LORA = "tests/trainer_node/export/test_rollout_lora.py::test_base_and_adapter_are_sent[1]"


def behind(what: str) -> str:
    """Checks of the moments that are written behind."""
    return f"tests/trainer_node/state/test_behind.py::test_one_rank[{what}]"


def parity(cell: str) -> str:
    """A cell of the parity matrix, against one rank."""
    return f"tests/trainer_node/training/test_parity.py::test_topology_changes_nothing[{cell}]"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` is exactly once in the function."""

    name: str
    killer: str
    file: str
    function: str
    """"function", "Class.method", "function.inner", or "" for the whole file."""
    old: str
    new: str

    def source(self) -> tuple[str, str, str]:
        """The file before the function, the function, and the rest."""
        text = (REPO / self.file).read_text()
        node: Any = ast.parse(text)
        for name in filter(None, self.function.split(".")):
            node = next((n for n in ast.walk(node) if getattr(n, "name", None) == name), None)
            if node is None:
                return text, "", ""
        lines = text.splitlines(keepends=True)
        decorators = getattr(node, "decorator_list", [])
        first = min([n.lineno for n in [*decorators, node]]) - 1 if self.function else 0
        last = node.end_lineno if self.function else len(lines)
        return "".join(lines[:first]), "".join(lines[first:last]), "".join(lines[last:])

    @property
    def applies(self) -> bool:
        """False: the source has changed under it."""
        return self.source()[1].count(self.old) == 1


# A table: three lines a mutant.
# fmt: off
MUTANTS = [
    # First, because it mostly waits.
    Mutant("a step is asked for twice by an orchestrator that was restarted", "tests/orchestrator/test_resume.py::test_killed_while_idle_and_in_the_step",
           "orchestrator/trainer_requests.py", "TrainerRequests.ask",
           'f"{request.request_id}-{incarnation[:12]}"', 'new_id("again")'),
    Mutant("the replica after the one that failed is blamed", CHAIN,
           "orchestrator/publication/publisher.py", "Publisher.publish",
           "isinstance(failure, JobFailed) and not publication.chain:", "isinstance(failure, JobFailed):"),
    Mutant("a failed chain is tried again", CHAIN,
           "orchestrator/publication/publisher.py", "Publisher.publish",
           "replace(publication, chain=False)", "replace(publication)"),
    Mutant("after a failure no chain is formed again", CHAIN,
           "orchestrator/publication/members.py", "Members.join",
           "wanted == self.joined and chain == self._in_chain:", "wanted == self.joined:"),
    Mutant("a chain is formed in every publication", "tests/orchestrator/test_replicas.py::test_a_chain_that_fails_again_and_again_rests",
           "orchestrator/publication/publisher.py", "Publisher.publish",
           "may_chain and not self._chain_rests.take()", "may_chain"),
    Mutant("a batch that was begun is used for any other", BEGUN,
           "trainer_node/training/ahead.py", "Ahead.take",
           "not _are_same(announced, self._buffers, message, buffers):", "False:"),
    Mutant("the loss of a batch that was begun does not matter", BEGUN,
           "trainer_node/training/ahead.py", "_are_same",
           'name != "optim"]', 'name not in ("optim", "loss")]'),
    Mutant("gradients of a forgotten batch stay", BEGUN,
           "trainer_node/training/trainer.py", "Trainer.drop_begun",
           "if self.begun is not None:\n            self.drop_pending()", "self.begun = None"),
    Mutant("a batch that was begun outlives its weights", BEGUN,
           "trainer_node/training/trainer.py", "Trainer.drop_pending",
           "self.pending, self.begun = Pending(), None", "self.pending = Pending()"),
    Mutant("a batch is begun after its job", BEGUN,
           "trainer_node/training/ahead.py", "Ahead.take",
           "link.next_batch = None", "pass"),
    Mutant("packs are begun however little of the write is left", BEGUN,
           "trainer_node/training/ahead.py", "",
           "LEAST_SHARE = 0.5", "LEAST_SHARE = 0.0"),
    Mutant("B is sent without its scale", SENT_LORA,
           "trainer_node/export/adapter_tensors.py", "AdapterTensors.take",
           "matrix.float() * self._model.scale if is_b else matrix", "matrix"),
    Mutant("the adapters of the plan are sent", SENT_LORA,
           "trainer_node/export/wire_export.py", "WireExport.start",
           "self._adapters.take()", "self._adapters.take() if limit < 0 else None"),
    Mutant("adapters that travel are merged too", SENT_LORA,
           "trainer_node/export/wire_export.py", "WireExport.__init__",
           'if model.config.serves_merged:', "if True:"),
    Mutant("kept adapters are taken for what was sent", SENT_LORA,
           "trainer_node/export/changes.py", "Published.__init__",
           "model.config.serves_merged and not model.trains_all", "not model.trains_all"),
    Mutant("thresholds are counted from the piece", f"{ROUNDING}::test_a_piece_has_the_bits_of_the_whole",
           "trainer_node/adapters/rounding.py", "Corner.word",
           "(rows + self.row)", "(rows + 0)"),
    Mutant("thresholds are taken off", f"{ROUNDING}::test_every_bit_of_a_threshold_counts",
           "trainer_node/adapters/rounding.py", "_bf16",
           "sum_HW.view(torch.int32) + h16_HW *", "sum_HW.view(torch.int32) - h16_HW *"),
    Mutant("thresholds have one bit less", f"{ROUNDING}::test_thresholds_are_uniform_and_unrelated",
           "trainer_node/adapters/rounding.py", "thresholds",
           "None] * y_W, 16)", "None] * y_W, 17)"),
    Mutant("a threshold is one too large", f"{ROUNDING}::test_every_bit_of_a_threshold_counts",
           "trainer_node/adapters/rounding.py", "_bf16",
           "sum_HW.abs() < BF16_TOP)", "sum_HW.abs() < BF16_TOP) + 1"),
    Mutant("the merge rounds to nearest", f"{ROUNDING}::test_bf16_equals_the_integers_of_the_reference[shape1]",
           "trainer_node/adapters/rounding.py", "merge_matrix",
           'rounding.mode == "stochastic"', "False"),
    Mutant("a tie of two roundings stays", f"{ROUNDING}::test_a_tie_of_two_roundings_is_decided_by_the_first_ones_error",
           "trainer_node/adapters/rounding.py", "chain",
           "single_HW[row, column]", "_"),
    Mutant("a tie below the normal numbers stays", f"{ROUNDING}::test_sums_below_the_normal_numbers",
           "trainer_node/adapters/rounding.py", "chain",
           "not is_plain:", "False:"),
    Mutant("no delta changes a negative zero", f"{ROUNDING}::test_no_delta_copies_the_bits[rounding0-dtype0]",
           "trainer_node/adapters/rounding.py", "merge_matrix",
           "torch.where(delta == 0, weight, found)", "found"),
    Mutant("finite weights become infinite", f"{ROUNDING}::test_finite_stays_finite_and_infinity_infinite[dtype0]",
           "trainer_node/adapters/rounding.py", "_bf16",
           "h16_HW * (sum_HW.abs() < BF16_TOP)", "h16_HW"),
    Mutant("an adapter's product is rounded away", "tests/trainer_node/adapters/test_small_update.py::test_what_is_added_to_rounded_numbers_is_added_in_the_mean",
           "trainer_node/adapters/products.py", "_Added.forward",
           "into.copy_(sum_of(one, other))", "torch.add(one, other, out=into)"),
    Mutant("the experts' products are rounded away", "tests/trainer_node/adapters/test_small_update.py::test_a_small_update_is_in_the_forward_pass[moe]",
           "trainer_node/model/experts.py", "_ExpertMlp.forward",
           "keeps_all=True", "keeps_all=False"),
    Mutant("a loaded version is merged as the config says", "tests/trainer_node/adapters/test_small_update.py::test_a_small_update_is_in_the_forward_pass[moe]",
           "trainer_node/state/loading.py", "load",
           "        model.adapters.rounding = rounding_of(model, meta)\n", ""),
    Mutant("pieces of other ranks have thresholds of their own", f"{GATHER}::test_bytes_equal_the_export[moe-tp2ep2]",
           "trainer_node/export/wire_export.py", "LocalTensor.members",
           "corner=Corner(self.name, here.first_row, here.first_column)", "corner=Corner(self.name)"),
    Mutant("FP8 scales count only what this rank sends", f"{GATHER}::test_bytes_equal_the_export[moe-ep2]",
           "trainer_node/export/fp8_steps.py", "Fp8Steps.exchange",
           "if dist.get_world_size() > 1:", "if dist.get_world_size() > 9:"),
    Mutant("a piece's FP8 rows are counted from its own corner", f"{GATHER}::test_bytes_equal_the_export[moe-tp2ep2]",
           "trainer_node/export/fp8_steps.py", "Weight.slots_of",
           "rows = np.arange(box.first_row, box.first_row + box.rows)", "rows = np.arange(box.rows)"),
    Mutant("FP8 scales of old weights", f"{GATHER}::test_bytes_equal_the_export[moe-ep2]",
           "trainer_node/export/fp8_steps.py", "Fp8Steps.forget_prepared",
           "self._measured_for = None", "pass"),
    Mutant("a tile counts its columns from 0", "tests/trainer_node/export/test_wire_export.py::test_the_kernel_interpreted",
           "trainer_node/adapters/rounding_kernels.py", "tile_thresholds",
           "(first_i + (word >> 32))", "(word >> 32)"),
    Mutant("magnitudes of an earlier fill stay", FUSED,
           "trainer_node/export/fp8_fused.py", "FusedFp8._measure",
           "chunk.largest_S.zero_()", "pass"),
    Mutant("magnitudes of other weights are used", FUSED,
           "trainer_node/export/fp8_fused.py", "FusedFp8._measure",
           "state == chunk.measured:", "chunk.measured is not None:"),
    Mutant("magnitudes are not forgotten", FUSED,
           "trainer_node/export/fp8_fused.py", "FusedFp8.forget",
           "chunk.measured = None", "pass"),
    Mutant("all groups share a scale", FUSED,
           "trainer_node/export/fp8_fused.py", "_place",
           '        slots += batch.kind == "per_tensor"\n', ""),
    Mutant("a group of zeros has no scale to divide by", FUSED,
           "trainer_node/export/fp8_fused_kernels.py", "_round_kernel",
           "tl.where(of_group == 0.0, 0.0, tl.div_rn(1.0, of_group))", "tl.div_rn(1.0, of_group)"),
    Mutant("blocks of a checkpoint are read by each other's scales", f"{BLOCKS}::test_a_weight_is_its_codes_times_its_block_s_scale",
           "trainer_node/hf/fp8_blocks.py", "dequantised",
           "scales.float().repeat_interleave(FP8_BLOCK,", "scales.float().flip(0).repeat_interleave(FP8_BLOCK,"),
    Mutant("changed elements arrive with any checksum", f"{CHANGES}::test_another_checksum_is_refused",
           "weight_transfer/changes.py", "_checked",
           "if message.nbytes and", "if False and"),
    Mutant("a worker takes more bytes than a part has", f"{CHANGES}::test_a_larger_message_than_planned_is_refused",
           "weight_transfer/changes.py", "_announced",
           "if not 0 <= nbytes <= delivery.end - delivery.begin:", "if False:"),
    Mutant("an element that stays -0.0 is not sent", f"{CHANGES}::test_the_sign_of_zero_is_dropped_and_nothing_else[dtype0-2]",
           "weight_transfer/changes.py", "drop_zero_signs",
           "torch.iinfo(dtype).min, 0)", "torch.iinfo(dtype).min, torch.iinfo(dtype).min)"),
    Mutant("the old merge has the new rounding", MERGES,
           "trainer_node/export/changes.py", "Published._present_rounding",
           "return self._rounding", "return self._model.rounding"),
    Mutant("the old merge has the new adapters", MERGES,
           "trainer_node/export/changes.py", "Published._old",
           "lora_A=a, lora_B=b", "lora_A=a"),
    Mutant("a trainer encodes against any version", MERGES,
           "trainer_node/export/changes.py", "Published.why_not",
           "if self._version != base_version or", "if self._version is None or"),
    Mutant("bytes that were encoded but not sent are encoded against", MERGES,
           "trainer_node/export/changes.py", "Published.old_buffers",
           "self.forget()  # until", "pass  # until"),
    Mutant("elements of a tensor that cannot be read are changed", MERGES,
           "trainer_node/export/changes.py", "Layout.word_bytes",
           "if not self.unread.isdisjoint(indices):", "if False:"),
    Mutant("changed elements go to a replica that lives anew", f"{ELEMENTS}::test_elements_need_the_same_lives_and_the_next_version",
           "orchestrator/publication/ledger.py", "Ledger.may_send_elements",
           "return is_held and (", "return ("),
    Mutant("a resumed orchestrator believes that every replica serves the version", f"{RESUMED}[True-replica]",
           "orchestrator/publication/ledger.py", "Ledger.may_send_elements",
           "serves.get(replica) == self.version for", "True for"),
    Mutant("a resumed orchestrator believes that every tensor can be read", f"{RESUMED}[True-journal]",
           "orchestrator/publication/ledger.py", "Ledger.may_send_elements",
           "or self.unread is None:", "or False:"),
    Mutant("a resumed orchestrator believes the trainer", f"{RESUMED}[True-trainer]",
           "orchestrator/publication/elements.py", "Elements.encode",
           "prove=self.ledger.is_resumed or version == base,", "prove=False,"),
    Mutant("a version that another process read is not proved", f"{ELEMENTS}::test_another_trainer_process_that_makes_other_weights_of_the_version_sends_everything",
           "orchestrator/publication/elements.py", "Elements.encode",
           "if not self.ledger.is_content(base, olds, wire.indices):", "if False:"),
    Mutant("a version that another process sent is merged as the present one", MERGES,
           "trainer_node/export/changes.py", "Published.recall",
           "self._version, self._rounding = version, rounding", "self._version, self._rounding = version, self._model.rounding"),
    Mutant("changed elements follow a failure", f"{ELEMENTS}::test_after_any_failure_whole_tensors_travel",
           "orchestrator/publication/ledger.py", "Ledger.failed",
           "self.state, self._has_failed = left, True", "self.state = left"),
    Mutant("elements count as the full update that is due", f"{ELEMENTS}::test_elements_of_all_tensors_are_no_full_update",
           "orchestrator/publication/ledger.py", "Ledger.verified",
           "0 if is_full and unread is not None else", "0 if is_full else"),
    Mutant("a full update that is due comes as elements", f"{ELEMENTS}::test_a_full_update_that_is_due_comes_as_tensors",
           "orchestrator/publication/elements.py", "Elements.encode",
           "or is_due or", "or"),
    Mutant("elements are sent however little they save", f"{ELEMENTS}::test_the_choice_is_arithmetic",
           "orchestrator/publication/choice.py", "choose",
           "elements_s < GAIN * whole_s", "elements_s < whole_s"),
    Mutant("the first of equal copies sends everything", f"{EDGES}::test_equal_copies_share_the_sending_and_steps_are_even",
           "weight_transfer/edges.py", "_least",
           "return queue[0][1]", "return min(queue, key=lambda entry: entry[1])[1]"),
    Mutant("boxes of workers that overlap are sent twice", f"{EDGES}::test_every_kept_element_arrives_once_and_each_is_sent_by_one_holder",
           "weight_transfer/edges.py", "_wanted",
           "if overlap(wanted) is not None:", "if False:"),
    Mutant("a stream's pieces are in no even steps", f"{EDGES}::test_equal_copies_share_the_sending_and_steps_are_even",
           "weight_transfer/edges.py", "_in_steps",
           "(2 * begin + nbytes) * steps // (2 * total)", "0"),
    Mutant("a worker believes a plan that brings it too little", f"{EDGES}::test_a_worker_refuses_a_plan_that_is_not_its_own",
           "weight_transfer/edges.py", "check_coverage",
           "if not inside or shared != wanted or", "if shared > wanted or"),
    Mutant("a worker believes a plan that brings an element twice", f"{EDGES}::test_a_worker_refuses_an_element_that_comes_twice_in_place_of_another",
           "weight_transfer/edges.py", "check_coverage",
           "if (twice := overlap(boxes)) is not None:", "if (twice := overlap([])) is not None:"),
    Mutant("a part of a region ends a row too late", f"{EDGES}::test_the_parts_of_a_region_in_a_box",
           "weight_transfer/boxes.py", "_within",
           "(end - 1 - first - reach) // step + 1", "(end - first - reach) // step + 1"),
    Mutant("a row piece of an adapter is added from its first row on", f"{GATHER}::test_bytes_equal_the_export[dp2]",
           "trainer_node/export/wire_export.py", "LocalTensor.members",
           "(len(self.pieces) > 1 or here != held)", "len(self.pieces) > 1"),
    Mutant("three matrices that are chunks alone do not fit the ring", "tests/weight_transfer/test_chunks.py" "::test_a_ring_has_room_for_three_matrices_that_are_chunks_alone",
           "weight_transfer/chunks.py", "usual_bytes",
           "sorted(sizes, reverse=True)[min(at_once, len(sizes)) - 1]", "sorted(sizes)[0]"),
    Mutant("token normalisation per batch, then a mean of means", "tests/trainer_node/training/test_sums.py::TestSums::test_batches_add_up_and_are_divided_once",
           "trainer_node/training/sums.py", "StepSums.__add__",
           "**sums,", '**sums | {"num_tokens": max(self.num_tokens, other.num_tokens)},'),
    Mutant("sequences without loss counted", "tests/trainer_node/training/test_sums.py::TestSums::test_sequences_without_loss_do_not_count",
           "trainer_node/training/batch.py", "Batch.num_loss_sequences",
           "reduceat(self.loss_mask_T.numpy() != 0,", "reduceat(self.loss_mask_T.numpy() >= 0,"),
    Mutant("tokens that are only scored carry loss", ONE_RANK,
           "trainer_node/training/packing.py", "MicroBatch.with_loss",
           "values_N if self.loss_N is None else values_N.index_select(0, self.loss_N)", "values_N"),
    Mutant("the gradient of the learned positions lands on others", f"{LOSSES}::test_the_backward_pass_leaves_out_what_is_not_learned",
           "trainer_node/training/head.py", "_LinearStatistics.backward",
           "whole.learned_N, grad_hidden_NH)", "whole.learned_N - 1, grad_hidden_NH)"),
    Mutant("weights of the linear loss without their sign", f"{LOSSES}::TestByHand::test_linear",
           "trainer_node/training/losses.py", "linear",
           "-(advantages_N *", "-(advantages_N.abs() *"),
    Mutant("a partial update keeps the deltas of the adapter before", f"{READAPTED}[dense_tied-1-sizes0]",
           "trainer_node/export/merged.py", "Exporter.manifest",
           "self._ever |= targets", "self._ever = set(targets)"),
    Mutant("the tokens of a branch stand where a sequence begins", SHARED,
           "trainer_node/training/packing.py", "_lay_out",
           "np.arange(a, a + n)", "np.arange(n)"),
    Mutant("a branch's mask begins at the top left", "tests/trainer_node/backends/test_cpu_attention.py::test_queries_are_the_last_of_their_keys",
           "trainer_node/backends/cpu_attention.py", "_visible",
           "torch.arange(length - given, length)", "torch.arange(given)"),
    Mutant("a prefix learns from its last branch only", SHARED,
           "trainer_node/model/paths.py", "_Copied.backward",
           "+= grad_KGD[start:end]", "= grad_KGD[start:end]"),
    Mutant("a branch's first token is predicted by its neighbour in the pack", f"{PREFIXES}::test_a_group_by_hand",
           "trainer_node/training/packing.py", "_lay_out",
           "np.concatenate([[-1], p[:-1]])", "p - 1"),
    Mutant("prefixes with other experts are shared", f"{PREFIXES}::test_experts_that_differ_are_not_shared",
           "trainer_node/training/prefixes.py", "_common",
           "differs |=", "_ ="),
    Mutant("experts' ranks recompute as many layers as each needs", f"{PREFIXES}::test_ranks_that_gather_tokens_recompute_the_same_layers",
           "trainer_node/training/packing.py", "micro_batches",
           "[copied] * len(tokens) if same_length else copies[dp_rank]", "copies[dp_rank]"),
    Mutant("recomputed layers are rounded down", f"{PACKING}::test_packs_equal_one_sequence_at_a_time[dense_untied]",
           "trainer_node/model/recompute.py", "use",
           "math.ceil(", "math.floor("),
    Mutant("recomputed layers learn nothing", f"{PACKING}::test_packs_equal_one_sequence_at_a_time[dense_untied]",
           "trainer_node/model/recompute.py", "follow.require",
           "if is_on else output", "if False else output"),
    Mutant("recomputation is chosen where it saves nothing", "tests/trainer_node/training/test_pack_size.py::test_recomputation_that_saves_nothing_is_left_out",
           "trainer_node/training/memory_model.py", "RankMemory.share",
           " or least >= most", ""),
    Mutant("a layer's input stays on the device", "tests/trainer_node/training/test_host_inputs.py::test_gradients_have_the_same_bits[dense_untied-sizes0]",
           "trainer_node/model/layer_inputs.py", "_Input.leave",
           "self._here = None", "pass"),
    Mutant("what all layers share leaves the device", "tests/trainer_node/training/test_host_inputs.py::test_only_hidden_states_leave",
           "trainer_node/model/layer_inputs.py", "LayerInputs._pack",
           " or tensor.shape[-1] != self._hidden_size", ""),
    Mutant("an input comes back without its end", "tests/trainer_node/training/test_host_inputs.py::test_only_hidden_states_leave",
           "trainer_node/model/layer_inputs.py", "_Input._come",
           "zip(self._chunks, pieces, strict=True)", "list(zip(self._chunks, pieces, strict=True))[:-1]"),
    Mutant("an input comes back with other strides", f"{PREFIXES}::test_a_family_shares_prefixes[deepseek_v3]",
           "trainer_node/model/layer_inputs.py", "_Input.__init__",
           "tensor.stride()", "tensor.new_empty(tensor.shape).stride()"),
    Mutant("the host's memory is taken beyond its limit", "tests/trainer_node/training/test_pack_size.py::test_the_hosts_memory_is_a_limit_too",
           "trainer_node/training/memory_model.py", "RankMemory.offloads",
           " or tokens > self.host_tokens", ""),
    Mutant("off-by-one log-prob shift", f"{PACKING}::test_by_hand",
           "trainer_node/training/packing.py", "_lay_out",
           "targets_N=of(batch.tokens_T)", "targets_N=torch.from_numpy(batch.tokens_T.numpy()[loss_rows_N - 1])"),
    Mutant("positions run on over the sequences of a pack", f"{PACKING}::test_by_hand",
           "trainer_node/training/packing.py", "_lay_out",
           "_joined([np.arange(a, a + n) for a, n in zip(froms, pieces, strict=True)])", "np.arange(sum(pieces))"),
    Mutant("attention over the sequences of a pack", reference("dense_tied-lora-sft"),
           "trainer_node/training/passes.py", "_packed",
           "_bounds(micro.cu_seqlens, micro.max_seqlen, micro.cu_seqlens, micro.max_seqlen)", "_bounds(micro.cu_seqlens[[0, -1]], micro.max_seqlen, micro.cu_seqlens[[0, -1]], micro.max_seqlen)"),
    Mutant("copies averaged under sequence parallelism", parity("moe-tp2-lora-sft"),
           "trainer_node/training/gradients.py", "finalize_gradients",
           "1 if sequence_parallel else group.size()", "group.size()"),
    Mutant("forward results returned a row early", reference("dense_tied-lora-sft"),
           "trainer_node/training/passes.py", "gather_scores",
           "one.rows_N] =", "one.rows_N - 1] ="),
    Mutant("a number that does not divide is rounded", "tests/trainer_node/training/test_batch.py::TestAccumulation::test_a_number_that_does_not_divide",
           "trainer_node/training/batch.py", "check_accumulation",
           "1 or wanted % dp_size:", "1:"),
    Mutant("infinite log-probs let through", "tests/trainer_node/training/test_batch.py::TestBatch::test_refusals",
           "trainer_node/training/batch.py", "check_batch",
           "~np.isfinite(arrays[name])", "np.isnan(arrays[name])"),
    Mutant("dual clip for positive advantages too", f"{LOSSES}::TestByHand::test_ppo_with_dual_clip",
           "trainer_node/training/losses.py", "ppo",
           "torch.where(advantages_N < 0, bounded_N, surrogate_N)", "bounded_N"),
    Mutant("CISPO's weight differentiated", f"{LOSSES}::test_gradients_equal_autograd_of_the_plain_formula",
           "trainer_node/training/losses.py", "cispo",
           "_ratio(log_probs_N.detach(),", "_ratio(log_probs_N,"),
    Mutant("GSPO without the length", f"{LOSSES}::TestByHand::test_gspo",
           "trainer_node/training/losses.py", "gspo",
           "clipped(log_S.exp()", "clipped((log_S * lengths_S).exp()"),
    Mutant("importance weight not truncated", f"{LOSSES}::TestByHand::test_truncated_without_old",
           "trainer_node/training/losses.py", "truncated_importance_sampling",
           "untruncated_N.clamp(max=ratio_cap)", "untruncated_N"),
    Mutant("a sequence above the cap keeps its weight", f"{LOSSES}::TestByHand::test_masked_importance_sampling",
           "trainer_node/training/losses_masked.py", "masked_importance_sampling",
           "torch.where(weight_S <= ratio_cap, weight_S, 0.0)", "weight_S.clamp(max=ratio_cap)"),
    Mutant("IcePop without its weight", f"{LOSSES}::TestByHand::test_icepop",
           "trainer_node/training/losses_masked.py", "_bounded",
           "ratio_N if reweights else 1.0", "1.0"),
    Mutant("rejected tokens count", f"{LOSSES}::TestByHand::test_token_rejection",
           "trainer_node/training/losses_masked.py", "_bounded",
           "(ratio_N >= ratio_low) & ", "(ratio_N >= 0) & "),
    Mutant("a sequence's ratio without its length", f"{LOSSES}::TestByHand::test_sequence_rejection",
           "trainer_node/training/surrogate.py", "sequence_means",
           " / lengths_S.clamp(min=1)", ""),
    Mutant("DPPO bounds the other direction", f"{LOSSES}::TestByHand::test_dppo",
           "trainer_node/training/losses_masked.py", "dppo",
           "moved_N > clip_high, -moved_N > clip_low", "-moved_N > clip_high, moved_N > clip_low"),
    Mutant("k3 with p and reference exchanged", f"{LOSSES}::TestByHand::test_kl",
           "trainer_node/training/losses.py", "kl_to_reference",
           "reference_logprobs_N - log_probs_N", "log_probs_N - reference_logprobs_N"),
    Mutant("vocabulary padding in the entropy", f"{LOSSES}::test_log_probs_and_entropy_with_gradients",
           "trainer_node/training/head.py", "_valid_rows",
           "< vocab_size", "< vocab_size + 1"),
    Mutant("the policy's log-probs at temperature 1", reference("dense_tied-lora-rl"),
           "trainer_node/training/head.py", "_Head.logits",
           "logits.div_(self.temperatures_N1[chunk])", "pass"),
    Mutant("the gradient without the temperature's factor", reference("dense_tied-lora-rl"),
           "trainer_node/training/head.py", "_Head.of_logits",
           "grad_N1 / self.temperatures_N1", "grad_N1"),
    Mutant("the policy's temperatures lost on the way to the micro-batch", f"{PACKING}::test_optional_tensors_go_along[temperatures]",
           "trainer_node/training/packing.py", "_lay_out",
           "        temperatures_N=of_given(batch.temperatures_T),\n", ""),
    Mutant("the reference's log-probs at temperature 1", ONE_RANK,
           "trainer_node/training/references.py", "References.compared",
           "scored_T=None)", "scored_T=None, temperatures_T=None)"),
    Mutant("a forward request's log-probs at temperature 1", "tests/trainer_node/training/test_batch.py::TestForward::test_temperatures",
           "trainer_node/training/batch.py", "decode_forward",
           "temperatures_T=torch.from_numpy(given) if given is not None else None,", "temperatures_T=None,"),
    Mutant("each context rank has the first tokens' temperatures", parity("dense_tied-cp2-lora-rl"),
           "trainer_node/training/passes.py", "_statistics",
           "temperatures_M[micro.here_M]", "temperatures_M[: len(micro.here_M)]"),
    Mutant("temperatures of sequences taken in the order of tokens", "tests/trainer_node/training/test_batch.py::TestBatch::test_one_temperature_for_each_sequence_is_one_for_each_of_its_tokens",
           "trainer_node/training/batch.py", "_check_sequences",
           "np.repeat(arrays[name], lengths)", "np.resize(arrays[name], total)"),
    Mutant("a job's bound on the log-prob gap is not held", ONE_RANK,
           "trainer_node/training/trainer.py", "Trainer.forward_backward",
           "            gap.check(sums, loss)\n", ""),
    Mutant("the bound on the log-prob gap holds for off-policy steps too", ONE_RANK,
           "trainer_node/training/steps.py", "train",
           'update={"max_logprob_gap": None}', "update={}"),
    Mutant("the log-prob gap averaged over tokens that have none", "tests/trainer_node/training/test_sums.py::TestGap::test_only_losses_that_take_the_samplers_log_probs_count",
           "trainer_node/training/sums.py", "StepSums.logprob_gap_mean",
           "self.gap_tokens if", "self.num_tokens if"),
    Mutant("a kernel whose gradient is NaN passes", KERNELS,
           "trainer_node/model/kernel_check.py", "_check",
           "not difference <=", "difference >"),
    Mutant("a kernel's backward pass is not compared", KERNELS,
           "trainer_node/model/kernel_check.py", "differences",
           "(output, *gradients)", "(output, *leaves)"),
    Mutant("the parts of a cuDNN from several folders", "tests/trainer_node/backends/test_cudnn.py::test_the_users_cudnn_is_loaded_whole[CUDNN_HOME]",
           "trainer_node/backends/cudnn.py", "_parts",
           "front.parent.glob", "front.parent.parent.rglob"),
    Mutant("a whole generation that was not yet in its place is forgotten", f"{GENERATIONS}::test_a_crash_at_every_operation",
           "trainer_node/files/generations.py", "recover",
           "if is_whole(temp):", "if folder.exists() and is_whole(temp):"),
    Mutant("marked before the files are flushed and moved", f"{GENERATIONS}::test_a_crash_at_every_operation",
           "trainer_node/files/generations.py", "finish",
           "write_file(temp / MARKER, lambda path: path.write_text(json.dumps(marker)), disk=disk)\n    disk.unlink(temp / BEGUN)\n    _replace(folder, temp,", "_replace(folder, temp, disk=disk)\n    write_file(folder / MARKER, lambda path: path.write_text(json.dumps(marker)),"),
    Mutant("a file that has changed is loaded", f"{GENERATIONS}::test_a_changed_an_extra_and_a_missing_file_are_named",
           "trainer_node/files/generations.py", "_check_contents",
           "found != wanted.get(name):", "not found:"),
    Mutant("each rank checks the same files", f"{GENERATIONS}::test_ranks_share_the_reading",
           "trainer_node/files/generations.py", "_check_contents",
           "parts == part\n", "parts == 0\n"),
    Mutant("half removed it is nobody's", f"{GENERATIONS}::test_a_crash_at_every_operation",
           "trainer_node/files/generations.py", "discard",
           "disk.rename(folder / MARKER, folder / BEGUN)", "disk.unlink(folder / MARKER)"),
    Mutant("files not flushed before the marker", f"{GENERATIONS}::test_a_crash_at_every_operation",
           "trainer_node/files/generations.py", "write_file",
           "write)\n    disk.flush(temp)", "write)"),
    Mutant("double finalisation: divided on every call and at the step", reference("dense_tied-lora-sft"),
           "trainer_node/training/passes.py", "loss",
           "terms.total * weight\n", "terms.total * weight / count\n"),
    Mutant("the reference is the policy itself", ONE_RANK,
           "trainer_node/adapters/lora.py", "AdapterSet.switched",
           "self.mode, mode", 'self.mode, "adapters"'),
    Mutant("trained on the served weights, the input gets the adapter's gradient twice", f"{SERVED}[dense]",
           "trainer_node/adapters/dense_lora.py", "DenseAdapter.learn_from",
           "self(x.detach()),", "self(x),"),
    Mutant("the same of experts", f"{SERVED}[moe]",
           "trainer_node/model/experts.py", "_ExpertMlp.backward",
           "(None, None) if ctx.is_served else (fc1, fc2)", "fc1, fc2"),
    Mutant("served weights of the step before", f"{SERVED}[dense]",
           "trainer_node/training/scorer.py", "Scorer._scoring",
           "served.all() if is_served", "served.all(merges=False) if is_served"),
    Mutant("a token on old keys and values must be equal", "tests/trainer_node/training/test_exact.py::test_only_tokens_of_the_present_version_must_be_equal",
           "trainer_node/training/bits.py", "compare",
           "(made_T == version)", "(made_T.abs() >= version)"),
    Mutant("an exact SwiGLU is torch's", "tests/weight_transfer/exact/test_kernels.py::test_a_row_is_the_same_in_any_batch[silu]",
           "weight_transfer/exact/kernels.py", "silu",
           "small = exp(-x.abs())", "return functional.silu(x)"),
    Mutant("parts are added up in another order", "tests/weight_transfer/exact/test_kernels.py::test_parts_are_added_up_in_the_order_of_their_ranks",
           "weight_transfer/exact/kernels.py", "linear_in_parts",
           "added(linear(part, weight.contiguous()) for part, weight in pairs)", "added([linear(part, weight.contiguous()) for part, weight in pairs][::-1])"),
    Mutant("of equal logits any expert is chosen", "tests/weight_transfer/exact/test_kernels.py::test_of_equal_logits_the_lower_experts_are_chosen",
           "weight_transfer/exact/experts.py", "chosen",
           "(ordered * count + places)", "ordered"),
    Mutant("a layer of experts shares the buffer of its shared experts", "tests/trainer_node/adapters/test_adapters_families.py::test_adapters_are_pefts" "[qwen3_5_moe-all-linear]",
           "trainer_node/training/served_weights.py", "Part.kind",
           "type(self.module),", "nn.Module,"),
    Mutant("entropy bonus with the wrong sign", reference("dense_tied-lora-rl"),
           "trainer_node/training/losses.py", "total_loss",
           "total - spec.entropy_bonus", "total + spec.entropy_bonus"),
    Mutant("adapter scale forgotten", reference("dense_tied-lora-sft"),
           "trainer_node/adapters/dense_lora.py", "DenseAdapter.forward",
           "h * self.scale", "h"),
    Mutant("sums not reduced over data-parallel ranks", parity("dense_tied-dp2-lora-sft"),
           "trainer_node/training/passes.py", "reduce_sums",
           "dist.all_reduce(total)\n    dist.all_reduce(worst", "dist.all_reduce(worst"),
    Mutant("gradients not reduced over data-parallel ranks", parity("dense_tied-dp2-lora-sft"),
           "trainer_node/training/gradients.py", "finalize_gradients",
           "parallel_state.get_data_parallel_group(with_context_parallel=True),", "tensor_group,"),
    Mutant("a tied embedding's two gradients not added", parity("dense_tied-pp2-full-sft"),
           "trainer_node/training/gradients.py", "finalize_gradients",
           "all_reduce_flat(tied, parallel_state.get_embedding_group(), 1.0)", "pass"),
    Mutant("the q and k norms' partial gradients averaged", parity("dense_tied-tp2-no-sequence-full-sft"),
           "trainer_node/model/parameters.py", "model_parameters",
           "partial=not split and _sees_own_heads(bare, config),", "partial=False,"),
    Mutant("a step does not wait for the copy of the moments", behind("waits"),
           "trainer_node/training/trainer.py", "Trainer._step",
           "        self.behind.may_step()\n", ""),
    Mutant("moments of another save taken", behind("mixtures"),
           "trainer_node/state/loading.py", "_check_parts",
           'marker.get("save") != meta["save"]:', "False:"),
    Mutant("a save in the background that failed is forgotten", behind("full_disk"),
           "trainer_node/state/checkpoint.py", "settle",
           "return not why\n", "return True\n"),
    Mutant("a step without a checkpoint to begin at is saved behind", behind("no_base"),
           "trainer_node/state/checkpoint.py", "base_of",
           "None or trainer.pending.num_batches:", "None:"),
    Mutant("the repeated step's weights not compared", behind("lost"),
           "trainer_node/state/remake.py", "_difference",
           ":= int(differs.sum()):", ":= 0 * int(differs.sum()):"),
    Mutant("the repeated step's weights kept", behind("lost"),
           "trainer_node/state/remake.py", "take_durable",
           "loading.load(trainer, folder, with_moments=False)", "loading.Loaded(version=2, client_state={}, dropped_batches=0, rng_restored=True)"),
    Mutant("a replay continues with the moments of a step that differs", behind("replayed"),
           "trainer_node/tools/replay.py", "replay",
           "if found.elements:", "if False:"),
    Mutant("the step made again from whatever has the base's name", behind("lost"),
           "trainer_node/state/loading.py", "load",
           "is not None and", "is None and"),
    Mutant("sharded tensor dropped on save", FULL_ONE_RANK,
           "trainer_node/state/checkpoint.py", "_shards",
           "p.pieces:\n                shard", "p.pieces[:1]:\n                shard"),
    Mutant("bf16 weights stepped without a master", FULL_ONE_RANK,
           "trainer_node/training/optimizer.py", "_master",
           "p.param.detach().float()", "p.param.detach()"),
    Mutant("norms decay", reference("dense_tied-full-sft"),
           "trainer_node/training/optimizer.py", "ShardedAdamW.step",
           'optim.weight_decay if group["decays"] else 0.0', "optim.weight_decay"),
    Mutant("owners keep their step to themselves", parity("dense_tied-dp2-full-sft"),
           "trainer_node/training/optimizer.py", "ShardedAdamW.broadcast",
           "for partition in self._partitions:\n            partition.broadcast()", "pass"),
    Mutant("the output layer's adapter is not used", "tests/trainer_node/training/test_topologies.py" "::test_two_steps_equal_transformers_and_peft[dense_untied_head]",
           "trainer_node/adapters/lora.py", "AdapterSet.of_head",
           'weight_VH if self._head is None or self.mode == "base" else self._head.sum()', "weight_VH"),
    Mutant("without sequence parallelism, each tensor rank keeps its part of the head's gradient", "tests/trainer_node/adapters/test_adapters_families.py" "::test_adapters_over_several_ranks[llama-lm_head-tp2-no-sequence]",
           "trainer_node/adapters/dense_lora.py", "WeightAdapter.__init__",
           'linear.place.split == "rows"', "False"),
    Mutant("the reference adapter is the policy's own", ONE_RANK,
           "trainer_node/training/references.py", "References.compared",
           "self.in_place(loss.kl.adapter_dir):", "self.in_place(None):"),
    Mutant("gradients stay where they were when the rest is offloaded", ONE_RANK,
           "trainer_node/training/trainer.py", "Trainer._held_tensors",
           "yield param.grad", "pass"),
    Mutant("what is missing in an adapter keeps its values", f"{PEFT}::test_tensors",
           "trainer_node/adapters/peft_io.py", "check_tensors",
           "missing = [_stored_name(k) for k in expected if k not in found]", "missing: list[str] = []"),
    Mutant("an adapter of another alpha is taken", f"{PEFT}::test_settings",
           "trainer_node/adapters/peft_io.py", "check_config",
           'lora.rank), ("lora_alpha", lora.alpha))', "lora.rank),)"),
    Mutant("dropout without its scale", f"{DROPOUT}::test_one_rank_equals_peft_with_the_same_masks",
           "trainer_node/adapters/dropout.py", "Dropout._drop",
           "x / (1.0 - self.p)", "x"),
    Mutant("tensor ranks drop the same of their different features", f"{DROPOUT}::test_every_topology_draws_the_same_masks[tp2]",
           "trainer_node/adapters/dropout.py", "Dropout.dense",
           "self._rank * x.shape[-1] if sharded else 0", "0"),
    Mutant("tokens counted per rank", parity("dense_tied-dp2-lora-sft"),
           "trainer_node/training/passes.py", "reduce_sums",
           "num_tokens=batch.num_loss_tokens,", "num_tokens=sum(report.numel() > 0 for report in reports),"),
    Mutant("gradients of adapters that tensor ranks have copies of not reduced", parity("dense_tied-tp2-lora-sft"),
           "trainer_node/training/gradients.py", "finalize_gradients",
           "all_reduce_flat(parts, group, 1.0)", "pass"),
    Mutant("a column-parallel adapter's hidden gradient not reduced over tensor ranks", parity("dense_tied-tp2-no-sequence-lora-sft"),
           "trainer_node/adapters/dense_lora.py", "DenseAdapter.__init__",
           "copy_to_tensor_model_parallel_region", "lambda h, group: h"),
    Mutant("a stale adapter is exported", parity("dense_tied-tp2-no-sequence-lora-sft"),
           "trainer_node/model/whole_adapters.py", "gather_deltas",
           "def gather_deltas(model", "_KEPT = []\n\n\n@lambda f: lambda model: (_KEPT or _KEPT.append(f(model))) and _KEPT[0] or _KEPT[0]\ndef gather_deltas(model"),
    Mutant("gate and up swapped", reference("dense_tied-lora-sft"),
           "trainer_node/adapters/dense_lora.py", "_Adapter.__init__",
           "[linear.name for linear in linears]", "[linear.name for linear in reversed(linears)]"),
    Mutant("every HF tensor begins where the parameter does", reference("dense_tied-full-sft"),
           "trainer_node/layout/strides.py", "Piece.view",
           "tensor.storage_offset() + self.offset)", "tensor.storage_offset())"),
    Mutant("q, k and v of an adapter not interleaved by query group", reference("dense_tied-lora-sft"),
           "trainer_node/adapters/dense_lora.py", "DenseAdapter.__init__",
           "_num_groups(rows, out_features)", "1"),
    Mutant("q, k and v of the parameters taken as if they were one query group", reference("dense_tied-full-sft"),
           "trainer_node/layout/strides.py", "Piece.view",
           "self.rows.outer_stride,\n            self.rows.inner_stride,", "self.rows.inner * self.rows.inner_stride,\n            self.rows.inner_stride,"),
    Mutant("every expert-parallel rank has the first experts", parity("moe-ep2-lora-sft"),
           "trainer_node/adapters/lora.py", "ExpertAdapter.trained_params",
           "[int(first),", "[0,"),
    Mutant("padded rows counted", parity("dense_tied-pp2-lora-sft"),
           "trainer_node/training/packing.py", "_lay_out",
           "np.flatnonzero(scored_T.numpy()[rows_R])\n    rows_N = rows_R[scored_R]\n    owners_R = np.repeat(np.arange(len(sequences)), np.array(sizes, dtype=np.int64))", "np.flatnonzero(np.resize(scored_T.numpy()[rows_R], length))\n    rows_N = np.resize(rows_R, length)[scored_R]\n    before_R = np.arange(length) - 1\n    owners_R = np.resize(np.repeat(np.arange(len(sequences)), sizes), length)"),
    Mutant("gate and up swapped in the stacked experts", reference("moe-lora-sft"),
           "trainer_node/model/grouped.py", "GateUp.halves",
           "    gate, up = y.chunk(2,", "    up, gate = y.chunk(2,"),
    Mutant("routing weights not brought into the order of the experts' rows", reference("moe-lora-sft"),
           "trainer_node/model/experts.py", "_by_row",
           "probs.flatten().index_select(0, rows.choice_N)", "probs.flatten()"),
    Mutant("gate's gradient of A given to up as well", reference("moe-lora-rl"),
           "trainer_node/model/experts.py", "Factors.unpack",
           "found.append(grad_A_EQI[:, i * padded : i * padded + rank].to", "found.append(grad_A_EQI[:, :rank].to"),
    Mutant("the next-token shift within a context rank's chunks", parity("dense_tied-cp2-lora-sft"),
           "trainer_node/training/packing.py", "_part",
           "local[pack.predictors_N.numpy()]", "local[pack.predictors_N.numpy() + 1] - 1"),
    Mutant("gradients not summed over context ranks", parity("dense_tied-cp2-lora-sft"),
           "trainer_node/training/gradients.py", "finalize_gradients",
           "get_data_parallel_group(with_context_parallel=True),", "get_data_parallel_group(with_context_parallel=False),"),
    Mutant("gradients of adapters that expert-tensor ranks have copies of not reduced", parity("moe-tp2-etp2-lora-sft"),
           "trainer_node/training/gradients.py", "finalize_gradients",
           "[p.grad for p in params if p.expert and not p.split],", "[],"),
    Mutant("every mini-batch has the first one's tokens", f"{OPERATIONS}::test_topology_changes_nothing[dp2]",
           "trainer_node/training/steps.py", "mini_batches",
           "slice(ends[first], ends[last])", "slice(0, ends[last] - ends[first])"),
    Mutant("a piece that two ranks have is sent twice", f"{GATHER}::test_pieces_that_are_not_the_tensor",
           "weight_transfer/boxes.py", "overlap",
           "if one.overlaps(box):", "if False:"),
    Mutant("a piece that no rank has is left out", f"{GATHER}::test_pieces_that_are_not_the_tensor",
           "trainer_node/export/gather_plan.py", "_check_partition",
           "    if missing:\n", "    if False:\n"),
    Mutant("a row-parallel piece is placed as if it were contiguous", f"{GATHER}::test_bytes_equal_the_export[tp2]",
           "trainer_node/export/gather_plan.py", "_lay_out_chunk",
           "row_stride=width)", "row_stride=box.columns)"),
    Mutant("a sequence-level loss of each context rank's part", f"{OPERATIONS}::test_topology_changes_nothing[pp2cp2]",
           "trainer_node/training/head.py", "_Gather.forward",
           "dist.all_reduce(whole_PN, group=group)", "pass"),
    Mutant("a checkpoint without one of the model's tensors is loaded", EXTRAS,
           "trainer_node/model/build.py", "build",
           "        checkpoint.check_names(set().union(*names))\n", ""),
    Mutant("another boundary of YaRN's ramp than transformers'", EXTRAS,
           "trainer_node/model/providers.py", "_rotary",
           'rope.get("beta_fast") or 32.0', 'rope.get("beta_fast") or 16.0'),
    Mutant("the indices of both probes are the same", f"{PROBE}::test_bridges_mappings[1]",
           "trainer_node/layout/layouts.py", "",
           "= 0x15555555", "= 0"),
    Mutant("the other tensor ranks' shards are taken for this one's", f"{PROBE}::test_bridges_mappings[2]",
           "trainer_node/layout/layouts.py", "alone.gather",
           "((tensor ^ code) + rank * numel) ^ code", "(tensor + rank * 0)"),
    Mutant("a probe leaves its answer in Bridge's mapping", f"{PROBE}::test_bridges_mappings[1]",
           "trainer_node/layout/layouts.py", "_detached",
           "    twin = copy.copy(mapping)", "    return mapping\n    twin = copy.copy(mapping)"),
    Mutant("each piece of a tensor gets the adapter's first rows", f"{PROBE}::test_an_adapter_is_cut_to_the_pieces",
           "trainer_node/export/wire_export.py", "LocalTensor.members",
           "box=self.within(here))", "box=replace(here, first_row=0, first_column=0))"),
    Mutant("pieces are not compared with the indices", f"{PROBE}::test_what_the_pieces_are_not",
           "trainer_node/layout/strides.py", "check",
           "layout.pieces:", "():"),
    Mutant("the experts' probabilities normalised where HF does not", family("olmoe"),
           "trainer_node/model/providers.py", "_router",
           "= not normalises", "= normalises"),
    Mutant("windows in the other layers", family("gpt_oss"),
           "trainer_node/model/providers.py", "_windows",
           "[int(w) for w", "[int(not w) for w"),
    Mutant("norms keep TransformerEngine's epsilon", family("gemma3"),
           "trainer_node/model/providers.py", "settle",
           "module.eps = provider.layernorm_epsilon", "pass"),
    Mutant("multi-latent attention's plain queries get a norm", family("deepseek_v2_lite"),
           "trainer_node/model/providers.py", "prepare",
           "_plain_query_projections()\n    #", "#"),
    Mutant("a norm over all heads without the other ranks' part of its gradient", over_ranks("minimax_m2-2-1-1-1"),
           "trainer_node/model/providers.py", "settle",
           "module.forward = functools.partial(_norm_over_ranks, module)", "pass"),
    Mutant("the delta rule's norm has its own heads' gradient only", without_sequence("qwen3_5_moe"),
           "trainer_node/model/parameters.py", "_sees_own_heads",
           'name.endswith("out_norm.weight")', "False"),
    Mutant("a language part under its own names", "tests/trainer_node/hf/test_language_part.py::test_a_model_that_sees[gemma3-1]",
           "trainer_node/hf/language_part.py", "use_names.spelled",
           "own + name.removeprefix(theirs)", "name"),
    Mutant("a tower stays at home", "tests/trainer_node/hf/test_language_part.py::test_a_model_that_sees[gemma3-1]",
           "trainer_node/hf/language_part.py", "export_towers.with_towers",
           "name in kept:\n", "name in ():\n"),
    Mutant("heads of further tokens pass for a tower", "tests/trainer_node/hf/test_language_part.py::test_a_model_that_sees[qwen3_5_moe-2]",
           "trainer_node/hf/language_part.py", "towers",
           "        and not _FURTHER.match(name)\n", ""),
    Mutant("an image's token is a word", "tests/trainer_node/hf/test_language_part.py::test_a_model_that_sees[gemma3-1]",
           "trainer_node/training/batch.py", "check_text",
           "tower_tokens and len(places):", "False:"),
    Mutant("stacked experts merged as if HF stored them like linears", "tests/trainer_node/adapters/test_adapters_families.py::test_adapters_are_pefts" "[gpt_oss-experts.down_proj]",
           "trainer_node/adapters/linears.py", "Place.of",
           "transposed=True)", "transposed=False)"),
    Mutant("splice check allows any log-prob", "tests/trainer_node/tools/test_check_model.py::test_a_window_that_is_off_by_one_is_found",
           "trainer_node/tools/check_model.py", "_compare",
           "apart <= bound,", "True,"),
    Mutant("the last token's value is followed by a state", f"{GAE}::test_by_hand",
           "trainer_node/training/gae.py", "advantages",
           "advantage = next_value = 0.0", "advantage, next_value = 0.0, values[end - 1]"),
    Mutant("GAE without its lambda", f"{GAE}::test_by_hand",
           "trainer_node/training/gae.py", "advantages",
           "decay, end = spec.gamma * spec.lam, 0", "decay, end = spec.gamma, 0"),
    Mutant("what a tool wrote has advantages and takes time", f"{GAE}::test_tokens_of_a_tool_take_no_time",
           "trainer_node/training/gae.py", "advantages",
           "if is_sampled[t]:", "if True:"),
    Mutant("advantages are whitened with the prompts' zeros", f"{GAE}::test_the_papers_sum[1.0-1.0-True]",
           "trainer_node/training/gae.py", "advantages",
           "sampled = advantages_T[mask_T]", "sampled = advantages_T"),
    Mutant("the KL is added to the reward", f"{GAE}::test_the_kl_is_taken_from_each_tokens_reward[k1-False]",
           "trainer_node/training/gae.py", "rewards_of",
           "rewards_T - kl.coefficient", "rewards_T + kl.coefficient"),
    Mutant("the KL is that of the sampler, although the batch has old log-probs",
           f"{GAE}::test_the_kl_is_taken_from_each_tokens_reward[k1-True]",
           "trainer_node/training/gae.py", "rewards_of",
           "if batch.old_logprobs_T is None else batch.old_logprobs_T", "if True else batch.old_logprobs_T"),
    Mutant("the KL is in the reward and in the loss", f"{LOSSES}::TestByHand::test_a_kl_in_the_reward_is_only_measured",
           "trainer_node/training/losses.py", "total_loss",
           "and not spec.kl.in_reward:", "and True:"),
    Mutant("a value counts as the nearer one", f"{GAE}::test_the_value_loss_by_hand",
           "trainer_node/training/losses.py", "value_loss",
           "torch.maximum(error_N, clipped_N)", "torch.minimum(error_N, clipped_N)"),
    Mutant("each step of a job has its own values", "tests/trainer_node/training/test_valued.py::test_one_rank",
           "trainer_node/training/steps.py", "train",
           "batch = trainer.valued(batch, message.loss)", "batch = batch"),
    Mutant("each tensor rank has its part of a value", parity("dense_tied-tp2-lora-gae"),
           "trainer_node/training/passes.py", "_values",
           "tensor_parallel.reduce_from_tensor_model_parallel_region(share_M, group=group)", "share_M"),
    Mutant("the value head has the model's learning rate", reference("dense_tied-lora-gae"),
           "trainer_node/training/optimizer.py", "ShardedAdamW.step",
           'group["is_value"] and optim.value_lr else', "False else"),
    Mutant("adapters' checkpoints have no value head", "tests/trainer_node/training/test_valued.py::test_one_rank",
           "trainer_node/state/loading.py", "load",
           '("weight",) * (model.trains_all or p.is_value) + moments', '("weight",) * model.trains_all + moments'),
]
# fmt: on

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
    (folder / "docs").symlink_to(REPO / "docs")
    return folder


def mutated_copy(mutant: Mutant, folder: Path) -> Path:
    path = copy_of_the_repository(folder) / mutant.file
    before, function, after = mutant.source()
    path.write_text(before + function.replace(mutant.old, mutant.new) + after)
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
            "timeout_s": RUN_TIMEOUT_S * max(1, len(tests) / 6),
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


def test_every_mutant_applies() -> None:
    """CI runs a third of them at a time."""
    changed = {mutant.name: mutant.file for mutant in MUTANTS if not mutant.applies}
    assert not changed, f"these files have changed: {changed}"


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
