"""What ``.ci/versions`` measured last, and the page says, is complete and green. It leaves this file out itself."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = json.loads((ROOT / "tests" / "versions.json").read_text())


def minors(name: str, **like: object) -> set[str]:
    chosen = [result for result in RESULTS if all(result[key] == value for key, value in like.items())]
    return {".".join(result[name].split(".")[:2]) for result in chosen}


def test_the_table_on_the_page_is_that_of_the_results():
    versions = runpy.run_path(str(ROOT / ".ci" / "versions"))
    assert versions["table"](RESULTS) in versions["PAGE"].read_text()


def test_each_version_was_tested_and_nothing_failed():
    assert [result for result in RESULTS if result["failed"]] == []
    assert [result for result in RESULTS if result.get("sim") is not None and result["sim"]["failed"]] == []
    assert all(result["passed"] > 1500 for result in RESULTS)
    assert minors("torch") == {"2.11", "2.12", "2.13", "2.14", "2.15"}
    assert minors("torch", quick=False) >= {"2.11", "2.15"}  # `.ci/run` runs all on the pinned one, at each change
    assert minors("python") == {"3.11", "3.12", "3.13"}
    assert {result["lightning"] for result in RESULTS} >= {"2.6.4", "2.6.6"}
