"""Head against base: who they are, what is measured of both, and what follows."""
