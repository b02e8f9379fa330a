"""Reading records: reports, comparisons, loss parity. Never loads torch."""
