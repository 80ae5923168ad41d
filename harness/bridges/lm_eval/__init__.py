"""Our engine as a model of EleutherAI's lm-evaluation-harness, which asks and scores by itself."""
