# SPDX-License-Identifier: GPL-2.0
"""Checking a series and writing it as mails. Imports core to testing."""
