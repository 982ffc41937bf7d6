"""Overview."""

from ui import shell

shell.show("Overview", "", lambda: None)
