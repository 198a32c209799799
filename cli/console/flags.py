"""A flag is declared once, as a `Flag`; what the command line, variables, files and docs/settings.md say of it follows.

`tokenbus health` loads this module every few seconds, so it must not import anything heavy."""

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from tokenbus.cli.console import arguments

_MIN_SIMILARITY = 0.7
"""The similarity, from 0 to 1, from which one name may be meant by another."""
_WIDE = 64
"""Columns from which help has texts to the right of flags, and not below them."""
_ONE_OF = re.compile("one of the arguments (.+) is required")
_NEGATIVE = re.compile(r"^-\.?\d")


EXIT_BAD_SETTINGS = 2
"""Exit status of a process whose settings or model are wrong: it would fail again if it were restarted."""


class UsageError(ValueError):
    """A mistake on the command line. `prog` is the command that it is for, such as `tokenbus worker`."""

    def __init__(self, prog: str, text: str) -> None:
        super().__init__(text)
        self.prog = prog


class Flag(NamedTuple):
    """A flag of a command. Those of the servers are also settings: variables, and keys of a file."""

    names: str
    """The name and its aliases, which other engines use for the same: `--threads -t`."""
    kind: arguments.ArgumentType
    text: str
    """Its meaning, without default, range and aliases, which help adds."""
    default: Any = None
    """The value without the flag. That of a flag which may be repeated is a list."""
    unset: str = ""
    """The meaning of a default that does not speak for itself: `the model's own`."""
    const: str | None = None
    """The value of the flag without one, for a flag that may have none."""
    variable: str = ""
    """A variable that every command reads."""
    required: bool = False
    reloads: bool = False
    """Whether a running server takes a new value on SIGHUP."""
    secret: bool = False
    """Whether its value is never printed."""
    title: str = ""
    """The group in which help shows it."""
    home: type | None = None
    """The settings that have it as a field of the same name, with its default and meaning."""

    @property
    def option(self) -> str:
        """The name as it is typed, `--max-num-seqs`."""
        return self.names.split()[0]

    @property
    def name(self) -> str:
        """The name in a file, `max-num-seqs`."""
        return self.option.removeprefix("--")

    @property
    def dest(self) -> str:
        """The name among parsed options, `max_num_seqs`."""
        return dest_of(self.names)

    @property
    def aliases(self) -> list[str]:
        return self.names.split()[1:]

    @property
    def is_switch(self) -> bool:
        return self.kind is arguments.SWITCH

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, list)

    @property
    def default_text(self) -> str:
        """The default as help shows it."""
        if self.is_switch:
            return "off"
        return self.unset or text_of(self.default) or "none"

    @property
    def range_text(self) -> str:
        """The allowed values as help shows them; empty for a text."""
        return "" if self.is_switch else self.kind.allowed

    @property
    def help(self) -> str:
        again = "; may be repeated" if self.is_list else ""
        default = "" if self.is_switch else "required" if self.required else f"default: {self.default_text}"
        limits = "" if self.range_text.endswith(" or more") else self.range_text  # the texts say what 0 and -1 mean
        facts = "; ".join(part for part in (limits, default) if part)
        hidden = [alias for alias in self.aliases if not is_short(alias)]
        also = f" [also {', '.join(hidden)}]" if hidden else ""
        return self.text + again + (f" ({facts})" if facts else "") + also

    def on_command_line(self, value: Any) -> list[str]:
        """Returns the arguments that give a process this value, even if it is the default."""
        if self.is_switch:
            return [self.option] if value else []
        return [f"{self.option}={text_of(one)}" for one in (value if self.is_list else [value])]


def command_line(flags: Iterable[Flag], options: argparse.Namespace) -> list[str]:
    """Returns the arguments that give another process the values that `options` have of these flags; see
    `Parser.pass_on`."""
    given = [flag for flag in flags if flag.dest in options]
    return [part for flag in given for part in flag.on_command_line(getattr(options, flag.dest))]


