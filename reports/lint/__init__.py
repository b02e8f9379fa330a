"""What pasted or measured evidence supports: rules over runs, each with the numbers behind it."""
