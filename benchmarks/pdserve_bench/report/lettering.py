"""Text in charts: numbers as people write them, and lines that fit."""

import math
import textwrap

from rich.cells import cell_len

from pdserve_bench.report.terminal import printable

_PREFIXES = ((1e-6, "µ"), (1e-3, "m"), (1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"))


def number(value: float, unit: str = "", digits: int = 3) -> str:
    """Format with so many digits at most, never as a power of ten: `12.3 ms`, `95%`, `1,200`."""
    if not math.isfinite(value):
        return "n/a"
    if unit == "share":
        return f"{_plain(100 * value, digits)}%"
    if not unit or value == 0:
        return _plain(value, digits)
    top = 1.0 if unit == "s" else _PREFIXES[-1][0]
    size, prefix = next(each for each in _PREFIXES if abs(value) < 999.5 * each[0] or each[0] == top)
    return f"{_plain(value / size, digits)} {prefix}{unit}"


def _plain(value: float, digits: int) -> str:
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def label(text: str, longest: int = 90) -> str:
    """A text from anywhere: without what cannot be drawn, and no longer than that."""
    text = printable(text).replace("\n", " ")
    return text if len(text) <= longest else f"{text[: longest * 2 // 3]}…{text[-longest // 3 + 1 :]}"


def width(text: str, size: float) -> float:
    """Inches, about: letters of `size` points are taken to be as wide as the average one."""
    return cell_len(text) * size * 0.58 / 72


def folded(text: str, inches: float, size: float) -> str:
    """Break into lines that fit, between words, and inside a word only where it fits no line."""
    return textwrap.fill(text, max(1, int(inches / width("x", size))), break_on_hyphens=False)
