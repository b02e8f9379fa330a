"""Logs of other frameworks, read into `bench.workload`: what they say, and nothing made up."""
