"""Allocation of the core's buffers, and the account of them."""
