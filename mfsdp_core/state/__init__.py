"""What outlives a step: optimizer, norms, state dicts."""
