"""Whether an engine is right: an oracle over a matrix of cases, and known bugs to try it on."""
