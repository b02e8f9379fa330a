"""What this machine and this installation can run, and what is missing for more."""
