"""docs/tools.md shows what is found of each chat template of llama.cpp's collection."""

import msgspec
import pytest

from tests.support import llama_cpp_source
from tests.support.reasoning_vocabulary import ReasoningVocabulary
from tools import template_table


@pytest.fixture(scope="module")
def found() -> list[template_table.Row]:
    return template_table.rows(llama_cpp_source.folder("templates"))


@pytest.mark.long
def test_the_table_of_templates_is_up_to_date(found: list[template_table.Row]) -> None:
    page = template_table.TARGET.read_text()
    assert page == template_table.with_table(page, template_table.table(found)), "run python -m tools.template_table"


@pytest.mark.long
def test_as_many_templates_have_tools_as_ever(found: list[template_table.Row]) -> None:
    calling = [row.name for row in found if row.format is not None and row.format.calls is not None]
    assert len(calling) >= 56, calling


@pytest.mark.long
def test_reasoning_can_be_closed_wherever_there_is_any(found: list[template_table.Row]) -> None:
    forms = {row.name: row.format for row in found if row.format is not None and row.format.reasons}
    assert len(forms) >= 43
    for name, form in forms.items():
        for has_special in (True, False):
            vocabulary = ReasoningVocabulary(msgspec.structs.replace(form, tokens={}), has_special=has_special)
            assert vocabulary.closer.can_close(frozenset()), name
