"""What the core promises beside training: its interface, its files, its plans, its refusals.

Each module has a list `CHECKS` of functions that ranks call one after another; they raise
`AssertionError` where the core does other than plain torch, or than numbers worked out by hand.
"""
