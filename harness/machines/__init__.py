"""What a machine can do, and how long a step would take on it: recorded schedules, their replay, and plans."""
