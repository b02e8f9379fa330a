"""What measures and tests the core; no part of a training process."""
