"""What a user reads on a terminal: notices and tables."""
