"""The console: nothing that a record holds commands the terminal."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from dosimeter.terminal.console import plain_console

HOSTILE = "a\x1b[2Jb\x9b31mc\x07d\x08e\x7ff\x1b]0;title\x07 [bold]"


def in_table(text):
    table = Table("column")
    table.add_row(text)
    return table


@pytest.mark.parametrize("shown", [str, Text, in_table, lambda text: in_table(Text(text))])
def test_control_characters_are_left_out_and_brackets_stay(shown):
    written = io.StringIO()
    plain_console(file=written, width=100).print(shown(HOSTILE))
    text = written.getvalue()
    assert "a[2Jb31mcdef]0;title [bold]" in text
    assert all(letter == "\n" or letter.isprintable() for letter in text)


def test_colours_of_its_own_stay():
    written = io.StringIO()
    plain_console(file=written, force_terminal=True, color_system="standard").print(Text("plain", "red"))
    assert written.getvalue() == "\x1b[31mplain\x1b[0m\n"


def test_a_reader_that_has_gone_ends_no_program():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        plain_console(file=Closed()).print("text")
