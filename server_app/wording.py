"""How numbers are written for people, the same in the progress lines and in the report."""

import math
import unicodedata
from decimal import ROUND_CEILING, Decimal

NOTHING = "–"


def percent(value: float | None) -> str:
    """Write a fraction of 1 as a percentage with one digit, without the sign.

    >>> percent(0.5104)
    '51.0'
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    scaled = 100 * value
    return f"{scaled:.1f}" if abs(scaled) < 1e4 else f"{scaled:.0e}"


def points(before: float | None, after: float | None) -> str:
    """Write a gain in percentage points, with its sign.

    >>> points(0.51, 0.63)
    '+12.0'
    """
    if before is None or after is None:
        return NOTHING
    # The difference of what is shown, so that a reader who subtracts agrees.
    gain = round(100 * after, 1) - round(100 * before, 1)
    return f"{gain:+.1f}".replace("-", "−") if abs(gain) >= 0.05 else "±0.0"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with so many significant digits.

    >>> number(0.00001)
    '1e-5'
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")


def figures(value: float | None) -> str:
    """Write a number of a table with three significant digits, zeros included.

    >>> figures(1.0), figures(0.02)
    ('1.00', '0.0200')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:#.3g}".rstrip(".").replace("e-0", "e-").replace("e+0", "e+")


def epsilon_text(value: float | None, digits: int = 3) -> str:
    """Write an epsilon with so many digits, rounded up: what is claimed is never too little.

    >>> epsilon_text(0.684), epsilon_text(0.6841)
    ('0.684', '0.685')
    """
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "infinite"
    exact = Decimal(repr(float(value)))
    if not exact:
        return "0"
    rounded = exact.quantize(
        Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding=ROUND_CEILING
    )
    return f"{rounded:f}" if 1e-3 <= value < 1e4 else f"{rounded:.2e}"


def duration(seconds: float | None) -> str:
    """Write a duration as mm:ss, and in coarser units when it is long.

    >>> duration(754), duration(4 * 3600 + 120), duration(3 * 86400)
    ('12:34', '4h02m', '3d00h')
    """
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return NOTHING
    whole = round(seconds)
    if whole < 6000:
        return f"{whole // 60:02d}:{whole % 60:02d}"
    minutes = whole // 60
    if minutes < 48 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = minutes // 60
    return f"{hours // 24}d{hours % 24:02d}h" if hours < 2400 else ">99d"


def shorten(text: str, cells: int) -> str:
    """Cut a text to so many cells of a terminal, with an ellipsis; always one printable line."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    if width(clean) <= cells:
        return clean
    kept = ""
    for character in clean:
        if width(kept + character) > cells - 1:
            break
        kept += character
    return kept + "…"


def width(text: str) -> int:
    """Count the cells that a text takes in a terminal (East Asian letters take two)."""
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
