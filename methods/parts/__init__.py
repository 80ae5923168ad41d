"""Holds what several methods share: below the methods, above the contract (methods/base) and the layers."""
