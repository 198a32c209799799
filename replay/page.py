"""Self-contained HTML pages of plots."""

from collections.abc import Iterable
from html import escape

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 1340px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: right }
td:first-child { text-align: left }
pre { white-space: pre-wrap } .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)) }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Returns a page with that title around parts that are already HTML."""
    name = escape(title)
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return "\n".join([head, f"<h1>{name}</h1>", *parts, "</html>\n"])
