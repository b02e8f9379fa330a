"""Moved to reports/renderers; this name goes with its last reader."""

from reports.renderers.document import Block, Bullets, Heading, Paragraph, Section, TableBlock

__all__ = ["Block", "Bullets", "Heading", "Paragraph", "Section", "TableBlock"]
