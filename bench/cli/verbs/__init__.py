"""The options and the help of every verb. A verb imports what it needs when it runs."""
