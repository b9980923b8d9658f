# SPDX-License-Identifier: GPL-2.0
"""Figures as people read them."""


def human(value: float, unit: str) -> str:
    """A value with its unit, three digits or so.

    ``256 MiB``, ``51.2 ms``, ``1,204 instructions``.
    """
    if unit == "bytes":
        divisor, name = scale(unit, abs(value))
        return f"{digits(value / divisor)} {name.replace('bytes', 'B')}"
    if unit == "percent":
        return f"{value:.1f} %"
    if unit == "instructions":
        return f"{value:,.1f}" if value < 10000 else f"{value:,.0f}"
    return f"{digits(value)} {unit}".strip()


def digits(value: float) -> str:
    """A number with about three significant digits and no exponent."""
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A change in percent with its sign, or a dash where there is none."""
    if value is None:
        return "–"
    # More digits near 0 and near 100 percent.
    size = abs(value)
    if size < 2:
        return f"{value:+.2f} %"
    return f"{value:+.1f} %" if 98 <= size <= 102 else f"{value:+.0f} %"


# Largest value from which on the values of a row are divided, the divisor, and the unit's name
# then.
SCALES = {
    "bytes": (
        *((1 << by, 1 << by, name) for by, name in ((30, "GiB"), (20, "MiB"), (10, "KiB"))),
        (0, 1, "bytes"),
    ),
    "instructions": ((0, 1, "instructions"),),
    "ns": ((1e6, 1e6, "ms"), (1e4, 1e3, "µs"), (0, 1, "ns")),
    "": ((1e6, 1e6, "M "), (1e5, 1e3, "1000 "), (0, 1, "")),
}


def scale(unit: str, largest: float) -> tuple[float, str]:
    """The divisor for values up to ``largest``, so that they share a unit, and the name of that
    unit.
    """
    divisor, word = next(
        (by, name) for least, by, name in SCALES.get(unit, SCALES[""]) if largest >= least
    )
    return divisor, word if unit in SCALES else f"{word}{unit}"
