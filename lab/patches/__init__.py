# SPDX-License-Identifier: GPL-2.0
"""The parts of both series, and applying their patches. Imports core and machine."""
