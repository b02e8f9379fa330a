"""One file per section of a report: findings in, blocks out."""
