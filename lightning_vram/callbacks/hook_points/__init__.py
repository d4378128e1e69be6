"""Where in Lightning's run our callbacks act, and what they ask of it. May import: core, memory.

``before_strategy_setup`` changes a module before it is wrapped, ``around_step`` enters something around each step,
``fit_technique`` is a callback that does both and undoes it.
"""
