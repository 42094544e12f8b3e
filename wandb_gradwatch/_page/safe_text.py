"""Texts of anybody's in a page: nothing in them acts, and nothing in them hides."""

from __future__ import annotations

import json
import unicodedata
from typing import Any


def visible_text(text: str) -> str:
    """Make characters that steer the text's direction, or cannot be seen at all, visible: U+202E becomes ‹U+202E›."""
    return "".join(
        f"‹U+{ord(char):04X}›"
        if char not in "\n\t" and unicodedata.category(char) in ("Cf", "Cc", "Cs", "Co")
        else char
        for char in text
    )


def visible(content: Any) -> Any:
    """Every text in lists and dicts made visible; what is ASCII is left as it is."""
    if isinstance(content, str):
        return content if content.isascii() and content.isprintable() else visible_text(content)
    if isinstance(content, dict):
        return {key: visible(value) for key, value in content.items()}
    if isinstance(content, list) and any(isinstance(value, (str, list, dict)) for value in content):
        return [visible(value) for value in content]
    return content


def script_json(content: Any) -> str:
    """JSON that can stand in a script element: no character in it can end the element or open another."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
