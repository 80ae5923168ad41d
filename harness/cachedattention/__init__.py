"""CachedAttention (ATC 2024): keys and values of a conversation outlive the turn, in tiers of memory and disk."""
