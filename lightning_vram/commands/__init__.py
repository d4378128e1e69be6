"""The subcommands of ``lightning-vram`` that Lightning's own command line does not have, and the parser of all."""
