"""A store that keeps the keys and values of conversations between their turns (CachedAttention, ATC
2024): its tiers (host memory and disk), and the policies that decide which conversation lies in
which tier."""
