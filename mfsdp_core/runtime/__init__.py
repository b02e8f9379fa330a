"""What happens while a model runs: buffers of a group, the two pipelines, hooks, shared context."""
