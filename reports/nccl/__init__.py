"""NCCL audit: which kernel ran for which collective, and why not the symmetric one.

Data flows one way: source (bytes) -> scan (facts and tallies per process of the log) -> replay (the
same in order, with communicators and phases) -> verdicts -> reasons -> requirements -> rendering.
Nothing in this package imports torch, pydantic or pandas, so that the command starts quickly.
"""
