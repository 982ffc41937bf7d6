"""Health."""

from ui import shell

shell.show("Health", "", lambda: None)
