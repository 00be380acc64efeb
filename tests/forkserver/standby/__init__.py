"""Standbys: rules and records alone, and real processes that park and become ranks."""
