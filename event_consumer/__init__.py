"""Reads the checkpoint stream into traces, metrics and a queryable store."""
