"""HTML pages in one file: the styles, the data and the scripts inside.

Names and files may come from anyone: they reach a page only as JSON that a script sets as text, or
escaped. A page loads nothing, and its Content-Security-Policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

PALETTE = Path(__file__).with_name("palette.css")  # colours and font of all pages
SHARED = Path(__file__).with_name("shared.js")  # what scripts of several pages use

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="mivhead">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def make_page(
    title: str,
    body: str,
    style: str,
    scripts: Sequence[str] = (),
    *,
    data: object = None,
    allowed: Mapping[str, str] | None = None,
) -> str:
    """Return a page; `body` is HTML, and `allowed` adds sources to its policy."""
    style = PALETTE.read_text("utf-8") + style
    scripts = [_inline(script) for script in scripts]
    policy = {"default-src": "'none'", "img-src": "data:", "script-src": "", **(allowed or {})}
    hashes = " ".join(map(_hash, scripts)) or "'none'"
    policy["script-src"] = f"{hashes} {policy['script-src']}".strip()
    policy |= {"style-src": _hash(style), "base-uri": "'none'", "form-action": "'none'"}
    parts = [body]
    if scripts:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        for character in "<>&":  # so that nothing in the data ends the script element
            text = text.replace(character, f"\\u{ord(character):04x}")
        parts.append(f'<script type="application/json" id="data">{text}</script>')
        parts += [f"<script>{script}</script>" for script in scripts]
    return _PAGE.format(
        policy="; ".join(f"{name} {sources}" for name, sources in policy.items()),
        title=escape(title),
        style=style,
        body="\n".join(parts),
    )


def _inline(script: str) -> str:
    """Return a script that can stand in a page, without exports and its source map."""
    script = re.sub(r"^//# sourceMappingURL=.*$|^export ", "", script, flags=re.MULTILINE)
    return script.replace("</script", "<\\/script").replace("\r\n", "\n")


def _hash(text: str) -> str:
    """Return the name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
