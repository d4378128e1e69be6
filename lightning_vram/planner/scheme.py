"""Features, combinations of them, and what their steps need."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from textwrap import indent
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_vram.estimation.fake_trainer import as_list
from lightning_vram.planner.parts import Exactness, Part

# What arguments save and cost: comments in the file of a plan.
ARGUMENT_NOTES = {
    "budget": "for saved activations on the device: a larger budget recomputes less",
    "remedies": "recomputing costs time, offloading costs PCIe bandwidth and host memory",
    "offload_bytes": "limit per forward: more recomputes less, until steps wait for PCIe transfers",
    "size": "samples at once: fewer need less memory and more time",
    "lossy": "saved activations in 8 bits per value: gradients are approximate",
    "offload": "optimizer: its state is on the host; params: weights, too, which saves more and copies more",
    "bits": "per value: 8, or 4, which saves more and rounds more",
    "master": "saves 4 of 18 bytes of host memory per parameter, bit-exact",
    "host_state": "saves 4 (bf16) or 6 (8bit) bytes of host memory per parameter, approximate",
    "precision": "of the computation",
    "recast_in_backward": "saves the 16-bit copies of weights, costs a second cast",
    "parameters": "saves 6 of 16 bytes per parameter with AdamW, approximate",
}


@dataclass(frozen=True)
class Scheme:
    """Features in addition to those of the user's Trainer."""

    parts: tuple[Part, ...] = ()  # in the order of the text

    def __add__(self, part: Part) -> "Scheme":
        return Scheme((*self.parts, part))

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts)) or "baseline"

    @property
    def exactness(self) -> Exactness:
        """That of the least exact part."""
        return max((part.exactness for part in self.parts), default=Exactness.EXACT)

    def trainer_kwargs(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of a Trainer: the user's own, and new objects of the parts."""
        arguments = dict(own)
        for part in self.parts:
            for name in part.replaces:
                arguments.pop(name, None)
            if part.place == "strategy":
                arguments["strategy"] = part.make()
            else:
                arguments[part.place] = [*as_list(arguments.get(part.place)), part.make()]
        return arguments

    def to_yaml(self, comments: Sequence[str] = ()) -> str:
        """Return a section of a configuration for LightningCLI, with comments.

        Callbacks and plugins are appended (``callbacks+``) to those of earlier files.
        """
        said = list(zip(self.parts, (*comments, *[""] * len(self.parts)), strict=False))
        text = "".join(f"  {name}: null  # replaced by {part.name}\n" for part in self.parts for name in part.replaces)
        for place, key in (("strategy", "strategy"), ("plugins", "plugins+"), ("callbacks", "callbacks+")):
            entries = [_text_of(part, comment) for part, comment in said if part.place == place]
            if entries:
                text += "".join([f"  {key}:\n", *entries])
        return f"trainer:\n{text}" if text else "trainer: {}\n"


def _text_of(part: Part, comment: str) -> str:
    text = _dump({"class_path": part.class_path})
    if part.init_args:
        text += "init_args:\n" + indent("".join(starmap(_argument, part.init_args.items())), "  ")
    if part.place != "strategy":
        text = "- " + indent(text, "  ").removeprefix("  ")
    note = part.note[:1].upper() + part.note[1:] + "." if part.note else ""
    words = " ".join(filter(None, (note, comment)))
    return indent((f"# {words}\n" if words else "") + text, " " * 4)


def _argument(name: str, value: Any) -> str:
    """Write an argument with its comment: behind it, or behind its name if it has several lines."""
    text, note = _dump({name: value}), ARGUMENT_NOTES.get(name)
    first, _, rest = text.partition("\n")
    has_room = not rest or first == f"{name}:"  # otherwise inside a text
    return f"{first}  # {note}\n{rest}" if note and has_room else text


def _dump(value: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=False, width=math.inf, allow_unicode=True)
    return text
