"""Follow every tensor through a step: live bytes at each moment, by kind and by module."""
