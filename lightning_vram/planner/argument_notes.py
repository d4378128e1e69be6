"""What arguments of parts save and cost, for who reads or edits the file of a plan."""

ARGUMENT_NOTES = {
    "budget": "for activations on the device: more recomputes less, and takes as much more memory",
    "remedies": "how it is kept: recomputing takes time, offloading takes the bus and host memory",
    "offload_bytes": "of a forward to the host, at most: more is recomputed less, until steps wait for the bus",
    "size": "samples at once: fewer take less memory and more time",
    "lossy": "what is kept takes 8 bits per value, with a bounded error in the gradients",
    "offload": "optimizer: states are on the host; params: weights, too, which saves more and copies more",
    "bits": "of a number: 8, or 4, which saves more and rounds more",
    "master": "saves 4 of 18 bytes of the host per parameter, and gives the same bits",
    "host_state": "saves 4 (bf16) or 6 (8bit) bytes of the host per parameter, costs the equality of bits",
    "precision": "of the computation",
    "recast_in_backward": "saves the 16-bit copies of weights, costs a second cast",
    "parameters": "saves 6 of 16 bytes per parameter with AdamW, costs the equality of bits",
}
