"""Tests on an accelerator compare bits with deterministic kernels alone.

``deterministic="warn"`` does not choose them: the backward of fused attention on CUDA stays nondeterministic, and a
test that compares bits fails by chance. The Trainers of ``make_trainer`` have ``deterministic=True``; tests without a
Trainer have the fixture ``deterministic_kernels``. Where an operator has no deterministic kernel, the line says so in a
comment: ``# no deterministic kernel: ctc_loss``.
"""

import re
from pathlib import Path

TESTS = Path(__file__).parent
IS_ON_DEVICE = re.compile(r"pytest\.mark\.(device|gpu)\b")
IS_WEAK = re.compile(
    r"""\bdeterministic["']?\s*[=:]\s*["']warn\b  # of a Trainer
    |\bwarn_only\s*=\s*True\b
    |\bcudnn\.deterministic\b  # of convolutions alone
    |\bdeterministic["']?\s*[=:]\s*False\b""",
    re.VERBOSE,
)
EXCUSE = re.compile(r"# no deterministic kernel: \w+")


def weak_lines(text: str) -> list[int]:
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if IS_WEAK.search(line) and not EXCUSE.search(line)]


def test_bits_are_compared_with_deterministic_kernels():
    texts = {path: path.read_text() for path in sorted(TESTS.rglob("test_*.py")) if path != Path(__file__)}
    chosen = {path: text for path, text in texts.items() if IS_ON_DEVICE.search(text)}
    assert {path for path in texts if path.stem.endswith("_on_device")} <= set(chosen)
    weak = [f"{path.relative_to(TESTS)}:{line}" for path, text in chosen.items() for line in weak_lines(text)]
    assert weak == []
