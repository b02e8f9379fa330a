"""Verdicts by a policy: samples, pairing, rules, noise floor, baselines."""
