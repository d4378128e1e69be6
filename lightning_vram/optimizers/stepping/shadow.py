"""Let another callable stand in for a method of one optimizer, for a time."""

from lightning_vram.core.surgery.shadow import Shadow


class OptimizerShadow(Shadow):
    """As :class:`~lightning_vram.core.surgery.shadow.Shadow`, also for the ``step`` that learning rate schedules watch.

    Copies and pickles of an optimizer leave its instance attributes out, and so a stand-in too.
    """

    _wrapped_by_lr_sched = True  # else a scheduler warns of an overridden step, or cannot wrap it
