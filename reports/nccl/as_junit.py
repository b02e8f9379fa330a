"""Requirements as JUnit: one test case each, so that a CI system shows them like tests."""

from __future__ import annotations

from collections.abc import Sequence

from reports.nccl.requirement import Result
from reports.renderers.printable import printable


def to_junit(results: Sequence[Result]) -> str:
    """An XML document; a requirement without evidence is a failure of its own type."""
    from junitparser import Failure, JUnitXml, TestCase, TestSuite

    suite = TestSuite("NCCL requirements")
    for one in results:
        case = TestCase(printable(one.requirement.text), classname="nccl")
        if one.state != "met":
            kind = "NoEvidence" if one.state == "no evidence" else "RequirementNotMet"
            case.result = [Failure(printable(one.message), kind)]
        suite.add_testcase(case)
    document = JUnitXml("mfsdp-bench nccl")
    document.add_testsuite(suite)
    document.update_statistics()
    text = document.tostring()
    return text.decode() if isinstance(text, bytes) else str(text)
