"""Why an answer is wrong or a run slow: needles followed through a method, and a run explained from what it stored."""
