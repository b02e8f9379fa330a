"""Names as they may be shown: text from a record can hold anything, a terminal obeys anything."""

from __future__ import annotations

import unicodedata

_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})


def printable(text: str, limit: int | None = None) -> str:
    """One line without control, direction-changing or unassigned characters.

    Each of those becomes a space (line ends, tabs, odd blanks) or U+FFFD, so that nothing vanishes
    unseen.

    Args:
        text: any text.
        limit: longest result in characters; a longer text is cut and ends in an ellipsis.
    """
    shown = "".join(_shown(character) for character in text)
    if limit is not None and len(shown) > limit:
        return shown[: max(0, limit - 1)] + "…"
    return shown


def _shown(character: str) -> str:
    category = unicodedata.category(character)
    if character in "\r\n\t\v\f" or category == "Zs":
        return " "
    return "\N{REPLACEMENT CHARACTER}" if category in _HIDDEN_CATEGORIES else character
