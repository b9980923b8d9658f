# SPDX-License-Identifier: GPL-2.0
"""Kernels, QEMU, the daemon, guest programs and Debian packages. Imports core to series."""
