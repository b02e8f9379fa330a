"""The launcher of this machine: an agent process, its tree of ranks, and how to end all of it."""
