"""Numeric formats of weights and gradients."""
