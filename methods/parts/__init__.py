"""What several methods share. Below the methods and the ready-made layers, above the contract (methods/base)."""
