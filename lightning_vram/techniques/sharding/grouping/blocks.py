"""Find the parts of a model that are worth a gathering of their own: its blocks, and what is large beside them."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from lightning_vram.techniques.sharding.grouping.outside_access import find_entered_modules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_COARSE_BLOCK = 4  # a block with more than this fraction of all parameters is looked into
_COARSE_PART = 2  # and any other part with more than this

Group = list[nn.Module]


def find_sharding_blocks(
    root: nn.Module, min_params: int, read: set[nn.Module], skipped: set[nn.Module]
) -> list[Group]:
    """Cut ``root`` into groups of modules that are gathered together, in its order; none lies in another.

    A model's own word comes first (``_no_split_modules`` of transformers), then the children of a container that has
    several of one class. Small ones that follow one another in an ``nn.Sequential`` or ``nn.ModuleList`` are put
    together; of the rest every outermost part that is large enough is a group: embeddings, heads.

    Args:
        root: The whole model, which is not itself in a group.
        min_params: Number of elements below which a group is not worth its messages.
        read: Modules that cannot be a group on their own.
        skipped: Modules to leave alone.
    """
    finder = _BlockFinder(root, min_params, read, skipped)
    finder.split(root)
    return finder.groups


class _BlockFinder:
    def __init__(self, root: nn.Module, min_params: int, read: set[nn.Module], skipped: set[nn.Module]) -> None:
        self.groups: list[Group] = []
        self._min_params = min_params
        self._read = read
        self._entered = find_entered_modules(root)
        self._done = set(skipped)
        self._sizes: dict[nn.Module, int] = {}
        self._declared = set(_find_declared(root))
        self._blocks = self._declared.union(*map(_find_repeated, root.modules())) - self._read
        self._total = self._size(root)

    def split(self, module: nn.Module) -> None:
        """Find the groups inside ``module``, which is none itself."""
        run: Group = []
        last: Group | None = None  # a group that just ended
        for child in module.children():
            if child in self._done or not self._size(child):
                continue
            self._done.add(child)
            if not self._goes_with_siblings(child, module):
                run, last = [], None
                self._place(child)
                continue
            run.append(child)
            if sum(map(self._size, run)) >= self._min_params:
                self.groups.append(run)
                run, last = [], run
        if last is not None:
            last += run

    def _place(self, module: nn.Module) -> None:
        """Make a group of ``module`` alone or of parts of it, or leave it to the root."""
        if self._size(module) < self._min_params:
            return
        num_before = len(self.groups)
        if self._is_looked_into(module):
            self.split(module)
        if len(self.groups) == num_before and not {module} & (self._read | self._entered):
            self.groups.append([module])

    def _goes_with_siblings(self, child: nn.Module, parent: nn.Module) -> bool:
        """Whether the siblings of ``child`` run right before and after it, all of them."""
        in_list = isinstance(parent, nn.ModuleList) and child in self._blocks
        in_sequence = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        return (in_list or in_sequence) and child not in self._read and not self._is_looked_into(child)

    def _is_looked_into(self, module: nn.Module) -> bool:
        if module in self._read or module in self._declared:
            return module in self._read
        if self._size(module) < 2 * self._min_params:
            return module in self._entered
        inner = {part for part in module.modules() if part is not module}
        if inner & self._declared or module in self._entered:
            return True
        fraction = self._total / self._size(module)
        if module in self._blocks:  # a Sequential surely runs all of its children; a block's list of experts does not
            return fraction < _COARSE_BLOCK and any(_is_staged(part) for part in module.modules())
        return fraction < _COARSE_PART or any(_is_composite(part) for part in inner & self._blocks)

    def _size(self, module: nn.Module) -> int:
        if module not in self._sizes:
            self._sizes[module] = sum(parameter.numel() for parameter in module.parameters())
        return self._sizes[module]


def _find_declared(root: nn.Module) -> Iterator[nn.Module]:
    """Modules of the classes that transformers' models do not want split."""
    names: set[str] = set()
    for module in root.modules():
        declared = getattr(module, "_no_split_modules", None)
        names.update(declared if isinstance(declared, Iterable) else ())
    return (module for module in root.modules() if module is not root and type(module).__name__ in names)


def _find_repeated(container: nn.Module) -> Group:
    """Children of a container that are of one class."""
    if not isinstance(container, _CONTAINERS):
        return []
    children = [child for child in container.children() if any(True for _ in child.parameters())]
    counts = Counter(map(type, children))
    return [child for child in children if counts[type(child)] > 1]


def _is_staged(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and any(map(_is_composite, _find_repeated(module)))


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())
