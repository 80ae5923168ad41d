"""What papers publish for our experiments, and our results beside it."""
