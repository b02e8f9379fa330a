"""A gate's result as JUnit XML, which every CI system shows: a test case per cell and metric."""

from __future__ import annotations

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from reports.gates.gate import GateResult
from reports.gates.gate_table import interval_text
from reports.gates.judgement import Judgement
from reports.renderers import quantity
from reports.renderers.printable import printable


def to_junit(result: GateResult, *, strict: bool = False) -> str:
    """XML text.

    Failures are required metrics that regressed (with `strict` undecided ones too), errors are
    cells without a number, skipped are pruned, incomparable, undecided and advisory ones.
    """
    suite = TestSuite(printable(f"mfsdp-bench gate: {result.sides.head}"))
    for judgement in result.judgements:
        suite.add_testcase(_case(judgement, strict=strict))
    for name, why in result.sides.failed:
        suite.add_testcase(_with(name, "measured", Error(printable(why), "failed")))
    for name, why in result.sides.not_comparable:
        suite.add_testcase(_with(name, "comparable", Skipped(printable(f"not comparable: {why}"))))
    for name, why in result.sides.pruned:
        suite.add_testcase(_with(name, "pruned", Skipped(printable(f"pruned: {why}"))))
    suite.update_statistics()
    document = JUnitXml("mfsdp-bench gate")
    document.add_testsuite(suite)
    document.update_statistics()
    text: bytes = document.tostring()
    return text.decode("utf-8")


def _case(one: Judgement, *, strict: bool) -> TestCase:
    message = printable(sentence(one))
    case = TestCase(name=one.metric, classname=printable(one.cell))
    if one.required and one.verdict == "unmeasured":
        case.result = [Error(message, "unmeasured")]
    elif one.required and (
        one.verdict == "regressed" or (strict and one.verdict == "inconclusive")
    ):
        case.result = [Failure(message, one.verdict)]
    elif one.verdict in ("inconclusive", "unmeasured", "regressed"):
        case.result = [Skipped(message, one.verdict)]
    case.system_out = message
    return case


def _with(cell: str, name: str, result: Error | Skipped) -> TestCase:
    case = TestCase(name=name, classname=printable(cell))
    case.result = [result]
    return case


def sentence(one: Judgement) -> str:
    """The judgement in a sentence; for times all three numbers by name."""
    parts = [f"{one.cell}: {one.metric} {one.verdict}" + ("" if one.required else " (advisory)")]
    if one.time_ratio is not None and one.throughput_ratio is not None:
        parts.append(
            f"time change {quantity.change(one.time_ratio - 1)}, throughput change "
            f"{quantity.change(one.throughput_ratio - 1)}, throughput ratio "
            f"{quantity.ratio(one.throughput_ratio)}, interval of the change "
            f"{interval_text(one.interval)}"
        )
    elif one.change is not None and one.metric != "loss":
        parts.append(f"change {quantity.change(one.change, 2)}")
    if one.tolerance is not None and one.metric != "loss":
        parts.append(f"tolerance {quantity.share(one.tolerance, 1)}")
    if one.reason:
        parts.append(one.reason)
    return "; ".join(parts)
