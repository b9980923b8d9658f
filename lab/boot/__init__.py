# SPDX-License-Identifier: GPL-2.0
"""Guests: what one is made of, running it, judging its console. Imports core to build."""
