"""Keys and values of conversations between their turns (CachedAttention, ATC 2024): a store with tiers, the policies
that place sessions in them, and a simulator of both at the paper's scale."""
