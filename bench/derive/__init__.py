"""Numbers made out of raw samples: FLOPs, peaks, steady state, summaries. Torch-free.

Written once and used by a run and by every report, so that a formula exists in one place only.
"""
