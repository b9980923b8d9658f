# SPDX-License-Identifier: GPL-2.0
"""Results of measurements and the pages that show them. Imports core to boot."""
