"""Follow references backwards from an object to something that has a name: an attribute, a global, a closure."""

import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH = 14
_MAX_WIDTH = 20_000  # objects per level: beyond, chance paths through large tables


_MODULE_TABLES = ("_modules", "_parameters", "_buffers")  # in which nn.Module keeps attributes


def is_a(thing: object, kinds: Any) -> Any:
    """Like ``isinstance``, which asks proxies and mocks for their class; some of them warn, or load a library."""
    return issubclass(type(thing), kinds)


@dataclass(slots=True)
class Link:
    """An object on the way, and what it refers to."""

    thing: Any
    below: "Link | None"
    covers: frozenset[int]  # targets that it leads to, by id: also those that share a container with the last link


def find_chains(targets: Iterable[object], names: Mapping[int, str], ignored: Iterable[object] = ()) -> list[Link]:
    """Find the shortest chain of references to each of a few targets from a global, a class or one of ``names``.

    Returns the first links. A running function's variable begins a chain only if nothing better does; no chain goes
    through ``ignored`` objects. ``names`` are by ``id``.
    """
    level = [Link(target, None, frozenset({id(target)})) for target in targets]
    hidden = _hidden_things()
    seen = {id(link.thing) for link in level} | {id(thing) for thing in ignored}
    found: list[Link] = []
    frames: list[Link] = []
    done: set[int] = set()
    for _ in range(_MAX_DEPTH):
        if not level or len(level) > _MAX_WIDTH:
            break
        level, named, running = _climb(level, hidden, seen, names)
        for link in named:
            if not link.covers <= done:
                found.append(link)
            done |= link.covers
        frames += running
        level = [link for link in level if not link.covers <= done]
    return found + [link for link in frames if not link.covers <= done]


def _climb(
    level: list[Link], hidden: list[Any], seen: set[int], names: Mapping[int, str]
) -> tuple[list[Link], list[Link], list[Link]]:
    """Return who refers to a level: those without a name, those with one, and frames."""
    below = {id(link.thing): link for link in level}
    things = [link.thing for link in level]
    above: list[Link] = []
    named: list[Link] = []
    running: list[Link] = []
    ours = {id(below), id(things), id(level), id(above), id(named), id(running), id(hidden)}
    for thing in [*gc.get_referrers(*things), *hidden]:
        if id(thing) in ours or id(thing) in seen or is_a(thing, Link):
            continue
        children = [below[id(part)] for part in gc.get_referents(thing) if id(part) in below]
        if not children or _is_of_this_package(thing):
            continue
        seen.add(id(thing))
        link = Link(thing, children[0], frozenset().union(*(child.covers for child in children)))
        if is_a(thing, types.FrameType):
            running.append(link)
        elif id(thing) in names or _own_name(thing) is not None:
            named.append(link)
        else:
            above.append(link)
    return above, named, running


def _hidden_things() -> list[Any]:
    """Return globals and attributes of classes, and what they hold, if ``gc.freeze`` put some out of sight."""
    if not gc.get_freeze_count():
        return []
    found: list[Any] = []
    for module in list(sys.modules.values()):
        table = getattr(module, "__dict__", {})
        name, file = table.get("__name__"), str(table.get("__file__"))
        if str(name).partition(".")[0] in sys.stdlib_module_names or "-packages" in file:
            continue  # of libraries; their own hundred thousand values are not looked at
        found.append(table)
        for value in list(table.values()):
            if is_a(value, type):
                attributes = [part for part in gc.get_referents(value) if type(part) is dict]
                found += [value, *attributes, *(part for held in attributes for part in _containers(held))]
        found += _containers(table)
    return found


def _containers(table: Mapping[str, Any]) -> list[Any]:
    return [value for value in list(table.values()) if is_a(value, list | dict | set | deque)]


def _is_of_this_package(thing: Any) -> bool:
    """Whether it is a frame of this search, or an iterator of one."""
    if is_a(thing, types.FrameType | types.GeneratorType):
        frame = thing if is_a(thing, types.FrameType) else thing.gi_frame
        return frame is not None and str(frame.f_globals.get("__name__")).startswith("lightning_vram.memory.leaks")
    return False


