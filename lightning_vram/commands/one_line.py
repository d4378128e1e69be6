"""Condense the error messages of configuration parsers, which list all they tried, to the one line that matters."""

import re
from dataclasses import dataclass, field

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":\s*(?P<rest>.*)')
_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)':\s*(?P<rest>.*)")
_TYPE = re.compile(r"(?:a )?<class '(?:\w+\.)*(\w+)'>")
# What jsonargparse writes around the reason: the alternatives of a type that did not fit either.
_NOISE = re.compile(
    r"(Does not validate against any of the Union subtypes|Subtypes:|Errors:|Given value type:|Not a valid subclass of|"
    r"Subclass types expect one of:|a class path \(str\)|a dict with(out)? |Expected a <class 'NoneType'>|"
    r"Expected a path but .* not accessible|in \"<unicode string>\")"
)
_VALUE = "Given value: "
_MAX_VALUE = 80
_MAX_LINE = 1000


@dataclass
class _Reason:
    keys: list[tuple[int, str]] = field(default_factory=list)  # with their indents
    texts: list[str] = field(default_factory=list)
    value: str = ""

    def take(self, line: str, indent: int) -> bool:
        """Read one line; ``False`` once the innermost value has been told: what follows are outer alternatives."""
        found = _KEY.match(line) or _CLASS.match(line)
        if found:
            if self.texts:
                return False
            place, rest = found.groups()
            self.keys = [*(key for key in self.keys if key[0] < indent), (indent, place)]
            return self.take(rest, indent) if rest else True
        if line.startswith(_VALUE):
            if self.texts and not line.startswith((f"{_VALUE}[", f"{_VALUE}Namespace", f"{_VALUE}NestedArg")):
                self.value = line.removeprefix(_VALUE)[:_MAX_VALUE]
            return not self.texts
        if line and not _NOISE.match(line) and line not in self.texts:
            self.texts.append(line)
        return True


def condense_error(message: str) -> str:
    r"""Write where, what is wrong and the value, in one line.

    Args:
        message: Message of jsonargparse, OmegaConf or any other, of any number of lines.

    Example:
        >>> condense_error('Parser key "trainer.max_steps":\n  Expected a <class \'int\'>. Got value: abc')
        'trainer.max_steps: Expected int. Got value: abc'
    """
    reason = _Reason()
    for line in message.splitlines():
        if not reason.take(line.strip().removeprefix("- "), len(line) - len(line.lstrip())):
            break
    texts = reason.texts or [" ".join(message.split())]
    text = ": ".join([*(key for _, key in reason.keys), "; ".join(texts)])
    if reason.value and reason.value not in text:
        text = f"{text}, got {reason.value}"
    text = _TYPE.sub(r"\1", text)
    return text if len(text) <= _MAX_LINE else text[: _MAX_LINE - 3] + "..."
