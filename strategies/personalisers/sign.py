"""The way that Grad and Meta go; docs/algorithm.md derives which is down."""

SIGNS = {"descent": -1.0, "published": 1.0}


def heading(sign: str) -> str:
    """Say the way in words."""
    return "descent" if SIGNS[sign] < 0.0 else "ascent (the published sign)"
