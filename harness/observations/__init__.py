"""What papers observe of a model's keys and attention weights, which no run of a method shows."""
