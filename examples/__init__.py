"""Programs and engines of a user's kind."""
