"""Two cells, or all cells of a dtype policy, side by side."""
