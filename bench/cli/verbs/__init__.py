"""What every verb takes: a class each, whose text is its help. Only typer is imported here."""
