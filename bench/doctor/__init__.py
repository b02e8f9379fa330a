"""What keeps runs from starting or finishing on this machine, and how to mend it."""
