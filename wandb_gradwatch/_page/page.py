"""Writes one self-contained HTML file about a run's gradients, which needs no server, account or network.

All pictures are painted on canvases by the scripts in assets/, without a library.
"""

import base64
import hashlib
import html
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .._analysis.formatting import visible_text
from .compare import build_comparison
from .history import RunHistory
from .packing import Blob
from .payload import build_payload

ASSETS: Final = Path(__file__).parent / "assets"
# All scripts share one scope, in this order: a file may use earlier files while it loads, and all files later.
SCRIPTS: Final = (
    *("text.js", "data.js", "theme.js", "view.js", "picture.js", "frame.js", "lines.js", "heatmap.js"),
    *(
        "strip.js",
        "ridges.js",
        "grids.js",
        "incidents.js",
        "table.js",
        "compare.js",
        "preview.js",
        "live.js",
        "main.js",
    ),
)


_MAX_NAME: Final = 60  # characters of a run's name in the name of a file


class Words(NamedTuple):
    """Explanations of a picture, used by the page, the report and the workspace."""

    title: str
    healthy: str
    otherwise: str


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


# By the picture's key: three lines per picture, the first of which begins with the key in brackets.
WORDS: Final[Mapping[str, Words]] = {
    key: Words(*texts) for key, *texts in re.findall(r"^\[(\w+)\] (.+)\n(.+)\n(.+)$", _asset("words.txt"), re.MULTILINE)
}


def write_page(history: RunHistory, output: str | os.PathLike[str], *, others: Sequence[RunHistory] = ()) -> Path:
    """Write the page of a run, or of several runs side by side; see write_html."""
    return write_html(render_page(history, others=others), Path(output))


def page_in(folder: Path, *names: str) -> Path:
    """Return the path of a page about runs or projects of these names, which come from files and from W&B.

    Raises:
        OSError: something other than a plain file has this name: it would be written to, and may lead elsewhere.
    """
    safe = "-".join(re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_MAX_NAME] for name in names)
    path = folder / f"gradwatch-{safe}.html"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(f"the page {path} is there as a link or another special file; remove it, or use --output FILE")
    return path


def write_html(page: str, output: Path) -> Path:
    """Write or replace a file and return its path; an OSError says why it cannot be written."""
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a directory" if output.is_dir() else f"cannot be written: there is no directory {output.parent}"
        raise OSError(f"the page {output} {problem}; give the name of an HTML file")
    if output.is_file() or not output.exists():
        if output.is_symlink():
            raise OSError(f"the page {output} is a link, which is not followed; give the name of the file itself")
    else:  # /dev/stdout must not be replaced
        output.write_text(page, encoding="utf-8")
        return output
    # A browser that loads the page during the write gets the old page or the new one, never a part of it.
    partial = output.with_name(f".gradwatch-{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:  # a new file, not one that somebody has put there
            file.write(page)
        partial.replace(output)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return output.resolve()


def render_page(history: RunHistory, *, others: Sequence[RunHistory] = (), version: int | None = None) -> str:
    """Render the page of one or several runs as HTML; with a version, the page polls its server for newer ones."""
    content, blob = build_comparison([history, *others]) if others else build_payload(history)
    title = f"{1 + len(others)} runs" if others else history.name or history.run_id
    return render_content(f"{title} · gradients", content, blob, version=version)


def render_content(title: str, content: Mapping[str, Any], blob: Blob, *, version: int | None = None) -> str:
    """Render a page as HTML from its content and the content's arrays."""
    style = _asset("page.css")
    program = '"use strict";(() => {\n' + "".join(map(_asset, SCRIPTS)) + "})();"
    # Only exactly these scripts and styles are allowed, and only the page's own server may be contacted.
    from_server = "" if version is None else "; connect-src 'self'"
    policy = (
        f"default-src 'none'; script-src {_hash(program)}; style-src {_hash(style)}; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'{from_server}"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(visible_text(title))}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><noscript>This page draws its pictures with JavaScript.</noscript></main>
<script type="application/json" id="content">{script_json(_with_words(content, version))}</script>
<script type="application/octet-stream" id="arrays">{blob.encoded()}</script>
<script>{program}</script>
</body>
</html>
"""


def render_data(history: RunHistory, version: int) -> str:
    """Return the JSON with which an open page replaces its content."""
    content, blob = build_payload(history)
    return script_json({"content": _with_words(content, version), "arrays": blob.encoded()})


def _with_words(content: Mapping[str, Any], version: int | None) -> dict[str, Any]:
    return {**content, "version": version, "words": {key: words._asdict() for key, words in WORDS.items()}}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _visible(content: Any) -> Any:
    """Apply visible_text to every text in lists, tuples and dicts."""
    if isinstance(content, str):
        return visible_text(content)
    if isinstance(content, dict):
        return {key: _visible(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)) and any(isinstance(value, (str, list, tuple, dict)) for value in content):
        return [_visible(value) for value in content]
    return content


def script_json(content: Any) -> str:
    """Return JSON that is safe inside a script element: no character can end the element, open another, or hide."""
    text = json.dumps(_visible(content), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
