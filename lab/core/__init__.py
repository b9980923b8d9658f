# SPDX-License-Identifier: GPL-2.0
"""Errors, paths, locks, subprocesses, progress and units. Imports no other package of the lab."""
