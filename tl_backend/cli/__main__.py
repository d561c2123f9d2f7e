"""``python -m tl_backend.cli``: the program ``tl-backend``."""

from __future__ import annotations

from tl_backend.cli.app import main

main()
