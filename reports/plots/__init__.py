"""Figures as SVG text: drawn with Agg's metrics, no display, no script, no link to the outside."""
