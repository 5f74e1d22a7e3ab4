"""Defines the colours of a report's page for the light and the dark scheme of a browser."""

from __future__ import annotations

from megakit.reporting.figure_style import BAD, CLASS_COLORS, CLASS_COLORS_ON_DARK, GOOD

#: The colours of the page, in the light and in the dark scheme. Each name is a CSS variable.
#: The charts translate one scheme into the other, so no colour may occur twice in a scheme.
PAGE_COLORS: dict[str, tuple[str, str]] = {
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#a5aeb9"),
    "ground": ("#f6f7f8", "#0d1117"),
    "card": ("#ffffff", "#161b22"),
    "veil": ("rgba(255,255,255,.85)", "rgba(22,27,34,.85)"),
    "line": ("#d8dee4", "#30363d"),
    "edge": ("#7d8590", "#768390"),
    "focus": ("#0072b2", "#79c0ff"),
    "right": (GOOD, "#6cb6ff"),
    "wrong": (BAD, "#ff8f73"),
    "rate": ("#717581", "#9aa0ab"),
    **{
        f"class-{number}": pair
        for number, pair in enumerate(zip(CLASS_COLORS, CLASS_COLORS_ON_DARK, strict=True))
    },
}


def style_sheet() -> str:
    """Returns CSS that sets a variable for each colour, in both schemes."""
    light, dark = (
        " ".join(f"--{name}: {pair[scheme]};" for name, pair in PAGE_COLORS.items())
        for scheme in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )
