"""The state of a module before a forward or a step, to go back to. May import: the rooms of core below it, memory."""
