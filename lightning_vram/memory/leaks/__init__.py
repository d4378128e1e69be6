"""Find memory that grows with the steps of a training, what made it, and which attribute keeps it.

``counting`` asks the allocators, ``growth`` tells steady growth from noise: both at each step. Where memory grows,
``watch`` notes what is born in one step, and ``holders`` names who keeps what is still there many steps later.
``attributes`` measures what holds more and more though nothing of a step stays.
``search`` says when. May import: the other rooms of memory.
"""
