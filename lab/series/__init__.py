# SPDX-License-Identifier: GPL-2.0
"""`kz tree` and `kz series`: trees, saving, checks, other sources, mails. Imports all others."""
