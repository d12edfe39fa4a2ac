"""`python -m dosimeter` is the command `dosimeter`."""

from __future__ import annotations

from dosimeter.cli import main

raise SystemExit(main())
