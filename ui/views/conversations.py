"""Conversations."""

from ui import shell

shell.show("Conversations", "", lambda: None)
