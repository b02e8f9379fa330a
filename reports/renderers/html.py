"""A document as one HTML file that needs nothing from anywhere else."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from reports.renderers.document import Document
from reports.renderers.printable import printable

_JOINT = re.compile(r"([_:-])(?=\w)")
_TEMPLATES = Path(__file__).parent / "templates"


def render(document: Document) -> str:
    """The page. Everything is escaped but the figures, which this program has drawn itself."""
    return _environment().get_template("report.html.j2").render(document=document)


def _breakable(text: str) -> Markup:
    """Escaped text that may be broken after the joints of a name, so that tables stay narrow."""
    # A plain str: joining pieces of Markup would escape them again.
    escaped = str(escape(printable(text)))
    return Markup(_JOINT.sub(r"\1<wbr>", escaped))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = printable
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["breakable"] = _breakable
    # matplotlib escapes text in the figures; see the tests with hostile names.
    environment.filters["figure"] = Markup
    return environment
