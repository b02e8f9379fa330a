"""The checks: each takes the evidence of a case and says passed, failed or not applicable."""
