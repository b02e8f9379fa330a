"""Hosts of one's own: the same command runs on each, the first one leads, torchrun meets."""
