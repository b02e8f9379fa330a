"""NCCL audit: which kernel ran for which collective, and why not the symmetric one.

README.md says which file to open. Nothing in this package imports torch, pydantic or pandas, so
that the command starts quickly.
"""