def _own_name(thing: Any) -> str | None:
    if type(thing) is dict and "__builtins__" in thing and "__name__" in thing:  # globals
        return str(thing["__name__"])
    if is_a(thing, types.ModuleType):
        return str(thing.__name__)
    return str(thing.__qualname__) if is_a(thing, type) else None


def describe_chain(chain: Link, names: Mapping[int, str], until: object = None) -> str:
    """Write a chain as one would in code, up to ``until``: ``self.net.cache['x']``."""
    thing = chain.thing
    text = names.get(id(thing)) or _own_name(thing) or _frame_name(thing)
    link: Link | None = chain
    while link is not None and link.below is not None and link.thing is not until:
        text, link = _step(text, link)
    return text


def _step(text: str, link: Link) -> tuple[str, Link | None]:
    """Return the text with the next reference, and the link that it leads to."""
    thing, below = link.thing, link.below
    assert below is not None
    child = below.thing
    if is_a(thing, types.FrameType):
        return f"{_key_of(thing.f_locals, child)}, a variable of {text}", below
    if is_a(thing, dict) and _own_name(thing) is not None:
        return f"{text}.{_key_of(thing, child)}", below
    if is_a(thing, types.FunctionType):
        return _step_of_function(text, thing, below)
    if is_a(thing, Mapping):
        key = _key_of(thing, child)
        for table in _MODULE_TABLES:
            if text.endswith(f".{table}"):
                return f"{text.removesuffix(table)}{key}", below
        return f"{text}[{key!r}]", below
    return _step_of_object(text, thing, below)


def _step_of_object(text: str, thing: Any, below: Link) -> tuple[str, Link | None]:
    child = below.thing
    if is_a(thing, types.CellType):
        return text, below
    if is_a(thing, list | tuple):
        return f"{text}[{next(index for index, item in enumerate(thing) if item is child)}]", below
    attributes = getattr(thing, "__dict__", {})
    if is_a(child, dict) and below.below is not None and (child is attributes or is_a(thing, type)):
        return f"{text}.{_key_of(attributes, below.below.thing)}", below.below
    name = _key_of(attributes, child)
    if name is not None:
        return f"{text}.{name}", below
    return f"{text}[...]" if hasattr(type(thing), "__len__") else f"{text}.<{type(thing).__name__}>", below


def _step_of_function(text: str, function: types.FunctionType, below: Link) -> tuple[str, Link | None]:
    """Name the variable of a closure, which is behind a tuple of cells."""
    code = function.__code__
    owner = f"{function.__qualname__}() ({code.co_filename}:{code.co_firstlineno})"
    place = f" at {text}" if text else ""
    cell = below.below if below.thing is function.__closure__ else None
    cells = function.__closure__ or ()
    if cell is not None and any(cell.thing is other for other in cells):
        name = next(name for name, other in zip(code.co_freevars, cells, strict=True) if other is cell.thing)
        return f"{name}, in the closure of {owner}{place}", cell
    return f"{owner}{place}", below


def is_table_of_attributes(thing: object, owners: Iterable[object]) -> bool:
    """Whether a dict holds attributes or globals, for one of ``owners`` that refer to it."""
    if not is_a(thing, dict):
        return False
    for owner in owners:
        attributes = getattr(owner, "__dict__", {})
        if attributes is thing or is_a(owner, type):
            return True
        if any(attributes.get(table) is thing for table in _MODULE_TABLES):
            return True
    return _own_name(thing) is not None


def _key_of(mapping: Mapping[Any, Any], child: object) -> Any:
    return next((key for key, value in list(mapping.items()) if value is child), None)


def _frame_name(thing: Any) -> str:
    if is_a(thing, types.FrameType):
        return f"{thing.f_code.co_name}() ({thing.f_code.co_filename}:{thing.f_lineno})"
    return type(thing).__name__
