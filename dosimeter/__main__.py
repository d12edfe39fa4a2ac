"""`python -m dosimeter` is the command `dosimeter`."""

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # the working directory, whose files must not shadow installed modules

from dosimeter.cli import main

raise SystemExit(main())
