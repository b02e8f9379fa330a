"""Preparing the arms of a comparison: checkouts, interpreters, packages, all before any run."""
