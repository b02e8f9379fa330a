"""A document as one HTML file that needs nothing from anywhere else."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reports.document import Document
from reports.printable import printable

_TEMPLATES = Path(__file__).parent / "templates"


def render(document: Document) -> str:
    """The page. Everything is escaped but the figures, which this program has drawn itself."""
    return _environment().get_template("report.html.j2").render(document=document)


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
    # matplotlib escapes text in the figures; see the tests with hostile names.
    environment.filters["figure"] = Markup
    return environment
