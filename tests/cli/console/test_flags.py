"""A flag is declared once: its help, errors, aliases and the arguments for another process follow from that."""

import re

import pytest

from tokenbus.cli.console import arguments, catalog
from tokenbus.cli.console.flags import Flag, Parser, UsageError, command_line, text_of

COMMANDS = list(catalog.COMMANDS)


def parser() -> Parser:
    made = Parser("test", "Try it.", ("test -t 3",))
    flag = made.group("numbers")
    flag("--threads -t --cores", arguments.whole(0, 64), "CPU threads", 4)
    flag("--share", arguments.above(0, 1), "share of it", unset="all")
    flag = made.group("others")
    flag("--name -n", arguments.NAME, "a name", [])
    flag("--fast", arguments.SWITCH, "be fast")
    flag("--mode -fa", arguments.one_of("on", "off", "auto"), "the mode", "auto", const="on")
    return made


def refusal(*given: str) -> str:
    with pytest.raises(UsageError) as caught:
        parser().parse_args([*given])
    assert caught.value.prog == "tokenbus test"
    return str(caught.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_is_declared_with_a_text_a_default_and_a_group(name: str) -> None:
    made = catalog.make_parser(name)
    options = {option for action in made._actions for option in action.option_strings} - {"-h", "--help"}
    assert options == {option for flag in made.flags.values() for option in flag.names.split()}
    for flag in made.flags.values():
        assert flag.title, flag.name
        assert len(flag.text) > 3, flag.name
        assert flag.text.endswith("...") or not flag.text.endswith("."), flag.name
        assert flag.is_switch or "default: " in flag.help or "required" in flag.help, flag.name
        assert flag.names == flag.names.lower(), flag.name
    assert all(action.help for action in made._actions)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_connection_comes_last_in_help_and_every_command_has_a_sentence_and_two_examples_that_parse(
    name: str,
) -> None:
    command = catalog.COMMANDS[name]
    made = catalog.make_parser(name)
    titles = list(dict.fromkeys(flag.title for flag in made.flags.values()))
    assert "connection" not in titles[:-1]
    assert re.fullmatch(r"[a-z].*[^.]", command.text)
    for example in (command.first, command.second):
        words = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', example.partition(" < ")[0])]
        assert words[0] == name
        made.parse_args(words[1:])
        assert len(f"  tokenbus {example}") <= 80


def test_an_alias_is_the_name_of_no_other_flag_in_any_command() -> None:
    flags = [flag for name in COMMANDS for flag in catalog.make_parser(name).flags.values()]
    mains = {flag.option for flag in flags}
    homes: dict[str, set[str]] = {}
    for flag in flags:
        for alias in flag.aliases:
            homes.setdefault(alias, set()).add(flag.option)
    assert mains & homes.keys() == {"--block-size"}  # means the same in a replay
    # The same length, in the words of those that serve and of those that ask.
    twice = {frozenset(found) for found in homes.values() if len(found) > 1}
    assert twice <= {frozenset({"--max-tokens", "--max-new-tokens"})}


@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_the_terminal_and_breaks_no_name(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in COMMANDS:
        made = catalog.make_parser(name)
        text = made.format_help()
        for line in text.splitlines():
            is_long = line.startswith("  tokenbus ") or len(line.split()) <= 3  # an example, or a flag and its value
            assert len(line) <= columns or is_long, line
        for flag in made.flags.values():
            assert re.search(rf"{flag.option}(?![\w-])", text), flag.name
    assert all(len(line) <= columns for line in catalog.overview(columns - 2).splitlines())


def test_help_shows_range_and_default_and_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = [" ".join(line.split()) for line in parser().format_help().splitlines()]
    assert lines[:4] == ["usage: tokenbus test [OPTIONS]", "", "Try it.", ""]
    assert "-t, --threads N CPU threads (0 to 64; default: 4) [also --cores]" in lines
    assert "--share X share of it (above 0, up to 1; default: all)" in lines
    assert "-n, --name NAME a name; may be repeated (default: none)" in lines
    assert "--mode [CHOICE] the mode (on, off or auto; default: auto) [also -fa]" in lines


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--thread", "3"], "no such option --thread; did you mean --threads? `tokenbus test --help` lists all"),
        (["--xyz"], "no such option --xyz; `tokenbus test --help` lists all"),
        (["--threads", "many"], "--threads must be a whole number, got 'many'"),
        (["-t", "65"], "--threads must be 0 to 64, got 65"),
        (["--cores=-1"], "--threads must be 0 to 64, got -1"),
        (["--share", "0"], "--share must be above 0, up to 1, got 0"),
        (["--share", "nan"], "--share must be above 0, up to 1, got nan"),
        (["--mode", "maybe"], "--mode must be on, off or auto, got maybe"),
        (["--threads"], "--threads needs a value; `tokenbus test --help` lists all"),
        (["word"], "takes no further arguments, got 'word'; `tokenbus test --help` lists all"),
        (["--fast=1"], "--fast takes no value, got '1'; `tokenbus test --help` lists all"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag_and_what_is_allowed(given: list[str], says: str) -> None:
    assert refusal(*given) == says


def test_a_flag_of_another_command_is_told_of() -> None:
    with pytest.raises(UsageError, match="no such option --max-num-seqs; it is an option of `tokenbus up`"):
        catalog.make_parser("models").parse_args(["--max-num-seqs", "3"])


def test_aliases_underscores_and_joined_values_are_understood() -> None:
    assert parser().parse_args(["-t8"]).threads == 8
    assert parser().parse_args(["--cores", "3"]).threads == 3
    assert parser().parse_args(["--name=x", "-n", "y"]).name == ["x", "y"]
    assert parser().parse_args(["-fa"]).mode == "on"
    assert catalog.make_parser("worker").parse_args(["-m", "a", "--max_model_len", "9"]).context_length == 9


def test_what_other_engines_call_a_setting_is_understood() -> None:
    words = "-m a --served-model-name b -c 9 -np 2 -ngl 3 -fa -t 4 -b 64 -n 7 -ctk q8_0 --gpu-memory-utilization 0.5"
    made = catalog.make_parser("worker").parse_args(words.split())
    assert (made.model, made.served_name, made.context_length, made.max_num_seqs) == (["a"], ["b"], 9, 2)
    assert (made.gpu_layers, made.flash_attention, made.threads, made.max_num_batched_tokens) == (3, "on", 4, 64)
    assert (made.max_new_tokens, made.cache_type_k, made.memory_share) == (7, "q8_0", 0.5)
    words = "-m a --temp 0.5 -n 3 -s 4 --repeat-penalty 1.1 hi"
    asked = catalog.make_parser("generate").parse_args(words.split())
    assert (asked.model, asked.temperature, asked.max_tokens, asked.seed) == ("a", 0.5, 3, 4)


def test_flags_replace_a_list_that_is_a_default() -> None:
    made = parser()
    made.set_default("name", ["a", "b"], is_given=True)
    assert made.parse_args([]).name == ["a", "b"]
    assert made.parse_args(["--name", "c"]).name == ["c"]


@pytest.mark.parametrize(
    "words",
    [
        "--model a --model b --lora x=y@t,u --devices A,B --tensor-split 3,1 --keep-cache /k --memory-share 0.125",
        "--model a --idle-unload-s 0.5 --fingerprint -x- --cache-type-k q8_0 --reasoning-budget-message= -fa",
    ],
)
def test_the_arguments_for_another_process_mean_the_same(words: str) -> None:
    made, plain = catalog.make_parser("worker"), catalog.make_parser("worker")
    flags = made.pass_on(made.flags)
    given = [word.replace("-x-", "x") for word in words.split()]
    again = plain.parse_args(command_line(flags, made.parse_args(given)))
    assert vars(again) == vars(plain.parse_args(given))


def test_only_what_was_given_is_passed_on_even_if_it_is_the_default() -> None:
    made = parser()
    flags = made.pass_on(["threads", "name", "fast"])
    assert command_line(flags, made.parse_args([])) == []
    options = made.parse_args(["-t", str(made.flags["threads"].default), "--fast", "-n", "x", "-n", "y"])
    assert command_line(flags, options) == [
        f"--threads={made.flags['threads'].default}",
        "--name=x",
        "--name=y",
        "--fast",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "true"), (0.5, "0.5"), (1e-3, "0.001"), (range(5, 8), "5-7"), (("a", "b"), "a,b"), ((), "")],
)
def test_a_value_is_written_as_it_is_typed(value: object, text: str) -> None:
    assert text_of(value) == text


def test_a_flag_without_a_value_has_no_default_to_show() -> None:
    assert Flag("--fast", arguments.SWITCH, "be fast", default=False).help == "be fast"
