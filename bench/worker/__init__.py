"""The work of one rank: `python -m bench.worker RUN_DIR`, run by `bench.launch.rank`.

Reads `spec.json` in RUN_DIR, trains, and leaves there: `steps.node<K>.jsonl` (every rank),
`runtime.json` and `memory.json` (rank 0). Importing the package loads nothing: the process ties its
life to its parent's before it spends seconds on importing torch.
"""
