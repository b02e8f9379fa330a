"""Random training programs beside plain torch: drawn, run, and shrunk to a script that fails."""
