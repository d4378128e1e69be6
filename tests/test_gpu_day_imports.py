"""Items of a day on a GPU are forked from a process that has imported them all: it must not have opened CUDA's driver.

CUDA cannot be initialized again after a fork, and asking for the number of devices opens the driver.
"""

import subprocess
import sys

import pytest
from support.parts import ROOT

SPY = """
import os
import torch

if not torch.cuda._is_compiled():
    import torch._dynamo  # it imports more where there is CUDA
calls = []
torch._C._cuda_getDeviceCount = lambda: calls.append("devices were counted") or 0  # now any build counts as CUDA's
torch.cuda._lazy_init = lambda: calls.append("CUDA was initialized")
import tests.benchmarks.gpu_day.__main__
print(calls)
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # Lightning counts by NVML, which opens no driver
torch.cuda.is_available()
print(calls)
"""


@pytest.mark.slow
def test_importing_the_items_opens_no_driver():
    command = [sys.executable, "-W", "ignore", "-c", SPY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    while_importing, after_a_question = done.stdout.splitlines()
    assert while_importing == "[]"
    assert after_a_question == "['devices were counted']"  # the spy sees what it is there for
