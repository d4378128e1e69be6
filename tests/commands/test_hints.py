"""Messages of parsers, as they come, and what is left of them."""

import pytest

from lightning_vram.commands.errors import condense_error

UNION = """Parser key "trainer.callbacks":
  Does not validate against any of the Union subtypes
  Subtypes: [list[Callback], <class 'lightning.pytorch.callbacks.callback.Callback'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'a.B':
        Parser key "n":
          Does not validate against any of the Union subtypes
          Subtypes: [<class 'int'>, <class 'NoneType'>]
          Errors:
            - Expected a <class 'int'>
            - Expected a <class 'NoneType'>
          Given value type: <class 'float'>
          Given value: 1.5
    - Not a valid subclass of Callback
      Subclass types expect one of:
      - a class path (str)
    - Expected a <class 'NoneType'>
  Given value type: <class 'list'>
  Given value: [{'class_path': 'a.B'}]"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (UNION, "trainer.callbacks: a.B: n: Expected int, got 1.5"),
        ("unrecognized arguments: --foo", "unrecognized arguments: --foo"),
        ("two\n  lines", "two; lines"),
        ("Subtypes: only noise\nErrors:", "Subtypes: only noise Errors:"),
    ],
)
def test_condense(message, line):
    assert condense_error(message) == line


def test_a_line_has_an_end():
    assert condense_error("a" * 1001) == "a" * 997 + "..."
    assert condense_error("a" * 1000) == "a" * 1000
