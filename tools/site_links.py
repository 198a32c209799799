"""Lets the documentation's links work on its site as they do in the repository: a hook of MkDocs, named by mkdocs.yml.

Files outside docs/ to which pages link become part of the site, below repository/."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)#:\s]+)")
_CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
_NO_WORD = re.compile(r"[^\w\- ]")
_DOCS = "docs/"
_OUTSIDE = "repository/"


def slug(title: str, separator: str) -> str:
    """Returns a heading's anchor as GitHub writes it, so that links to headings work in both places."""
    return _NO_WORD.sub("", title.strip().lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ to which pages link, and those to which these link."""
    todo = [_in_repository(file.src_uri) for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        path = todo.pop()
        for link in _links((ROOT / path).read_text() if path.endswith(".md") else ""):
            target = _target(path, link)
            if target not in seen and not target.startswith(("..", _DOCS)) and (ROOT / target).is_file():
                files.append(File.generated(config, _on_site(target), abs_src_path=str(ROOT / target)))
                seen.add(target)
                todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns a page's text with the links to and from files outside docs/ as they are on the site."""
    path = _in_repository(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        target = _target(path, found[2])
        return found[1] + (posixpath.relpath(_on_site(target), here or ".") if (ROOT / target).exists() else found[2])

    return "".join(part if part.startswith("`") else _LINK.sub(moved, part) for part in _CODE.split(markdown))


def _links(markdown: str) -> list[str]:
    return [found[1] for found in _LINK.findall(_CODE.sub("", markdown))]


def _target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _on_site(path: str) -> str:
    return path.removeprefix(_DOCS) if path.startswith(_DOCS) else _OUTSIDE + path


def _in_repository(uri: str) -> str:
    return uri.removeprefix(_OUTSIDE) if uri.startswith(_OUTSIDE) else _DOCS + uri
