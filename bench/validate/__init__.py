"""Whether an engine is right: cases and programs, run on ranks and judged against plain torch."""
