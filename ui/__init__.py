"""The dashboard: what was retained, what was reused, and why not."""
