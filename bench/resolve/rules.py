"""Why a valid run cannot run here: one function per rule, in the order in which they are asked.

What no machine could do comes first, then what is not built, then what this machine lacks, so that
the printed reason is the one that would survive a move to a larger machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.resolve import (
    collective_rules,
    device_rules,
    dtype_rules,
    engine_rules,
    graph_rules,
    linear_rules,
    nccl_rules,
    parallel_rules,
    recipe_rules,
)
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun

Check = Callable[[ResolvedRun, Machine], str | None]


@dataclass(frozen=True)
class Rule:
    """`check` gives the reason why a run cannot run on a machine, or None.

    `id` is what `UnsupportedError.rule` and the plan show; it is stable.
    """

    id: str
    check: Check


RULES: tuple[Rule, ...] = (
    Rule("strategy-not-in-engine", engine_rules.strategy_not_in_engine),
    Rule("engine-not-on-device", engine_rules.engine_not_on_device),
    Rule("single-has-one-rank", engine_rules.single_has_one_rank),
    Rule("switch-not-in-engine", engine_rules.switch_not_in_engine),
    Rule("outer-strategy-needs-outer-axis", engine_rules.outer_strategy_needs_outer_axis),
    Rule("outer-needs-inner-sharding", engine_rules.outer_needs_inner_sharding),
    Rule("outer-axis-leaves-ranks-to-shard", engine_rules.outer_axis_leaves_ranks_to_shard),
    Rule("parallelism-not-in-engine", parallel_rules.parallelism_not_in_engine),
    Rule("tensor-parallel-cuts-evenly", parallel_rules.tensor_parallel_cuts_evenly),
    Rule("expert-parallel-spreads-evenly", parallel_rules.expert_parallel_spreads_evenly),
    Rule("no-overlap-needs-whole-gradients", engine_rules.no_overlap_needs_whole_gradients),
    Rule("resharding-to-a-part", engine_rules.resharding_to_a_part),
    Rule("decoupled-gradients-need-a-reader", engine_rules.decoupled_gradients_need_a_reader),
    Rule("fused-adam-needs-cuda", engine_rules.fused_adam_needs_cuda),
    Rule("optimizer-has-no-such-state", engine_rules.optimizer_has_no_such_state),
    Rule("remainders-need-bf16-weights", engine_rules.remainders_need_bf16_weights),
    Rule("gather-precision-without-recipe", recipe_rules.gather_precision_without_recipe),
    Rule("recompute-inside-of-a-unit", recipe_rules.recompute_inside_of_a_unit),
    Rule("dtypes-not-in-engine", dtype_rules.dtypes_not_in_engine),
    Rule("collective-needs-ranks", collective_rules.collective_needs_ranks),
    Rule("collective-is-only-timed", collective_rules.collective_is_only_timed),
    Rule("transport-has-no-broadcast", collective_rules.transport_has_no_broadcast),
    Rule("registration-needs-nccl", collective_rules.registration_needs_nccl),
    Rule("copy-engine-only-gathers", collective_rules.copy_engine_only_gathers),
    Rule("nccl-ub-needs-cuda", nccl_rules.nccl_ub_needs_cuda),
    Rule("nccl-ub-needs-sum", nccl_rules.nccl_ub_needs_sum),
    Rule("nccl-ub-needs-pool", nccl_rules.nccl_ub_needs_pool),
    Rule("nccl-settings-need-cuda", nccl_rules.nccl_settings_need_cuda),
    Rule("copy-engine-needs-windows", nccl_rules.copy_engine_needs_windows),
    Rule("nvls-needs-devices-of-their-own", nccl_rules.nvls_needs_devices_of_their_own),
    Rule("pool-slots-need-pool", nccl_rules.pool_slots_need_pool),
    Rule("double-buffer-needs-pool", nccl_rules.double_buffer_needs_pool),
    Rule("registration-needs-nccl-ub", nccl_rules.registration_needs_nccl_ub),
    Rule("cuda-graph-needs-cuda", graph_rules.cuda_graph_needs_cuda),
    Rule("cuda-graph-needs-fixed-memory", graph_rules.cuda_graph_needs_fixed_memory),
    Rule("cuda-graph-keeps-the-host-out", graph_rules.cuda_graph_keeps_the_host_out),
    Rule("cuda-graph-hides-operations", graph_rules.cuda_graph_hides_operations),
    Rule("recipe-not-built", recipe_rules.recipe_not_built),
    Rule("linear-has-no-such-recipe", linear_rules.linear_has_no_such_recipe),
    Rule("linear-beside-the-engine", linear_rules.linear_beside_the_engine),
    Rule("linear-sizes-divide", linear_rules.linear_sizes_divide),
    Rule("linear-not-here", linear_rules.linear_not_here),
    Rule("engine-not-here", engine_rules.engine_not_here),
    Rule("too-few-nodes", device_rules.too_few_nodes),
    Rule("too-few-devices", device_rules.too_few_devices),
    Rule("too-many-cpu-ranks", device_rules.too_many_cpu_ranks),
    Rule("dtype-not-on-device", device_rules.dtype_not_on_device),
    Rule("not-enough-memory", device_rules.not_enough_memory),
    Rule("model-not-here", device_rules.model_not_here),
    Rule("data-not-here", device_rules.data_not_here),
)


def broken_rules(run: ResolvedRun, machine: Machine) -> list[tuple[str, str]]:
    """(rule id, reason) of every rule that stops `run` on `machine`, in the order of `RULES`."""
    reasons = ((rule.id, rule.check(run, machine)) for rule in RULES)
    return [(rule_id, reason) for rule_id, reason in reasons if reason is not None]
