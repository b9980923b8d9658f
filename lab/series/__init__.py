# SPDX-License-Identifier: GPL-2.0
"""The patch series: git trees, saving, checkpatch, other sources. Imports core and machine."""
