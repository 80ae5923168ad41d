"""Offers our engine as a model to EleutherAI's lm-evaluation-harness, which asks and scores by
itself."""
