"""Computes LongBench v1's metrics (arXiv:2308.14508, table 1), equal to the official functions to
the last digit.

All are pure functions of strings that return a number from 0 to 1.
"""
