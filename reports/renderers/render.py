"""One way out: blocks for a terminal or as Markdown, documents as Markdown or a page, JUnit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from reports.renderers import markdown, terminal
from reports.renderers.document import Block, Document
from reports.renderers.printable import printable

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

Form = Literal["terminal", "md", "html"]
_JOINT = re.compile(r"([_:-])(?=\w)")


def render(content: Document | Iterable[Block], form: Form = "terminal") -> str:
    """Text in the form that is requested.

    html: one page that needs nothing from anywhere else, of documents only. Everything in it is
    escaped but the figures, which this program has drawn itself.
    """
    if not isinstance(content, Document):
        return markdown.blocks(content) if form == "md" else terminal.blocks(content)
    return _page().render(document=content) if form == "html" else markdown.document(content)


def breakable(text: str) -> Markup:
    """Escaped text that may be broken after the joints of a name, so that tables stay narrow."""
    from markupsafe import Markup, escape

    # A plain str: joining pieces of Markup would escape them again.
    return Markup(_JOINT.sub(r"\1<wbr>", str(escape(printable(text)))))


@cache
def _page() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # matplotlib escapes text in the figures; see the tests with hostile names.
    environment.filters |= {"plain": printable, "breakable": breakable, "figure": Markup}
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment.get_template("report.html.j2")


class Finding(NamedTuple):
    """One test case. message: in its result, or its output if it passed. kind: of the result."""

    classname: str
    name: str
    message: str = ""
    state: Literal["passed", "failure", "error", "skipped"] = "passed"
    kind: str = ""


def junit(title: str, suite_name: str, findings: Iterable[Finding]) -> str:
    """JUnit XML of one suite, which CI systems show like tests."""
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    results = {"failure": Failure, "error": Error, "skipped": Skipped}
    suite = TestSuite(printable(suite_name))
    for finding in findings:
        case = TestCase(name=printable(finding.name), classname=printable(finding.classname))
        message = printable(finding.message)
        if finding.state != "passed":
            case.result = [results[finding.state](message, finding.kind or None)]
        elif message:
            case.system_out = message
        suite.add_testcase(case)
    document = JUnitXml(title)
    document.add_testsuite(suite)
    document.update_statistics()
    text: bytes = document.tostring()
    return text.decode("utf-8")
