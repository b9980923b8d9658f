# SPDX-License-Identifier: GPL-2.0
"""The Knownzero lab: fetch, build, boot, test and measure the kernel and QEMU series."""
