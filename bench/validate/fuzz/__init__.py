"""Random training programs compared with plain torch: drawn, run, and shrunk to a script."""
