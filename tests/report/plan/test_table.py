"""What ``print(plan)`` says, line by line."""

from dataclasses import replace

from support.consoles import assert_every_number_is_whole_at_80_columns
from support.plans import FUSION, OFFLOAD, checkpointing, measured, plan_of, tried

from lightning_vram.planner.scheme import Part
from lightning_vram.report.plan import ShownPlan, plan_table, shown

TABLE = """\
Fits with this plan: 1.99 GiB of 2.00 GiB on H100, 1.15x the step time

          memory  of budget  step time   results  configuration
  1     3.91 GiB     195.3%      1.00x     exact  baseline
  2     2.93 GiB     146.5%      1.10x     exact  InPlaceFusion
* 3     1.99 GiB      99.6%      1.15x     exact  InPlaceFusion +
                                                  ActivationCheckpointing(budget=950MiB)
  4     1.94 GiB      97.2%      1.20x     exact  ActivationCheckpointing(budget=905MiB)
  5     1.46 GiB      73.2%      1.50x     exact  ActivationOffload
  6  1000.00 MiB      48.8%      1.35x     exact  ActivationCheckpointing
  7   700.00 MiB      34.2%      1.80x  lossless  MicroBatching(size=2)

* the plan. Step times are modelled for this device, relative to the baseline."""


def test_each_row():
    assert str(plan_of()) == TABLE


def test_a_narrow_terminal_cuts_no_number():
    assert_every_number_is_whole_at_80_columns(plan_table(plan_of()))


def test_long_names_are_whole_and_no_markup():
    part = Part("p.Part[red]", {"nvme_path": "/scratch/" + "x" * 40, "layers": "a.b.*"})
    parts = (part, FUSION, OFFLOAD, checkpointing("950MiB"))
    text = str(plan_of((tried()[0], measured(*parts, mib=10, ms=200))))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "Part[red]" in text
    assert "ActivationCheckpointing(budget=950MiB)" in text


def test_what_a_function_plans_can_be_printed():
    def plan(module: str, *, device: str, on_progress: object):
        """Plan."""
        return replace(plan_of(), own={"module": module, "device": device})

    found = shown(plan, ShownPlan)("m", device="d")
    assert found.own == {"module": "m", "device": "d"}
    assert str(found).startswith("Fits with this plan")
    assert found.is_needed
    assert shown(plan, ShownPlan).__doc__ == "Plan."
