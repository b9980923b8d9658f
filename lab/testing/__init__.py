# SPDX-License-Identifier: GPL-2.0
"""The test suite, nights, fuzzers and KUnit. Imports core to bench."""
