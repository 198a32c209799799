"""Writes the table of chat templates in docs/tools.md: `python -m tools.template_table`.

The templates are llama.cpp's collection, which `deploy/llama_cpp_wheel.py` keeps in the cache."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from deploy import llama_cpp_wheel
from tokenbus.protocol.prompt.rendering import PromptPieces
from tokenbus.protocol.prompt.special_tokens import SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.worker.chat_format.infer import infer_format
from tokenbus.worker.chat_format.known_formats import known_format
from tokenbus.worker.contract.chat_format import ChatFormat

TARGET = Path(__file__).parents[1] / "docs" / "tools.md"
_TABLE = re.compile(r"(?<=<!-- templates -->\n).*?(?=<!-- end of templates -->)", re.DOTALL)
_SPECIAL = re.compile(r"<[|｜][^<>\s'\"{}]{1,40}?[|｜]>|\[/?[A-Z_]{3,}\]")
"""Texts in a template that are special tokens of its model, as far as one can see."""


class Row(NamedTuple):
    """One template: its name, its format, and whether the template shows the calls without any data."""

    name: str
    format: ChatFormat | None
    shows_calls: bool

    @property
    def has_calls(self) -> bool:
        return self.format is not None and self.format.calls is not None

    def __str__(self) -> str:
        calls = self.format.calls if self.format is not None else None
        cells = [self.name, _kind(self.format), "", "", _reasoning(self.format)]
        if calls is not None:
            cells[2] = "several" if calls.parallel else "one"
            cells[3] = "template" if self.shows_calls else "data"
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def rows(folder: Path) -> list[Row]:
    return [_row(path) for path in sorted(folder.glob("*.jinja"), key=lambda path: path.name.lower())]


def table(found: list[Row]) -> str:
    """Returns the table and its sums."""
    shown = sum(row.shows_calls for row in found)
    reasoning = sum(_reasoning(row.format) != "" for row in found)
    head = "| template | calls | in an answer | shown by | reasoning |\n|---|---|---|---|---|"
    sums = (
        f"Of {len(found)} templates {sum(row.has_calls for row in found)} have tools, {shown} of which would have them "
        f"without any data, and {reasoning} have reasoning."
    )
    return "\n".join([head, *map(str, found), "", sums, ""])


def with_table(page: str, made: str) -> str:
    return _TABLE.sub(lambda _: made, page)


def _row(path: Path) -> Row:
    source = path.read_text()
    special = {text: number for number, text in enumerate(sorted(set(_SPECIAL.findall(source))))}
    template = ChatTemplate(source, SpecialTokens(special), "<s>", "</s>")

    def render(
        conversation: list[ChatMessage], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> PromptPieces:
        return template.render(conversation, variables, tools)

    shown = infer_format(render, source, special, None)
    found = infer_format(render, source, special, known_format(source))
    return Row(path.stem, found, shown is not None and shown.calls is not None)


def _kind(form: ChatFormat | None) -> str:
    if form is None or form.calls is None:
        return ""
    if form.channels is not None:
        return f"{form.calls.kind} `{form.channels.recipient.strip()}{form.channels.function}`"
    opening = (form.calls.section_open + form.calls.call_open).strip().splitlines()
    marker = f" `{opening[0]}`" if opening else ""
    return f"{form.calls.kind}{marker}"


def _reasoning(form: ChatFormat | None) -> str:
    if form is None:
        return ""
    if form.channels is not None:
        return ", ".join(f"`{name}`" for name in form.channels.reasoning)
    if form.reasoning is None:
        return ""
    switch = f", `{form.reasoning.switch}`" if form.reasoning.switch else ""
    return f"`{form.reasoning.open.strip()}`{switch}"


if __name__ == "__main__":
    made = table(rows(llama_cpp_wheel.kept(llama_cpp.__version__, "templates")))
    TARGET.write_text(with_table(TARGET.read_text(), made))
