"""``python -m asupervisor`` is the same as the command ``asupervisor``."""

from __future__ import annotations

from asupervisor.cli import main

if __name__ == "__main__":
    main(prog_name="python -m asupervisor")
