"""Mix a class into another so that objects can take the result for their class.

Python lets an object change its class only where both keep attributes in the same place. A class whose first base has
no ``__dict__`` (``class Model(ABC, nn.Module)``, ``Generic[T]``) keeps them right behind that base; a mixin that comes
before it has to do so, too.
"""


def mixin_for(mixin: type, original: type) -> type:
    """Return ``mixin``, or a class of its own derived from it, to be the first base beside ``original``.

    Args:
        mixin: Derives from ``object`` alone.
        original: The class of an object whose new class has both as its bases.
    """
    kind = original
    while kind.__base__ is not None and kind.__base__.__dictoffset__:
        kind = kind.__base__
    start = kind.__base__
    if start is None or start is object:
        return mixin
    # Generic refuses to be a base without parameters, unless it reads of other bases as they were written
    return type(start)(mixin.__name__, (start, mixin), {"__orig_bases__": (mixin,)})
