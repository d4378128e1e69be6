"""The cells of ``nn.LSTM`` and ``nn.GRU``: on an accelerator one operator each, of which PyTorch brings CUDA's."""

import torch
from torch import Tensor

Maybe = Tensor | None


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Maybe = None, hidden_bias: Maybe = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates += input_bias + hidden_bias
    entering, kept, new, shown = gates.chunk(4, 1)
    for gate in (entering, kept, shown):
        gate.sigmoid_()
    new.tanh_()
    cy = kept * cx + entering * new
    return shown * cy.tanh(), cy, gates


def lstm_cell_backward(
    grad_hy: Maybe, grad_cy: Maybe, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Maybe]:
    entering, kept, new, shown = gates.chunk(4, 1)
    cell = cy.tanh()
    grad_cell = torch.zeros_like(cy) if grad_cy is None else grad_cy
    grad_hidden = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_cell = grad_cell + grad_hidden * shown * (1 - cell * cell)
    grad_gates = torch.cat(
        [
            grad_cell * new * entering * (1 - entering),
            grad_cell * cx * kept * (1 - kept),
            grad_cell * entering * (1 - new * new),
            grad_hidden * cell * shown * (1 - shown),
        ],
        1,
    )
    return grad_gates, grad_cell * kept, grad_gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Maybe = None, hidden_bias: Maybe = None
) -> tuple[Tensor, Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    resetting, keeping, new = input_gates.chunk(3, 1)
    hidden_resetting, hidden_keeping, hidden = hidden_gates.chunk(3, 1)
    resetting, keeping = (resetting + hidden_resetting).sigmoid(), (keeping + hidden_keeping).sigmoid()
    new = (new + resetting * hidden).tanh()
    return new + keeping * (hx - new), torch.cat([resetting, keeping, new, hx, hidden], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Maybe, Maybe]:
    resetting, keeping, new, hx, hidden = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - keeping) * (1 - new * new)
    grad_keeping = grad_hy * (hx - new) * keeping * (1 - keeping)
    grad_resetting = grad_new * hidden * resetting * (1 - resetting)
    grad_input = torch.cat([grad_resetting, grad_keeping, grad_new], 1)
    grad_hidden = torch.cat([grad_resetting, grad_keeping, grad_new * resetting], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * keeping, *biases


library = torch.library.Library("aten", "IMPL")  # undone when it is collected
for _name, _function in {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}.items():
    library.impl(_name, _function, "PrivateUse1")
