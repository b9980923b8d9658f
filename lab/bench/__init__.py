# SPDX-License-Identifier: GPL-2.0
"""The benches: each measures the base kernel and ours side by side. Imports core to report."""
