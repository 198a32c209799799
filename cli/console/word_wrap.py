"""Breaks lines between words while a text arrives, for a terminal, which would break them within words."""

import unicodedata

from rich.cells import get_character_cell_size

_TAB_STOP = 8
_HEAD = 7
"""This much of a line tells how it is treated: three spaces and a fence, at most."""
_FENCES = ("```", "~~~")
_AS_IT_IS = ("    ", "\t", "|", *_FENCES)
"""Code and tables begin so. Broken lines would make them neither clearer nor right."""
_JOINER = "\u200d"
_OPENING, _CLOSING = ("Ps", "Pi"), ("Pe", "Pf", "Po", "Lm")


class WordWrap:
    """Holds back each word until it is complete, since only then it is known whether the line has room for it."""

    def __init__(self) -> None:
        self._width = 0
        self._column = 0
        self._spaces = self._word = ""
        """Both are held back."""
        self._is_continued = False
        """Whether the beginning of the word, which is longer than a line, has been written."""
        self._head = ""
        self._is_in_code = False

    def __repr__(self) -> str:
        return f"<WordWrap at column {self._column}>"

    def add(self, text: str, width: int) -> str:
        """Returns what is to be written once this text has arrived, on lines that are now so wide; 0: as before."""
        self._width = width or self._width
        if self._column > self._width:
            self._column %= self._width  # the terminal has become narrower, and has broken the line
        return "".join(map(self._take, text))

    def end(self) -> str:
        """Returns what was held back."""
        return self._place()

    def _take(self, char: str) -> str:
        if char == "\n":
            written = self._place()
            if self._head.lstrip(" ").startswith(_FENCES):
                self._is_in_code = not self._is_in_code
            self._column, self._head, self._is_continued = 0, "", False
            return written + char
        if len(self._head) < _HEAD:
            self._head += char
        if self._is_in_code or self._head.startswith(_AS_IT_IS) or self._head.lstrip(" ").startswith(_FENCES):
            self._spaces, self._word, kept = "", "", self._spaces + self._word
            return self._write(kept + char)
        if char in " \t":
            written = self._place() if self._word else ""
            self._is_continued = False
            self._spaces += char
            return written if len(self._spaces) < self._width else written + self._place()
        written = self._place() if self._word and self._may_break(self._word[-1], char) else ""
        self._word += char
        if _cells(self._word) >= self._width:
            written += self._place()
            self._is_continued = True
        return written

    def _may_break(self, before: str, char: str) -> bool:
        """Whether a line may end between two characters of a word: around those of languages without spaces."""
        sizes = get_character_cell_size(before), get_character_cell_size(char)
        if max(sizes) < 2 or min(sizes) == 0 or before == _JOINER:
            return False
        return unicodedata.category(before) not in _OPENING and unicodedata.category(char) not in _CLOSING

    def _place(self) -> str:
        """Returns the word that is held back, behind what separates it from the one before."""
        spaces, word = self._spaces, self._word
        self._spaces = self._word = ""
        needed = self._needed(spaces) + _cells(word)
        if not self._column or self._is_continued or self._column + needed <= self._width:
            self._is_continued = False
            return self._write(spaces + word)
        self._column = 0
        return "\n" + self._write(word) if word else ""

    def _needed(self, spaces: str) -> int:
        at = self._column
        for char in spaces:
            at += self._size(char, at)
        return at - self._column

    def _write(self, text: str) -> str:
        """Returns the text, and follows the cursor as the terminal moves it."""
        for char in text:
            size = self._size(char, self._column)
            self._column = self._column + size if self._column + size <= self._width else size
        return text

    def _size(self, char: str, column: int) -> int:
        return _TAB_STOP - column % _TAB_STOP if char == "\t" else get_character_cell_size(char)


def _cells(text: str) -> int:
    """Returns the sum for all characters: terminals differ in whether joined emoji take the place of one."""
    return sum(map(get_character_cell_size, text))
