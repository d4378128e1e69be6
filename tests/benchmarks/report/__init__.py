"""Files of results of ``python -m tests.benchmarks`` as people see them: tables and pictures.

``python -m tests.benchmarks.report results/*.json -o pictures``
"""

from tests.benchmarks.report.draw import drawable as drawable
from tests.benchmarks.report.draw import save_pictures as save_pictures
from tests.benchmarks.report.results import ResultFile as ResultFile
from tests.benchmarks.report.results import read_results as read_results
from tests.benchmarks.report.tables import result_tables as result_tables
