# SPDX-License-Identifier: GPL-2.0
"""Entry of ``python -m lab``."""

from lab.cli import main

raise SystemExit(main())
