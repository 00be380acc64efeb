"""Verbs that need no running job: render, convert, operator, completion. Forbidden: torch, grpc."""
