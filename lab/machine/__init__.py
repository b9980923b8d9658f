# SPDX-License-Identifier: GPL-2.0
"""The machine and its Debian mirror: packages, sources, tools. Imports core."""
