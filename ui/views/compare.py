"""Compare."""

from ui import shell

shell.show("Compare", "", lambda: None)
