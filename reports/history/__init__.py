"""How a number went over commits and days: starts, points of them, and where the level changed."""
