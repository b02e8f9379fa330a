"""Findings as JUnit XML, which CI systems show like tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from reports.renderers.printable import printable

_RESULTS = {"failure": Failure, "error": Error, "skipped": Skipped}


@dataclass(frozen=True)
class Finding:
    """One test case. message: in its result, or its output if it passed. kind: of the result."""

    classname: str
    name: str
    message: str = ""
    state: Literal["passed", "failure", "error", "skipped"] = "passed"
    kind: str = ""


def junit(title: str, suite_name: str, findings: Iterable[Finding]) -> str:
    """An XML document of one suite."""
    suite = TestSuite(printable(suite_name))
    for one in findings:
        case = TestCase(name=printable(one.name), classname=printable(one.classname))
        message = printable(one.message)
        if one.state != "passed":
            case.result = [_RESULTS[one.state](message, one.kind or None)]
        elif message:
            case.system_out = message
        suite.add_testcase(case)
    document = JUnitXml(title)
    document.add_testsuite(suite)
    document.update_statistics()
    text: bytes = document.tostring()
    return text.decode("utf-8")
