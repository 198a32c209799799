"""The commands in the documentation are ones that there are, and their samples have the lines that they print."""

import re
from pathlib import Path

import pytest

from tests.cli.test_doctor import reply
from tests.cli.test_top import rows
from tests.replay.test_load_page import report_of, stats_of
from tests.router.builders import card
from tests.support.doc_samples import DOCS, commands, sample, skeleton
from tokenbus.cli.commands import doctor, top
from tokenbus.cli.console import catalog
from tokenbus.protocol.wire import messages
from tokenbus.replay.load import table

PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]
STANDS_FOR = {"...": ["--model", "a.gguf"], "$inbox": ["--inbox-prefix", "_INBOX_{tenant}"]}


def test_commands_are_found_behind_prompts_and_variables_and_between_others() -> None:
    lines = ("A=b tokenbus up --json &", "K=$(./tokenbus keys list | tee x)", "kubectl tokenbus no")
    text = "".join(f"```console\n$ {line}\ntokenbus says this\n```\n" for line in lines)
    assert list(commands(text)) == [["up", "--json"], ["keys", "list"]]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if list(commands(page.read_text()))], ids=lambda page: page.stem
)
def test_every_command_of_a_page_is_one_that_tokenbus_takes(page: Path) -> None:
    for command, *given in commands(page.read_text()):
        if not command.startswith(("-", "$")):
            words = [part for word in given for part in STANDS_FOR.get(word, [word])]
            catalog.make_parser(command).parse_args(words)


def test_the_sample_of_top_has_the_columns_that_top_shows_in_their_order() -> None:
    head, *lines = sample("operations.md", "tokenbus top --once")
    memory = messages.WorkerMemory(0, 1, 2, 1, [("host", 8_192, 1_024)])
    shown = top.make_table([row._replace(memory=memory) for row in rows()], (), 10_000)
    columns = [str(column.header) for column in shown.columns]
    assert re.split("  +", head) == [name for name in columns if f"  {name}  " in f"  {head}  "]
    first, *_ = str(top.make_table(rows()).caption).splitlines()
    assert skeleton(first) in map(skeleton, lines)


def test_the_sample_of_bench_has_the_rows_and_columns_that_bench_prints() -> None:
    lines = sample("bench.md", "tokenbus bench --model demo --concurrency 1,4")
    run, other = report_of({1.0: stats_of(1.0, 2.0), 4.0: stats_of(2.0, 3.0)}).runs
    made = table.run_table(run)
    assert lines[1].split() == [str(column.header) for column in made.columns]
    titles = [str(cell) for cell in made.columns[0].cells]
    assert [line.split("  ")[0] for line in lines[2 : 2 + len(titles)]] == titles
    said = [line.split("  ")[0] for line in table.run_lines(run) if "  " in line]
    assert [line.split("  ")[0] for line in lines[3 + len(titles) : lines.index("")]] == ["prompts", *said]
    heads = [str(column.header) for column in table.sweep_table([run, other]).columns]
    (sweep,) = [line for line in lines if line.startswith("concurrency")]
    assert re.split("  +", sweep)[1:] == heads[1:]


def test_the_sample_of_the_doctor_has_its_marks_and_its_words() -> None:
    lines = sample("operations.md", "tokenbus doctor --model demo")
    marks = {line.split()[0] for line in lines if line[0].isalpha()}
    assert marks == {"ok", "note"}
    ready = reply(*(card(worker_id=name, tokenizer_digest="a") for name in ("a", "b")))
    said = [f"{finding.mark:5} {finding.what}" for finding in doctor.check_fleet(ready)]
    assert set(map(skeleton, said)) <= set(map(skeleton, lines))
