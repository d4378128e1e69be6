"""Files of results: what is taken, and what is refused in one line."""

import pytest
from support.parts import ROOT

from tests.benchmarks.report import read_results


def test_all_files_that_are_kept_are_read():
    files = [read_results(path) for path in sorted((ROOT / "tests" / "benchmarks" / "results").glob("*.json"))]
    rows = {file.path.name: len(file.rows) for file in files}
    assert rows["memory_cpu.json"] >= 30
    assert rows["recomputation_cpu.json"] == 18 + 3  # under names of its own, not "rows"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "{path} is not a file of results: it is not JSON."),
        ("[1]", '{path} is not a file of results: those have "machine" and "rows".'),
        ('{"machine": {}}', "{path} has no rows: nothing was measured."),
        ('{"machine": {}, "rows": [{}, 3]}', "{path}, row 2: a row has names and values, got 3."),
        (
            '{"machine": {}, "rows": [{"peak_bytes": "1 GiB"}]}',
            "{path}, row 1: peak_bytes must be a whole number, 0 or more, got '1 GiB'.",
        ),
        (
            '{"machine": {}, "rows": [{"seconds_per_step": NaN}]}',
            "{path}, row 1: seconds_per_step must be a number above 0, got nan.",
        ),
        ('{"machine": {}, "rows": [{"by": 3}]}', "{path}, row 1: by must be text, got 3."),
    ],
)
def test_what_is_no_file_of_results_is_refused(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r".") as caught:
        read_results(path)
    assert str(caught.value) == message.replace("{path}", str(path))
