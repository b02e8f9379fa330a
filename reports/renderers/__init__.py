"""Documents and tables as plain data, and what shows them: HTML, Markdown, terminal."""
