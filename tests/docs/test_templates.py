"""docs/tools.md shows what is found of each chat template of llama.cpp's collection."""

import msgspec
import pytest

from docs import templates
from tests.support import llama_cpp_source
from tests.support.reasoning_vocabulary import ReasoningVocabulary


@pytest.fixture(scope="module")
def found() -> list[templates.Row]:
    return templates.rows(llama_cpp_source.folder("templates"))


def test_the_table_of_templates_is_up_to_date(found: list[templates.Row]) -> None:
    page = templates.TARGET.read_text()
    assert page == templates.with_table(page, templates.table(found)), "run python -m docs.templates"


def test_as_many_templates_have_tools_as_ever(found: list[templates.Row]) -> None:
    calling = [row.name for row in found if row.format is not None and row.format.calls is not None]
    assert len(calling) >= 56, calling


def test_reasoning_can_be_closed_wherever_there_is_any(found: list[templates.Row]) -> None:
    forms = {row.name: row.format for row in found if row.format is not None and row.format.reasons}
    assert len(forms) >= 43
    for name, form in forms.items():
        for has_special in (True, False):
            vocabulary = ReasoningVocabulary(msgspec.structs.replace(form, tokens={}), has_special=has_special)
            assert vocabulary.closer.can_close(frozenset()), name
