# SPDX-License-Identifier: GPL-2.0
"""Running the tests of tests/, and nights of them. Imports core to bench."""
