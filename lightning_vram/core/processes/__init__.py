"""This process in a job: a clean exit, the NUMA node of its device, and the signals by which it is stopped.

SLURM sends SIGUSR1 and SIGTERM to all processes of a step. Python runs a handler between two bytecodes of the main
thread, which may hold locks or be within a collective: to wait for another rank there can hang the job (Lightning
#21406). So handlers only record the signal, and code that can act on it asks for it.

May import: core.ranks and what is below it, memory.
"""
