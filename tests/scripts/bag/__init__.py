"""A package for -m."""
