"""Loss scale, layers that stay in float32, norms in 16 bits, casts of weights. May import: core, memory."""