def fields_of(settings: type, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that are fields of these settings under the same name."""
    return {name: getattr(options, name) for name in settings.__annotations__ if name in options}


def dest_of(names: str) -> str:
    """Returns the name among parsed options of a flag with these names."""
    return names.split()[0].removeprefix("--").replace("-", "_")


def text_of(value: object) -> str:
    """Returns a value as it is written after its flag; nothing for one that says nothing."""
    match value:
        case None | "" | [] | ():
            return ""
        case bool():  # before numbers, which bool is too
            return str(value).lower()
        case float():
            return f"{value:.10g}"
        case range():
            return f"{value[0]}-{value[-1]}" if value else ""
        case tuple() if type(value).__str__ is object.__str__:
            return ",".join(map(text_of, value))
        case _:
            return str(value)


class Parser(argparse.ArgumentParser):
    """The parser of one command. Its mistakes are UsageErrors of one line."""

    def __init__(self, command: str = "", text: str = "", examples: Sequence[str] = ()) -> None:
        shown = "".join(f"\n  tokenbus {example}" for example in examples)
        super().__init__(
            prog=f"tokenbus {command}".rstrip(),
            description=text + (f"\n\nexamples:{shown}" if examples else ""),
            formatter_class=_Formatter,
            allow_abbrev=False,
            exit_on_error=False,
            add_help=False,
        )
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self.flags: dict[str, Flag] = {}
        self.left_out: Collection[str] = ()
        """Names of flags that this command does not have, although it has the others that are declared with them."""
        self.elsewhere: Callable[[str], list[str]] = lambda _: []
        """Returns the other commands that have a flag."""

    def group(self, title: str, *homes: Any, exclusive: bool = False, required: bool = False) -> "FlagGroup":
        """Returns a group that adds flags under a title. Of exclusive ones only one may be given.

        Flags have the defaults of the fields of `homes`, settings or their classes, that they are named after."""
        target: argparse._ActionsContainer = self.add_argument_group(title)
        if exclusive:
            target = target.add_mutually_exclusive_group(required=required)
        return FlagGroup(title, homes, partial(self._add, target))

    def set_default(self, name: str, value: Any, *, is_given: bool) -> None:
        """Sets the value of a flag that is not on the command line. One that is given elsewhere is not missing here."""
        action = self._option_string_actions[self.flags[name].option]
        action.default = value
        action.required = action.required and not is_given

    def change_default(self, name: str, value: Any) -> None:
        """Gives a flag another default than other commands have."""
        self.flags[name] = self.flags[name]._replace(default=value)
        self.set_default(name, value, is_given=False)

    def pass_on(self, names: Iterable[str]) -> tuple[Flag, ...]:
        """Returns these flags, which are for other processes: among the options there are only those that are given."""
        found = tuple(self.flags[name] for name in names)
        for flag in found:
            self.set_default(flag.name, argparse.SUPPRESS, is_given=False)
        return found

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises UsageError."""
        given = [self._known(one) for one in _before_dashes(args)]
        try:
            words = [*given, *args[len(given) :]]
            options, extra = self.parse_known_args(words, namespace)
            if extra and "--" not in args:  # arguments both before and after flags
                options, extra = self.parse_known_intermixed_args(words, namespace)
        except argparse.ArgumentError as error:
            self.error(f"argument {error.argument_name}: {error.message}")
        if extra:
            self.error(f"takes no further arguments, got {' '.join(map(repr, extra))}")
        return options

    def print_help(self, file: Any = None) -> None:
        """Raises OSError, which argparse ignores, if the output can't be written."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with a message of argparse, in the words of a user."""
        place, mark, problem = message.removeprefix("argument ").partition(": ")
        if place == "the following arguments are required":
            needed = " and ".join(name.partition("/")[0] for name in problem.split(", "))
            raise self._usage_error(f"needs {needed}")
        if choices := _ONE_OF.fullmatch(message):
            raise self._usage_error(f"needs {' or '.join(choices[1].split())}")
        if not mark or not message.startswith("argument "):
            raise self._usage_error(message)
        problem = problem.replace("expected one argument", "needs a value")
        problem = problem.replace("ignored explicit argument", "takes no value, got")
        problem = re.sub(r"^(not allowed with) argument (\S+?)(/\S+)?$", r"is \1 \2", problem)
        raise self._usage_error(f"{place.partition('/')[0]} {problem}", with_help=not problem.startswith("must be"))

    def _add(self, target: argparse._ActionsContainer, flag: Flag) -> None:
        if flag.name in self.left_out:
            return
        self.flags[flag.name] = flag
        default = (flag.variable and os.environ.get(flag.variable)) or flag.default
        more: dict[str, Any] = {"type": flag.kind, "metavar": flag.kind.metavar, "required": flag.required}
        if flag.is_switch:
            more = {"action": "store_true"}
        if flag.is_list:
            more |= {"action": _Append}
        if flag.const is not None:
            more |= {"nargs": "?", "const": flag.const}
        target.add_argument(
            *flag.names.split(), dest=flag.dest, default=default, help=flag.help.replace("%", "%%"), **more
        )

    def _known(self, argument: str) -> str:
        """Returns the argument in this parser's spelling. Raises UsageError for a flag that it does not have."""
        name, mark, value = argument.partition("=")
        known = self._option_string_actions
        is_flag = argument.startswith("-") and argument != "-" and " " not in name and not _NEGATIVE.match(argument)
        if not is_flag or name in known:
            return argument
        if (spelled := name.replace("_", "-")) in known:
            return spelled + mark + value
        if not name.startswith("--") and argument[:2] in known:
            return argument  # -n5
        if homes := self.elsewhere(spelled):
            text = f"no such option {name}; it is an option of {', '.join(f'`tokenbus {home}`' for home in homes)}"
        else:
            text = f"no such option {name}{did_you_mean(spelled, known)}"
        raise self._usage_error(text)

    def _usage_error(self, text: str, *, with_help: bool = True) -> UsageError:
        more = f"{'' if text.endswith('?') else ';'} `{self.prog} --help` lists all"
        return UsageError(self.prog, text + (more if with_help else ""))


def is_short(name: str) -> bool:
    """Whether help shows an alias beside its flag."""
    return len(name) == 2


class FlagGroup:
    """Adds flags to a parser under one title."""

    def __init__(self, title: str, homes: Sequence[Any], add: Callable[[Flag], None]) -> None:
        self._title = title
        self._homes = homes
        self._add = add

    def __repr__(self) -> str:
        return f"<FlagGroup {self._title}>"

    def __call__(self, names: str, kind: arguments.ArgumentType, text: str, default: Any = None, **more: Any) -> None:
        """Declares and adds a flag; `more` are further fields of `Flag`."""
        self.add(Flag(names, kind, text, default, **more))

    def add(self, *flags: Flag) -> None:
        """Adds flags that several commands have."""
        for flag in flags:
            self._add(self._with_default(flag)._replace(title=self._title))

    def _with_default(self, flag: Flag) -> Flag:
        if flag.default is not None:
            return flag
        if flag.is_switch:
            return flag._replace(default=False)
        for home in self._homes:
            if hasattr(home, flag.dest):
                where = home if isinstance(home, type) else type(home)
                return flag._replace(default=getattr(home, flag.dest), home=where)
        return flag


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question with the nearest of the known names, or an empty text if none is near."""
    import difflib

    near = difflib.get_close_matches(name, known, 1, _MIN_SIMILARITY)
    return f"; did you mean {near[0]}?" if near else ""


def _before_dashes(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


class _Append(argparse.Action):
    """Appends to a list that begins empty, so that flags replace a default and are not added to it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        setattr(namespace, self.dest, [values] if before is self.default else [*before, values])


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows only the name of a flag and its one-letter alias, and fits any width of the terminal."""

    def __init__(self, prog: str) -> None:
        width = max(shutil.get_terminal_size().columns - 2, 24)
        super().__init__(prog, width=width, max_help_position=28 if width >= _WIDE else 6)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        short = filter(is_short, action.option_strings)
        shown = ", ".join([*short, action.option_strings[0]])
        return f"{shown} {self._format_args(action, '')}".rstrip()

    def _format_usage(self, usage: Any, actions: Iterable[argparse.Action], groups: Any, prefix: Any) -> str:
        actions = list(actions)
        needed = [f"{one.option_strings[0]} {one.metavar}" for one in actions if one.option_strings and one.required]
        positionals = [self._format_args(one, str(one.metavar)) for one in actions if not one.option_strings]
        return (
            textwrap.fill(
                f"usage: {' '.join([self._prog, *needed, '[OPTIONS]', *positionals])}",
                self._width,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            + "\n\n"
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wraps sentences, but not examples, which are copied."""
        lines = [one if one.startswith("  ") else textwrap.fill(one, width) for one in text.splitlines()]
        return "\n".join(lines)
