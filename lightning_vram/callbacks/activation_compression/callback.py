"""Save activations in fewer bytes: lossless, or with a measured loss in chosen layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice, check_positive_int
from lightning_vram.callbacks.hook_points import AroundStep, Depth, FitTechnique, refuse_moved_parameters
from lightning_vram.core.layers import check_layers, select_layers
from lightning_vram.core.tensors.codecs import LOSSY_FORMATS
from lightning_vram.memory.units import parse_bytes
from lightning_vram.private_names.lightning import ddp_arguments
from lightning_vram.techniques.activation_compression import CompressionStage, gradient_cosine


class ActivationCompression(FitTechnique):
    """Store saved activations in fewer bytes: exact by default, in low precision with ``lossy``.

    By default, masks of ReLU and dropout are stored as bits, indices of pooling and sorting as small integers, and
    memory that is saved twice is stored once: weights, gradients, buffers and random numbers are bitwise identical to
    the baseline. Prefer ``InPlaceFusion`` to this where it works: it saves more. With ``lossy``, activations of chosen
    layers lose precision for the backward only; the forward stays exact, and gradients are approximate.

    Args:
        lossless: Whether to apply the exact encodings.
        lossy: Format of the other activations of ``layers``: ``"bf16"``, ``"fp8"`` (e4m3) or ``"int8"``; ``"fp8"`` and
            ``"int8"`` have one scale per block. ``None``: unchanged.
        layers: Where ``lossy`` applies: ``"auto"`` for the repeated blocks of the model, class names, module names,
            globs or classes, as in ``ActivationCheckpointing``. Only with ``lossy``.
        block_size: Number of consecutive elements that share a scale.
        min_bytes: Smaller tensors are stored unchanged: an ``int``, or text such as ``"4KiB"``.
        gradient_cosine_every_n_batches: Log ``vram/gradient_cosine`` every n batches: the cosine similarity of the
            exact gradient of the batch and the approximate one. Costs two extra backwards and the memory of the exact
            activations, in that batch. ``None``: never. Only with ``lossy``; not with FSDP2, nor with
            ``DDPStrategy(static_graph=True)``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed, or contradicts another.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import ActivationCompression
        >>> trainer = pl.Trainer(callbacks=[ActivationCompression(lossy="int8", layers="net.blocks.*")], logger=False)
    """

    def __init__(
        self,
        lossless: bool = True,  # noqa: FBT001, FBT002
        lossy: Literal["bf16", "fp8", "int8"] | None = None,
        layers: str | type[nn.Module] | Sequence[str | type[nn.Module]] = "auto",
        block_size: int = 128,
        min_bytes: int | str = 1024,
        gradient_cosine_every_n_batches: int | None = None,
    ) -> None:
        check_bool("ActivationCompression(lossless)", lossless)
        check_choice("ActivationCompression(lossy)", lossy, (*LOSSY_FORMATS, None))
        check_layers("ActivationCompression(layers)", layers)
        check_positive_int("ActivationCompression(block_size)", block_size)
        if gradient_cosine_every_n_batches is not None:
            check_positive_int(
                "ActivationCompression(gradient_cosine_every_n_batches)", gradient_cosine_every_n_batches
            )
        if lossy is None:
            _refuse_without_loss(lossless, layers, gradient_cosine_every_n_batches)
        self.lossless = lossless
        self.lossy = lossy
        self.layers = layers
        self.block_size = block_size
        self.min_bytes = parse_bytes(min_bytes, "ActivationCompression(min_bytes)")
        self.gradient_cosine_every_n_batches = gradient_cosine_every_n_batches
        self.gradient_cosine: float | None = None
        """Measured last."""
        self._stage: CompressionStage | None = None
        self._contexts: list[AroundStep] = []
        self._is_measured = False  # whether the current batch is measured

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        refuse_moved_parameters("ActivationCompression", trainer, "saved tensors are views of")
        if self.gradient_cosine_every_n_batches is None:
            return
        name, strategy = "ActivationCompression(gradient_cosine_every_n_batches)", trainer.strategy
        if hasattr(type(strategy), "device_mesh"):  # ModelParallelStrategy, fsdp_offload
            raise MisconfigurationException(
                f"{name} does not work with {type(strategy).__name__}: "
                "the hooks of FSDP2 move parameters in every backward. Measure on a single device or with 'ddp'."
            )
        if isinstance(strategy, DDPStrategy) and ddp_arguments(strategy).get("static_graph"):
            raise MisconfigurationException(
                f"{name} does not work with DDPStrategy(static_graph=True): DDP learns the graph from the first "
                "backward and would no longer average gradients. Leave static_graph out, or measure in a separate run."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        every_n_batches = self.gradient_cosine_every_n_batches
        is_due = every_n_batches is not None and batch_idx % every_n_batches == 0
        self._is_measured = is_due and any(parameter.requires_grad for parameter in pl_module.parameters())

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_stage": None, "_contexts": [], "_is_measured": False}  # a copy is not part of any run

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        pl_module = trainer.lightning_module
        try:
            self._stage = CompressionStage(
                pl_module,
                lossless=self.lossless,
                lossy=self.lossy,
                layers=select_layers(pl_module, self.layers).modules() if self.lossy is not None else None,
                block_size=self.block_size,
                min_bytes=self.min_bytes,
            )
        except ValueError as error:
            raise MisconfigurationException(f"ActivationCompression: {error}") from None
        around: dict[str, Callable[..., Any]] = {"training_step": lambda *_, **__: self._step()}
        if self.gradient_cosine_every_n_batches is not None:
            around["backward"] = lambda loss, *_, **__: self._measure(trainer, loss)
        for name, context in around.items():
            self._contexts.append(AroundStep(trainer.strategy, name, Depth.COMPRESSION, context))

    @contextmanager
    def _step(self) -> Iterator[None]:
        assert self._stage is not None
        self._stage.keeps_exact = self._is_measured
        with self._stage:
            yield

    @contextmanager
    def _measure(self, trainer: pl.Trainer, loss: Tensor) -> Iterator[None]:
        if self._is_measured and self._stage is not None:
            self._is_measured = False  # in one backward of the batch
            # The plugin scales the loss later; unscaled gradients in float16 would vanish.
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scaled = scaler.scale(loss) if scaler is not None else loss
            self.gradient_cosine = gradient_cosine(self._stage, scaled, trainer.lightning_module.parameters())
            for logger in trainer.loggers:
                logger.log_metrics({"vram/gradient_cosine": self.gradient_cosine}, step=trainer.global_step)
        yield

    @override
    def _undo(self) -> None:
        while self._contexts:
            self._contexts.pop().remove()
        self._stage = None
        self._is_measured = False


def _refuse_without_loss(lossless: bool, layers: Any, every_n_batches: int | None) -> None:  # noqa: FBT001
    if not lossless:
        raise ValueError(
            "ActivationCompression(lossless=False, lossy=None) does nothing. Leave lossless out, or choose "
            "lossy='bf16', 'fp8' or 'int8'."
        )
    if every_n_batches is not None or layers != "auto":
        name = "layers" if layers != "auto" else "gradient_cosine_every_n_batches"
        raise ValueError(f"ActivationCompression({name}) needs lossy='bf16', 'fp8' or 'int8', got lossy=None.")
