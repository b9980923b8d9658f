#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# Python, numpy arrays of 64 MB
# packages: python3-numpy
[ "${1:-}" != prepare ] || exit 0
python3 - <<'END'
import numpy

one = numpy.arange(8 << 20, dtype="f8")
two = one * 2 + 1
three = numpy.ascontiguousarray(two.reshape(2048, 4096).T)
four = numpy.zeros_like(three)
four += three
print(one.sum(), two.sum(), four[::7].sum())
END
