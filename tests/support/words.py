"""Terms that our readers do not search for, each with the one to write instead, and the texts where none may be."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from support.parts import ROOT

import lightning_vram

# The term to avoid (a regular expression), and the field's own.
AVOID = {
    r"plain(ly)?(?! (PyTorch|Python|text|tensors?|files?)\b)": "baseline; without lightning_vram",
    r"packed(?! sequences?)": "with lightning_vram; optimized",
    r"parts|(the|any|this|each|which|other) part|the pack": "feature; micro-batches, chunks, shards",
    r"kept for": "saved for backward; saved activations",
    r"ma[dk]es? (it |them )?again|second run": "recompute",
    r"to the bit": "bit-exact, exact",
    r"the most at once|what it costs": "peak memory; overhead",
    r"(?<!sliding )(?<!attention )(?-i:windows?)": "accumulation step; effective batch",
    r"at rest": "when idle; persistent",
    r"(?<!optimizer )(?<!hidden )(?<!RNG )states": "optimizer state",
    r"rounded at random": "stochastic rounding",
    r"narrow(er|ed)?|few bits|fewer bits": "quantized, low-precision",
    r"widen(s|ed)?|decod(e|es|ed|ing)": "upcast, dequantize",
    r"the bus|travel(s|led)?|arrives?": "host-device transfer, PCIe; are ready",
    r"lanes?": "shard, flat shard",
    r"room": "memory, headroom",
    r"memory (runs|ran) out": "OOM, CUDA out of memory",
    r"without memory": "fake tensors, meta tensors",
    r"(is|are) not here|need not be (t?here)": "a GPU you do not have",
    r"told|tells?|says?|say so": "reported, logged, warns",
    r"ways": "configurations, alternatives",
    r"shall|whoever|nobody": "must, should; a noun",
    r"beside": "next to, compared with, in addition to",
    r"stand-ins?|surgery|shadows?": "proxy, patch",
    r"as it is|goes on|some hundred|in (the )?place of": "unchanged; continues; a few hundred; instead of",
    r"(each|same|one) turn|in turns": "round, iteration",
    r"in doubt": "ambiguous",
    r"the same, (and|but|with)|as above": "a sentence that stands alone",
}
_TERMS = [(re.compile(rf"(?<![\w-])(?:{term})(?![\w-])", re.IGNORECASE), better) for term, better in AVOID.items()]
# A subject that is a clause: "What the second run does not reach is not kept."
_CLAUSE = re.compile(r"(?:^|[.:|] )What [^?.|]{12,}[^?.|]\.(?= |$|\|)", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|``[^`]+``|`[^`\n]+`|\]\([^)]*\)|^ *>>>.*$", re.DOTALL | re.MULTILINE)


def terms_in(text: str) -> list[str]:
    prose = _CODE.sub("`code`", text)
    found = [f"{match[0]!r} -> {better}" for term, better in _TERMS for match in term.finditer(prose)]
    return found + [f"{match[0].strip()!r} -> make the subject a noun" for match in _CLAUSE.finditer(prose)]


def public_docstrings() -> Iterator[tuple[str, str]]:
    for name in lightning_vram.__all__:
        thing = getattr(lightning_vram, name)
        yield name, inspect.getdoc(thing) or ""
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)) and value.__doc__:
                yield f"{name}.{member}", value.__doc__


def messages_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what a file of the package may show to a person: its strings of three words and more, with their lines."""
    tree = ast.parse(path.read_text())
    hidden = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    hidden |= {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.JoinedStr):
            pieces = [piece.value if isinstance(piece, ast.Constant) else "0" for piece in node.values]
            text = "".join(map(str, pieces))
        else:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if len(text.split()) > 2:
            yield node.lineno, text


_OPERATORS = ROOT / "lightning_vram/core/operators.py"  # lists names: narrow is one
SOURCES = sorted(set((ROOT / "lightning_vram").rglob("*.py")) - {_OPERATORS})
