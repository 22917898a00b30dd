"""Text in charts: numbers as people write them, and lines that fit."""

import math
import re
from functools import cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from pdserve_bench.report.terminal import printable

SMALL = 9.0
"""points of ticks, values, legends"""
FONTS = ("DejaVu Sans", "sans-serif")
_PREFIXES = ((1e-6, "µ"), (1e-3, "m"), (1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"))


def number(value: float, unit: str = "", digits: int = 3) -> str:
    """With so many digits at most, never as a power of ten: `12.3 ms`, `95 %`, `1,200`."""
    if not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0%" if unit == "share" else "0"
    if unit == "share":
        return f"{_plain(100 * value, digits)}%"
    if not unit:
        return _plain(value, digits)
    size, prefix = next(
        (
            (size, prefix)
            for size, prefix in _PREFIXES
            if abs(value) < 999.5 * size or (unit == "s" and size == 1.0)
        ),
        _PREFIXES[-1],
    )
    return f"{_plain(value / size, digits)} {prefix}{unit}"


def _plain(value: float, digits: int) -> str:
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@cache
def width(text: str, size: float, bold: bool = False) -> float:
    """Inches of the longest line, with fonts of `size` points."""
    font = FontProperties(family=list(FONTS), size=size, weight="bold" if bold else "normal")
    lines = text.split("\n")
    return max(float(text_to_path.get_text_width_height_descent(line, font, False)[0]) for line in lines) / 72


def label(text: str, longest: int = 90) -> str:
    """A text from anywhere: without what cannot be drawn, and no longer than that."""
    text = printable(text).replace("\n", " ")
    return text if len(text) <= longest else f"{text[: longest * 2 // 3]}…{text[-longest // 3 + 1 :]}"


def bound(text: str) -> str:
    """With numbers and units that stay on one line."""
    return re.sub(
        r"(?<=\d) (?=(%|[µm]?s|min|[kMG]i?B|[GMk]B/s|req/s|requests/s)\b|%)", "\N{NO-BREAK SPACE}", text
    )


def folded(text: str, inches: float, size: float, bold: bool = False) -> str:
    """In lines that fit, broken between words, and inside a word only where it fits no line."""
    lines = [""]
    for word in bound(text).split(" "):
        candidate = f"{lines[-1]} {word}".strip()
        if width(candidate, size, bold) <= inches:
            lines[-1] = candidate
            continue
        if lines[-1]:
            lines.append("")
        for char in word:
            if lines[-1] and width(lines[-1] + char, size, bold) > inches:
                lines.append("")
            lines[-1] += char
    return "\n".join(lines)
