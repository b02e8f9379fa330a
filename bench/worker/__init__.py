"""One rank of a run: `python -m bench.worker RUN_DIR`, started by torch.distributed.run.

Reads `spec.json` in RUN_DIR, trains, and leaves there: `steps.node<K>.jsonl` (every rank),
`runtime.json` and `memory.json` (rank 0), `failure.rank<N>.json` (a rank that fails). The exit code
is 0 only after a full run. Importing the package loads nothing: the process ties its life to its
parent's before it spends seconds on importing torch.
"""
