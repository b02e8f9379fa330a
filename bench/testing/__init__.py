"""What the validator and the tests of the core share: ranks, toy models, references, roundings.

Nothing here imports mfsdp_core: whoever judges the core must not take its arithmetic for granted.
"""
