"""Files of results of ``python -m tests.benchmarks`` as people see them: tables and pictures.

``lightning-vram report --benchmarks results/*.json -o pictures``
"""

from lightning_vram.report.benchmarks.draw import drawable as drawable
from lightning_vram.report.benchmarks.draw import save_pictures as save_pictures
from lightning_vram.report.benchmarks.results import ResultFile as ResultFile
from lightning_vram.report.benchmarks.results import read_results as read_results
from lightning_vram.report.benchmarks.tables import result_tables as result_tables
