"""Private names of operators that our tables know, for what they cost and what their backwards read.

They are looked up by name; one that is not there is passed over.

* ``torch.ops.aten._unsafe_view``: views; their results are taken from their argument | 2.11 - | they are kept instead
  of made again
* ``torch.ops.aten._reshape_alias``: views; their results are taken from their argument | 2.11 - | they are kept instead
  of made again
* ``torch.ops.aten._softmax``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._log_softmax``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._adaptive_avg_pool2d``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._adaptive_avg_pool3d``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._to_copy``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._upsample_nearest_exact1d``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._upsample_nearest_exact2d``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._upsample_nearest_exact3d``: cheap; made again in the backward | 2.11 - | their results are kept
* ``torch.ops.aten._weight_norm_interface``: cheap; made again in the backward | 2.11 - | its results are kept
* ``torch.ops.aten._fused_rms_norm``: cheap; made again in the backward | 2.11 - | its results are kept
* ``torch.ops.aten._native_batch_norm_legit``: cheap; made again in the backward | 2.11 - | its results are kept
* ``torch.ops.aten._cdist_forward``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._ctc_loss``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._euclidean_dist``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_abs``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_lgamma``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_log``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_log10``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_log1p``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_log2``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_maximum``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_minimum``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_pow``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._pdist_forward``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_norm``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_reciprocal``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_rsqrt``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._foreach_sqrt``: its backward magnifies errors | 2.11 - | what it saves may be compressed
* ``torch.ops.aten._addmm_activation``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._int_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_mm_v2``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._grouped_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_grouped_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_grouped_mm_v2``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._weight_int8pack_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._weight_int4pack_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._weight_int4pack_mm_for_cpu``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._mixed_dtypes_linear``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._sparse_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._sparse_addmm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._cslt_sparse_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._sparse_semi_structured_mm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._sparse_semi_structured_addmm``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._sparse_semi_structured_linear``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._convolution``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.aten._mps_convolution``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.aten._mps_convolution_transpose``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.aten._conv_depthwise2d``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.aten._slow_conv2d_forward``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.aten._nnpack_spatial_convolution``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.mkldnn._linear_pointwise``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.mkldnn._convolution_pointwise``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.mkldnn._convolution_transpose_pointwise``: a convolution | 2.11 - | it counts as cheap
* ``torch.ops.mkl._mkl_linear``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._cudnn_rnn``: a recurrent kernel | 2.11 - | it counts as cheap
* ``torch.ops.aten._lstm_mps``: a recurrent kernel | 2.11 - | it counts as cheap
* ``torch.ops.aten._thnn_fused_lstm_cell``: a recurrent kernel | 2.11 - | it counts as cheap
* ``torch.ops.aten._thnn_fused_gru_cell``: a recurrent kernel | 2.11 - | it counts as cheap
* ``torch.ops.aten._trilinear``: a matrix product | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_dot_product_flash_attention``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_dot_product_flash_attention_for_cpu``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_dot_product_efficient_attention``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_dot_product_cudnn_attention``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_dot_product_fused_attention_overrideable``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._scaled_dot_product_attention_math_for_mps``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._flash_attention_forward``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._efficient_attention_forward``: attention | 2.11 - | it counts as cheap
* ``torch.ops.aten._cudnn_attention_forward``: attention | 2.11 - | it counts as cheap
* ``aten._linalg_``: what names of linear algebra begin with | 2.11 - | what they save may be compressed
* ``torch.ops.aten._foreach_div``: its backward divides | 2.11 - | what it saves may be compressed
"""

VIEWS = "_unsafe_view _reshape_alias"
ELEMENTWISE = "_softmax _log_softmax _adaptive_avg_pool2d _adaptive_avg_pool3d"
GROWING = "_to_copy _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
SEVERAL_RESULTS = "_weight_norm_interface"
NORMS = "_fused_rms_norm"
BATCH_NORMS = "_native_batch_norm_legit"
EXACT_ARGUMENTS = (
    "_cdist_forward _ctc_loss _euclidean_dist _foreach_abs _foreach_lgamma _foreach_log _foreach_log10 "
    "_foreach_log1p _foreach_log2 _foreach_maximum _foreach_minimum _foreach_pow _pdist_forward"
)
EXACT_RESULTS = (
    "_cdist_forward _euclidean_dist _foreach_norm _foreach_pow _foreach_reciprocal _foreach_rsqrt _foreach_sqrt "
    "_log_softmax _pdist_forward"
)
PRODUCTS = (
    "_addmm_activation _int_mm _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 "
    "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _mixed_dtypes_linear"
)
SPARSE_PRODUCTS = (
    "_sparse_mm _sparse_addmm _cslt_sparse_mm _sparse_semi_structured_mm _sparse_semi_structured_addmm "
    "_sparse_semi_structured_linear"
)
CONVOLUTIONS = (
    "_convolution _mps_convolution _mps_convolution_transpose _conv_depthwise2d _slow_conv2d_forward "
    "_nnpack_spatial_convolution"
)
MKLDNN_PRODUCTS = "_linear_pointwise"
MKLDNN_CONVOLUTIONS = "_convolution_pointwise _convolution_transpose_pointwise"
MKL_PRODUCTS = "_mkl_linear"
RECURRENT = "_cudnn_rnn _lstm_mps _thnn_fused_lstm_cell _thnn_fused_gru_cell"
OTHER_PRODUCTS = "_trilinear"
ATTENTIONS = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps "
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward"
)
ACTIVATED_PRODUCT = "_addmm_activation"
LINEAR_ALGEBRA = "_linalg_"
"""What names of operators begin with."""
DIVIDE_EACH, NORM_OF_EACH, COPY_TO = "_foreach_div", "_foreach_norm", "_to_copy"
