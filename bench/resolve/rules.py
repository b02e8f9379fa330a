"""Why a valid run cannot run here: rules by topic, in the order in which they are checked.

What no machine could do comes first, then what is not built, then what this machine lacks, so that
the printed reason is the one that would survive a move to a larger machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from bench.resolve import core_rules, device_rules, engine_rules, quantised_rules
from bench.resolve.machine import Machine
from bench.spec import ResolvedRun

#: Yields the id of each rule that stops a run on a machine, which is stable, and the reason.
Topic = Callable[[ResolvedRun, Machine], Iterator[tuple[str, str]]]

RULES: Final[tuple[Topic, ...]] = (
    engine_rules.offers,
    engine_rules.outer_axis,
    engine_rules.other_axes,
    engine_rules.schedule,
    engine_rules.optimizers,
    quantised_rules.recipes,
    quantised_rules.dtypes,
    core_rules.user_buffers,
    core_rules.nccl_settings,
    core_rules.pools,
    core_rules.graphs,
    core_rules.offload,
    quantised_rules.layers,
    engine_rules.megatron_package,
    engine_rules.installed,
    device_rules.this_machine,
    device_rules.files,
)


def broken_rules(run: ResolvedRun, machine: Machine) -> Iterator[tuple[str, str]]:
    """(rule id, reason) of every rule that stops `run` on `machine`, in order and one by one."""
    for topic in RULES:
        yield from topic(run, machine)
